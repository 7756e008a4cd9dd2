"""The sparse KV cache (dLLM-Serve §4.5): which rows are kept."""
