"""The published diffusion-LLM methods that we compare dLLM-Serve with, one module each."""
