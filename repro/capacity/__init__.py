"""Capacity: the largest rate a deployment serves under objectives, and the fewest GPUs that serve a rate, by simulation."""
