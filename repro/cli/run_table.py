"""The table of ``repro bench``: what was asked of each run, and what came of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from repro.cli.output import number, percent, print_table
from repro.cli.said import lengths_of, reading_of

if TYPE_CHECKING:
    from repro.runs.family import Shown
    from repro.runs.store import StoredRun


def print_runs(runs: Sequence[StoredRun]) -> None:
    """One table a family: each shows what only its runs have."""
    for family in dict.fromkeys(run.family.name for run in runs):
        own = [run for run in runs if run.family.name == family]
        _print_family(own, own[0].family.shown)


def _print_family(runs: Sequence[StoredRun], shown: Sequence[Shown]) -> None:
    """Shows what was asked, as far as these runs have it."""
    lengths = [lengths_of(run) for run in runs]
    asked = {
        "system": [run.title for run in runs],
        "reading": [reading_of(run) or "-" for run in runs],
        "dataset": [run.cell.dataset for run in runs],
        "lengths": [f"x {each.scale:g}" for each in lengths],
        "prompt tok": [number(each.prompt) for each in lengths],
        "output tok": [number(each.output) for each in lengths],
    }
    if {*asked["reading"]} == {"-"}:
        del asked["reading"]
    if {*asked["lengths"]} == {"x 1"}:
        del asked["lengths"]
    if any(each.metric == "input_len" for each in shown):
        del asked["prompt tok"], asked["output tok"]
    columns = ("platform", "rate req/s", "tok/s", "mean s", "p50 s", "p90 s", "longest s")
    titles = (*asked, *columns, *(each.title for each in shown), "obtained", "verdict")
    rows = [(*own, *_row(run, shown)) for own, run in zip(zip(*asked.values(), strict=True), runs, strict=True)]
    print_table("Runs", titles, rows)


def rate_of(run: StoredRun) -> str:
    cell = run.cell
    if cell.rate is not None:
        return f"{cell.rate:g}"
    if cell.knob_values.get("arrivals") == "trace":
        return "the trace's"
    return "closed loop" if run.family.name == "prefill" else "inf"


def _row(run: StoredRun, shown: Sequence[Shown]) -> tuple[str, ...]:
    summary, cell = run.summary, run.cell
    latency = summary["e2el_s"]
    return (
        cell.platform,
        rate_of(run),
        number(summary["throughput_tok_s"]),
        number(latency["mean"], 2),
        number(latency["p50"], 2),
        number(latency["p90"], 2),
        number(latency["max"], 2),
        *(_shown(run, each) for each in shown),
        run.obtained,
        "VALID" if run.validity.valid else "INVALID",
    )


def _shown(run: StoredRun, each: Shown) -> str:
    if each.is_predicted:
        if (found := run.facts["simulated"].get(each.metric)) is None:
            return "-"
        if each.is_share:
            return f"{percent(found['predicted'])} ({100 * found['error']:+.0f} points)"
        return f"{number(each.scale * found['predicted'])} ({100 * found['error']:+.0f} %)"
    value = run.summary[each.metric]
    if each.stat is not None:
        value = value.get(each.stat)
    if each.is_share:
        return percent(value)
    if isinstance(value, int) and each.scale == 1:
        return str(value)
    return number(None if value is None else each.scale * value)
