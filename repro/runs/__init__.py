"""Runs: the cells that ask for them, how they are made, and how they are stored."""
