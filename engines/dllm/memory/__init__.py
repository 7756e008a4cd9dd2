"""The memory plan (dLLM-Serve §4.2-4.3): computed from shapes, or measured."""
