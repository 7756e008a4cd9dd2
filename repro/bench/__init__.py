"""Scripts that time steps, kernels and servers, and compare composed steps with measured ones: ``python -m repro.bench.NAME``."""
