"""AMPD: multi-round inference over disaggregated serving (arXiv:2602.14516)."""
