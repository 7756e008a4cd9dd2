"""Serving of block-diffusion models: bidirectional within a block of tokens, causal across blocks."""
