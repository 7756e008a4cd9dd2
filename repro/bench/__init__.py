"""Scripts that time steps, kernels and servers, and hold composed steps against measured ones: ``python -m repro.bench.NAME``."""
