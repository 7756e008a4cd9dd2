"""Device tools that every real executor needs: timers, transfers, a memory limit."""
