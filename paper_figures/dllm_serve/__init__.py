"""Figures of dLLM-Serve (arXiv:2512.17077)."""
