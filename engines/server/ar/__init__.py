"""The autoregressive engine behind the server's protocol."""
