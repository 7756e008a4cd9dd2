"""dLLM-Serve: logit-aware budgeting, phase-multiplexed scheduling, head-centric sparse KV cache."""
