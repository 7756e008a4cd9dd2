"""Where the time of a profiled run's steps went, on a terminal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from engines.runtime.step_timer import STEP_PARTS
from repro.cli.output import number, percent, print_table, say

if TYPE_CHECKING:
    from repro.runs.store import StoredRun

_COLUMNS = {"with a Refresh": ("refresh", "mixed"), "Reuse only": ("reuse",), "all": ("all",)}
"""Title -> the kinds of step in it, as the metric ``profile`` has them."""


def print_profile(run: StoredRun) -> None:
    summary, facts = run.summary, run.facts
    name = f"{run.record.manifest['system']}, {run.cell.dataset}, {_rate(run.cell.rate)}"
    if summary["profile"] is None:
        say(f"{name}: no step was taken apart")
    else:
        _print_parts(name, summary["profile"])
    card = f" of {facts['bound']['card']}" if "bound" in facts else ""
    say(
        f"share of roofline{card}: {percent(summary['roofline_share'])}; CUDA graph hit rate: "
        f"{percent(summary['graph_hit_rate'])}; outside the forward: {percent(summary['outside_forward_share'])}"
    )


def _print_parts(name: str, profile: Mapping[str, Any]) -> None:
    columns = []
    for title, kinds in _COLUMNS.items():
        count = sum(profile[kind]["num_steps"] for kind in kinds)
        seconds = {part: sum(profile[kind]["seconds"][part] for kind in kinds) for part in STEP_PARTS}
        columns.append((f"{title} ({count})", _cells({**seconds, "whole step": sum(seconds.values())}, count)))
    print_table(
        f"Where a step's time goes: {name}",
        ("ms, share", *(title for title, _ in columns)),
        [(part, *(cells[part] for _, cells in columns)) for part in (*STEP_PARTS, "whole step")],
    )


def _cells(seconds: Mapping[str, float], count: int) -> dict[str, str]:
    total = seconds["whole step"]
    return {
        part: f"{number(1e3 * value / count, 3)}  {percent(value / total):>7}" if count and total else "-"
        for part, value in seconds.items()
    }


def _rate(rate: float | None) -> str:
    return "all at once" if rate is None else f"{rate:g} req/s"
