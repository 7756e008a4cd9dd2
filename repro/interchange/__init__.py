"""Files of other tools: we import their results as runs, and export our runs in their formats."""
