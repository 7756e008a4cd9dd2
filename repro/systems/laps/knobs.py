"""The knobs of a cell of prefill instances: what each is, and which systems heed it."""

from __future__ import annotations

from collections.abc import Mapping

from engines.errors import UserError
from repro.runs.cell import Scalar
from repro.systems.ar.knobs import Kind

INSTANCES: Mapping[str, Kind] = {
    "model": str,
    "num_instances": int,
    "kappa": float,
    "overlap": str,
    "layer_launch_s": float,
    "cache": str,
    "reprefills_answer": bool,
    "decode": str,
}
"""``kappa``: how much longer a step with short and long prompts takes than its parts. ``decode``: none (turns end with
their first token, the default), apart (on as many other GPUs) or mixed (on the instances themselves); with either the next turn
comes after the whole answer."""
WORKLOAD: Mapping[str, Kind] = {
    "num_prompts": int,
    "clients": int,
    "think_s": float,
    "answer_tokens": int,
    "arrivals": str,
    "burstiness": float,
    "dataset_source": str,
    "dataset_path": str,
    "min_tokens": int,
    "max_tokens": int,
    "long_clients": int,
    "short_clients": int,
}
"""``num_prompts`` counts turns. ``clients`` hold conversations, one after the other, in a closed loop; a rate is of turns, whatever
became of those before. ``long_clients`` and ``short_clients``: two closed loops, of prompts above 1,000 tokens and below 64 (LAPS
Figures 1 and 3)."""
OBJECTIVE: Mapping[str, Kind] = {"slo_ttft_s": float, "deadlines": bool, "boundary": int, "transient": bool}
"""``deadlines``: whether policies know the objective; without, they serve offline. ``boundary``: fewer tokens are short, for LAPS and in tables. ``transient`` accepts a rate that the instances cannot serve."""
COMMON: Mapping[str, Kind] = {**INSTANCES, **WORKLOAD, **OBJECTIVE}
NOTES = frozenset({"basis"})
"""Said about a cell, not asked of it."""

GRAPHS: Mapping[str, Kind] = {"graphs": str, "graph_budget_gb": float}
LAPS: Mapping[str, Kind] = {
    **GRAPHS,
    "wait": str,
    "min_window_s": float,
    "max_window_s": float,
    "long_dispatch": str,
    "class_rule": str,
    "chunk_tokens": int,
    "max_long_wait_s": float,
    "num_short": int,
    "controller": str,
    "pooling": str,
}
"""``num_short``: instances of the short pool where there are several (a quarter of them by default). ``controller``: mended, printed,
or off for pools that stay as they are."""
SGLANG: Mapping[str, Kind] = {"max_num_batched_tokens": int, "routing": str, "prefill_graphs": bool}
VLLM: Mapping[str, Kind] = {"max_num_batched_tokens": int, "routing": str}
RESERVE: Mapping[str, Kind] = {**GRAPHS, "share": float, "longest_wait_s": float, "aging": float}


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
        is_kind = isinstance(value, int | float if kind is float else kind)
        if not is_kind or (isinstance(value, bool) and kind is not bool):
            words = {int: "a whole number", float: "a number", str: "a word", bool: "true or false"}
            raise UserError(f"{name}={value!r} must be {words[kind]}")
