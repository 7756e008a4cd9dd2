"""Which requests run in a step, and in which phase (dLLM-Serve §4.4)."""
