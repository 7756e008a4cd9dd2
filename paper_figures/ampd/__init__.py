"""Figures and tables of AMPD."""
