"""Files of other tools: their results as our runs, our runs in their formats."""
