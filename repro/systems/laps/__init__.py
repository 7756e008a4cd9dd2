"""LAPS, Reserve and what they are compared with: policies on prefill instances, simulated."""
