"""What a researcher does with runs: grids of them, what is in a folder, and whether two sides differ."""
