"""Autoregressive serving systems that we compare AMPD with, as policies on the simulated cluster."""
