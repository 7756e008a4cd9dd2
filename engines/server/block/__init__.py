"""The block-diffusion engine behind the server's protocol."""
