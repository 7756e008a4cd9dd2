"""What is read off turns and steps of prefill instances (LAPS §4). TTFT is first token - arrival; shares are in [0, 1].

All of it is over the turns that count (repro.systems.laps.log), but for padding, graphs and busy time, which are over all steps. A turn
that never had its first token misses the objective.
"""

from __future__ import annotations

from collections.abc import Callable
from math import fsum
from typing import Any

import numpy as np
import numpy.typing as npt

from engines.ar.metrics import Floats
from repro.runs.metrics import Metric, distribution
from repro.runs.record import RunRecord
from repro.systems.laps.columns import INSTANCES, MOVES, STEPS
from repro.systems.laps.log import Window
from repro.systems.simulated import column, known

_Mask = npt.NDArray[np.bool_]
BUCKETS: tuple[tuple[str, int, float], ...] = (
    ("1-63", 1, 64),
    ("64-255", 64, 256),
    ("256-999", 256, 1000),
    ("1000+", 1000, np.inf),
)
"""Prompt tokens, from and below; of the data set, where a platform scales its lengths."""


def mask(record: RunRecord, name: str, value: object = True) -> _Mask:
    """Where a column of the requests has this value."""
    kept: dict[tuple[str, object], _Mask] = vars(record).setdefault("_masks", {})
    if (name, value) not in kept:
        kept[name, value] = np.array([each == value for each in record.requests[name]], dtype=np.bool_)
    return kept[name, value]


def window(record: RunRecord) -> Window:
    return Window(*record.facts["window_s"])


def rps(record: RunRecord) -> float | None:
    """Turns finished in the window."""
    start_s, end_s = window(record)
    if end_s <= start_s:
        return None
    finished = column(record, "finished_s")
    return float(((start_s <= finished) & (finished < end_s)).sum()) / (end_s - start_s)


def ttft_of(record: RunRecord, chosen: _Mask) -> Floats:
    """TTFT of the finished ones of these."""
    return known((column(record, "finished_s") - column(record, "arrival_s"))[chosen])


def counted(record: RunRecord) -> _Mask:
    return mask(record, "counted")


def _of_class(record: RunRecord, name: str) -> _Mask:
    return counted(record) & mask(record, "length_class", name)


def violations(record: RunRecord, chosen: _Mask) -> float | None:
    late = mask(record, "violated")[chosen]
    return float(late.mean()) if late.size else None


def _by_bucket(record: RunRecord) -> dict[str, dict[str, Any]]:
    tokens, counts = column(record, "prompt_len"), counted(record)
    tokens = tokens / record.facts.get("length_scale", 1.0)
    found = {}
    for name, low, high in BUCKETS:
        chosen = counts & (low <= tokens) & (tokens < high)
        found[name] = {"violations": violations(record, chosen), **distribution(ttft_of(record, chosen))}
    return found


def in_system(record: RunRecord) -> float | None:
    """Turns between arrival and first token, averaged over the window's time."""
    start_s, end_s = window(record)
    if end_s <= start_s:
        return None
    arrival, finished = column(record, "arrival_s"), column(record, "finished_s")
    finished = np.where(np.isnan(finished), np.inf, finished)
    inside = np.minimum(finished, end_s) - np.maximum(arrival, start_s)
    return float(inside[inside > 0].sum()) / (end_s - start_s)


def mode_shares(record: RunRecord) -> dict[str, float]:
    """Shares of all steps, by how they ran."""
    kinds = [mode.partition(" ")[0] for mode in record.tables[STEPS]["mode"]]
    return {kind: kinds.count(kind) / len(kinds) for kind in ("eager", "fallback", "graph", "rung") if kinds}


def graph_share(record: RunRecord) -> float | None:
    shares = mode_shares(record)
    return shares["graph"] + shares["rung"] if shares else None


def tokens_s(record: RunRecord) -> float | None:
    """Tokens per second in steps that began in the window."""
    start_s, end_s = window(record)
    steps = record.tables[STEPS]
    if end_s <= start_s or not steps["tokens"]:
        return None
    done = [tokens for begun, tokens in zip(steps["start_s"], steps["tokens"], strict=True) if start_s <= begun < end_s]
    return sum(done) / (end_s - start_s)


def padding(record: RunRecord) -> float | None:
    steps = record.tables[STEPS]
    tokens = sum(steps["tokens"])
    return sum(steps["padded_tokens"]) / tokens - 1 if tokens else None


