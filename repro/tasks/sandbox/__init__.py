"""Programs that a model wrote, run and judged in a jail that bubblewrap makes."""
