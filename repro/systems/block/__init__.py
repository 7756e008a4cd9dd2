"""Block-diffusion systems."""
