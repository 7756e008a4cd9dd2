"""The papers' figures, one module each: the grid of runs behind it and how they are drawn."""
