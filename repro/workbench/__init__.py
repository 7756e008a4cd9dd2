"""Tools for work with runs: grids of cells, the runs in a folder, and whether two sides differ."""
