"""Diffusion-LLM systems: their settings, deployments and records."""
