"""LAPS's figures and tables, and three of our own: the boundary, Reserve by load, and the mixing penalty that the paper needs."""
