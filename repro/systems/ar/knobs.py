"""The knobs of an autoregressive cell: what each is, and which systems heed it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from engines.errors import UserError, require
from repro.runs.cell import Scalar

Kind = type[int] | type[float] | type[str] | type[bool]

CLUSTER: Mapping[str, Kind] = {"model": str, "num_gpus": int, "constants": str, "deployment": str}
"""``deployment``: workers as ``P:TP4x2 D:TP8x1`` or ``TP8x2``; ``planner`` for AMPD's; ``search`` for the best of
several, found by simulating other samples of the workload."""
WORKLOAD: Mapping[str, Kind] = {
    "num_prompts": int,
    "dataset_source": str,
    "dataset_path": str,
    "arrivals": str,
    "burstiness": float,
    "delay_mean_s": float,
    "counted": str,
    "meets_totals": bool,
    "planning_rate": float,
}
"""``num_prompts`` counts sessions. ``meets_totals`` scales recorded ones to the means of the trace's card: a card's own are by
default, those of a ``dataset_path`` are not. ``planning_rate`` is what ``deployment=planner`` expects, sessions/s;
by default the cell's own rate."""
OBJECTIVE: Mapping[str, Kind] = {
    "slo_ttft_s": float,
    "slo_itl_s": float,
    "slo_scope": str,
    "ttft_rule": str,
    "itl_stat": str,
    "transient": bool,
}
"""``transient`` accepts runs whose arrivals outrun the workers: their numbers are of this number of sessions alone."""
COMMON: Mapping[str, Kind] = {**CLUSTER, **WORKLOAD, **OBJECTIVE}
NOTES = frozenset({"basis"})
"""Said about a cell, not asked of it."""

AMPD: Mapping[str, Kind] = {
    "alpha": float,
    "beta": float,
    "w": int,
    "window_s": float,
    "adaptive_routing": bool,
    "prefill_reordering": bool,
    "route_order": str,
    "window": str,
    "dispatch": str,
    "router": str,
}
"""``router``: module:NAME of one's own, called as ``NAME(model=..., slo=..., seed=...)`` for every run."""
DYNAMO: Mapping[str, Kind] = {
    "dispatch": str,
    "conditional": str,
    "eff_isl_threshold": int,
    "eff_isl_ratio_threshold": float,
    "prefill_busy_threshold": float,
    "decode_busy_threshold": float,
}
VLLM: Mapping[str, Kind] = {"scheduling": str, "max_num_batched_tokens": int, "balance": str}
CONTINUUM: Mapping[str, Kind] = {**VLLM, "keep_s": float}


def check_knobs(system: str, own: Mapping[str, Kind], given: Mapping[str, Scalar]) -> None:
    """Refuse a knob that the system does not heed, or a value of another kind; null is the default."""
    known = {**COMMON, **own}
    for name, value in given.items():
        if name in NOTES or value is None:
            continue
        if name not in known:
            raise UserError(
                f"{name}={value!r} has no effect with system={system!r}: leave it out, or use one of {', '.join(known)}"
            )
        kind = known[name]
        is_kind = isinstance(value, kind) and (kind is bool or not isinstance(value, bool))
        if kind is float:
            is_kind = isinstance(value, int | float) and not isinstance(value, bool)
            require(
                not isinstance(value, int) or abs(value) < 10**15,
                f"{name} is a number of more than 15 digits: give a smaller one",
            )
        if not is_kind:
            words = {int: "a whole number", float: "a number", str: "a word", bool: "true or false"}
            raise UserError(f"{name}={value!r} must be {words[kind]}")


def pick(given: Mapping[str, Scalar], names: Iterable[str]) -> dict[str, Any]:
    """Those that are set."""
    return {name: given[name] for name in names if given.get(name) is not None}
