"""The offline planner: which degree and how many replicas for each phase (AMPD §5)."""
