"""The real engine: a causal decoder over a paged KV pool, driven by the batching policies of the simulated cluster."""
