"""Workloads: data sets, their length statistics, and arrival processes."""

from repro.workloads.arrivals import ArrivalConfig
from repro.workloads.card import DatasetCard, known_datasets, load_card
from repro.workloads.workload import Workload, WorkloadConfig, WorkloadProvenance, build_workload, fixed_workload

__all__ = [
    "ArrivalConfig",
    "DatasetCard",
    "Workload",
    "WorkloadConfig",
    "WorkloadProvenance",
    "build_workload",
    "fixed_workload",
    "known_datasets",
    "load_card",
]
