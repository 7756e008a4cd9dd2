"""The systems dLLM-Serve is compared with, on the same model code and the same step loop."""
