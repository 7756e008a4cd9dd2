"""Runs: what a cell asks for, how it is run, and what is stored of it."""
