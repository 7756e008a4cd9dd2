"""Steps made of measured kernels: tables of times that NVIDIA's AIConfigurator publishes, and what is composed of them."""
