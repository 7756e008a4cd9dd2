"""Workloads: data sets, their length statistics, and arrival processes."""
