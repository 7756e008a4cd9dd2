"""AMPD's components, switched one at a time on the simulated cluster (AMPD §7.2, Figure 5)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from repro.runs.cell import Cell, Scalar
from repro.systems.platforms import Platform

Knobs = tuple[tuple[str, Scalar], ...]


@dataclass(frozen=True, kw_only=True)
class ClusterVariant:
    label: str
    knobs: Knobs = ()
    is_ours: bool = False
    """Not in the paper: this project's own extension."""

    def cell(self, where: Platform, trace: str, rate: float | None, seed: int, knobs: Knobs = ()) -> Cell:
        """All on the planner's deployment for the rate; arrivals may outrun it, as in the paper's runs."""
        return Cell(
            system="ampd",
            dataset=trace,
            platform=where.name,
            executor=where.executor,
            rate=rate,
            seed=seed,
            knobs=tuple({"transient": True, **dict(knobs), **dict(self.knobs)}.items()),
        )


_REMOTE: Knobs = (("adaptive_routing", False),)
_LOAD: Knobs = (("route_order", "load"),)

CLUSTER_COMPONENTS: Mapping[str, tuple[ClusterVariant, ...]] = MappingProxyType(
    {
        "routing": (
            ClusterVariant(label="always remote, shortest queue", knobs=_REMOTE),
            ClusterVariant(label="always remote, at random", knobs=(*_REMOTE, ("dispatch", "random"))),
            ClusterVariant(label="adaptive (Algorithm 1)"),
            ClusterVariant(label="adaptive, in order of load", knobs=_LOAD, is_ours=True),
            ClusterVariant(label="adaptive, by backlog", knobs=(("window", "backlog"),), is_ours=True),
            ClusterVariant(
                label="adaptive, in order of load, by backlog", knobs=(*_LOAD, ("window", "backlog")), is_ours=True
            ),
        ),
        "reordering": (
            ClusterVariant(label="first come, first served", knobs=(("prefill_reordering", False),)),
            ClusterVariant(label="Algorithm 2, w = 3"),
            ClusterVariant(label="Algorithm 2, w = 5", knobs=(("w", 5),)),
        ),
    }
)
"""The first of each is the component switched off."""
