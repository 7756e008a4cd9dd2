"""GPUs: their datasheets, the peaks measured on one, and the roofline of a forward on it."""
