"""Reports about runs: figures, ablations, claims, fits, and the papers' own numbers."""
