"""Runs and judges programs that a model wrote, in a jail made by bubblewrap."""
