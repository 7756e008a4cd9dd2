"""Measured prefills: step times, the mixing penalty and LAPS's experiments on one torch worker."""
