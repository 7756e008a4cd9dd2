"""Autoregressive serving systems that AMPD is compared with, as policies on the simulated cluster."""
