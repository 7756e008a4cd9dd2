"""The systems that we compare dLLM-Serve with, on the same model code and the same step loop."""
