"""Checks that all works as it should: golden cases, precision, committed results, this machine."""
