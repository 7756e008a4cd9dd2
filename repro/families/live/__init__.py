"""AMPD on real workers of this machine: measured, and compared to its own simulator."""
