"""LAPS: length-aware prefill (arXiv 2601.11589), and the policy built against it."""
