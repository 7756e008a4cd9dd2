"""Capacity: find, by simulation, the largest rate a deployment serves under objectives, or the fewest GPUs that serve a rate."""
