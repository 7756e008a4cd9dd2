"""Autoregressive serving systems on the simulated cluster: their settings, deployments and records."""
