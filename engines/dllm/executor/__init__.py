"""Executors, which run step plans on a torch model."""
