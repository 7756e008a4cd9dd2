"""Autoregressive decoding: sampling, and the engine on a paged pool (torch)."""
