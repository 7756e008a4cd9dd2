"""The diffusion-LLM engine behind the server's protocol."""
