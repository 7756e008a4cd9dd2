"""AMPD on real workers of this machine: measured, and held against its own simulator."""