def requests_per_step(record: RunRecord) -> float | None:
    steps = record.tables[STEPS]
    num = len(steps["num_short"])
    return (sum(steps["num_short"]) + sum(steps["num_long"])) / num if num else None


def busy_share(record: RunRecord) -> float | None:
    """Busy share of the window and all instances."""
    start_s, end_s = window(record)
    steps = record.tables[STEPS]
    if not steps["tokens"]:
        return None
    begun = column(record, "start_s", STEPS)
    inside = np.minimum(begun + column(record, "duration_s", STEPS), end_s) - np.maximum(begun, start_s)
    busy = float(inside[inside > 0].sum())
    num = len(record.tables[INSTANCES]["instance"])
    return busy / (num * (end_s - start_s)) if end_s > start_s else None


def busy_s(record: RunRecord) -> float | None:
    durations = record.tables[STEPS]["duration_s"]
    return fsum(durations) if durations else None


def moves_per_minute(record: RunRecord) -> float | None:
    start_s, end_s = window(record)
    if end_s <= start_s:
        return None
    return 60 * sum(start_s <= time < end_s for time in record.tables[MOVES]["time_s"]) / (end_s - start_s)


def mixed_steps(record: RunRecord) -> float | None:
    steps = record.tables[STEPS]
    pairs = list(zip(steps["num_short"], steps["num_long"], strict=True))
    return sum(short > 0 and long > 0 for short, long in pairs) / len(pairs) if pairs else None


def _distribution_of(length_class: str | None = None) -> Callable[[RunRecord], dict[str, Any]]:
    """TTFT of the turns that count, or of those of a class."""
    return lambda record: distribution(ttft_of(record, _counted(record, length_class)))


def _violations_of(length_class: str | None = None) -> Callable[[RunRecord], float | None]:
    return lambda record: violations(record, _counted(record, length_class))


def _counted(record: RunRecord, length_class: str | None) -> _Mask:
    return counted(record) if length_class is None else _of_class(record, length_class)


_EMPTY = "the window is empty"
_NO_TURN = "per entry: no turn that has it; pQ below 100 / (100 - Q) of them"

PREFILL_METRICS: tuple[Metric, ...] = (
    Metric("rps", "turns/s", "first tokens in the window / its length", _EMPTY, rps),
    Metric("tokens_s", "tokens/s", "tokens of steps that begin in the window / its length", _EMPTY, tokens_s),
    Metric(
        "end_s", "s", "when the run ended, answers included where they are decoded", "never", lambda r: r.facts["end_s"]
    ),
    Metric("ttft_all_s", "s", "distribution of TTFT over turns that count", _NO_TURN, _distribution_of()),
    Metric("ttft_short_s", "s", "the same, short ones", _NO_TURN, _distribution_of("short")),
    Metric("ttft_long_s", "s", "the same, long ones", _NO_TURN, _distribution_of("long")),
    Metric("by_length", "s, share", "TTFT and share of violations by tokens of the prompt", _NO_TURN, _by_bucket),
    Metric(
        "slo_violations",
        "share",
        "turns whose TTFT exceeds the objective, or that never had a token / turns that count",
        "no turn counts",
        _violations_of(),
    ),
    Metric("slo_violations_short", "share", "the same, short ones", "no short turn counts", _violations_of("short")),
    Metric("slo_violations_long", "share", "the same, long ones", "no long turn counts", _violations_of("long")),
    Metric(
        "in_system", "turns", "integral over the window of turns without a first token / its length", _EMPTY, in_system
    ),
    Metric("requests_per_step", "turns", "turns in a step, chunks counted each", "no steps", requests_per_step),
    Metric("mixed_steps", "share", "steps with short and long turns / steps", "no steps", mixed_steps),
    Metric("graph_share", "share", "steps that replay a graph / steps", "no steps", graph_share),
    Metric("mode_shares", "share", "steps by how they ran", "per entry: no steps", mode_shares),
    Metric("padding", "share", "padded tokens / tokens - 1", "no tokens", padding),
    Metric("busy_share", "share", "time in steps / (window x instances)", _EMPTY, busy_share),
    Metric("busy_s", "s", "time in steps, all instances", "no steps", busy_s),
    Metric("moves_per_minute", "1/min", "moves of the controller in the window", _EMPTY, moves_per_minute),
)
