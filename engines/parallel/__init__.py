"""Tensor parallelism: one model divided among processes that run the same steps."""
