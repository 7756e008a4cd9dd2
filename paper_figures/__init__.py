"""The papers' figures, one module each: the grid of runs behind a figure, and how to draw them."""
