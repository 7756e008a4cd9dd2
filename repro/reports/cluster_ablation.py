"""AMPD's components, switched one at a time on the simulated cluster (AMPD §7.2, Figure 5)."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from types import MappingProxyType

from repro.reports.paired_ablation import Knobs, PairedVariant

# All on the planner's deployment for the rate.
_ampd = partial(PairedVariant, system="ampd")
_REMOTE: Knobs = (("adaptive_routing", False),)
_LOAD: Knobs = (("route_order", "load"),)

CLUSTER_COMPONENTS: Mapping[str, tuple[PairedVariant, ...]] = MappingProxyType(
    {
        "routing": (
            _ampd(label="always remote, shortest queue", knobs=_REMOTE),
            _ampd(label="always remote, at random", knobs=(*_REMOTE, ("dispatch", "random"))),
            _ampd(label="adaptive (Algorithm 1)"),
            _ampd(label="adaptive, in order of load", knobs=_LOAD, is_ours=True),
            _ampd(label="adaptive, by backlog", knobs=(("window", "backlog"),), is_ours=True),
            _ampd(label="adaptive, in order of load, by backlog", knobs=(*_LOAD, ("window", "backlog")), is_ours=True),
        ),
        "reordering": (
            _ampd(label="first come, first served", knobs=(("prefill_reordering", False),)),
            _ampd(label="Algorithm 2, w = 3"),
            _ampd(label="Algorithm 2, w = 5", knobs=(("w", 5),)),
        ),
    }
)
"""The first of each is the component switched off."""
