"""Autoregressive serving: sessions of several rounds, what a step costs, and a simulated cluster of workers."""
