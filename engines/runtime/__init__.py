"""What every real executor needs of a device: timers, transfers, a memory limit."""
