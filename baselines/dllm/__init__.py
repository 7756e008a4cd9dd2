"""The published diffusion-LLM methods dLLM-Serve is compared with, one module each."""
