"""The cost of a step on a GPU, by a roofline or by measured kernels."""
