"""The table of ``repro bench``: what was asked of each run, and what came of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from repro.cli.output import number, percent, print_table
from repro.cli.said import Lengths, lengths_of, reading_of

if TYPE_CHECKING:
    from repro.runs.family import Shown
    from repro.runs.store import StoredRun


def print_runs(runs: Sequence[StoredRun]) -> None:
    """One table a family, which shows what only its runs have, and what was asked, as far as they have it."""
    for family in dict.fromkeys(run.family.name for run in runs):
        own = [run for run in runs if run.family.name == family]
        rows = [_Row(run, lengths_of(run)) for run in own]
        columns = {title: [of(row) for row in rows] for title, of in COLUMNS.items()}
        shown = own[0].family.shown
        for title, unsaid in (("reading", "-"), ("lengths", "x 1")):
            if {*columns[title]} == {unsaid}:
                del columns[title]
        if any(each.metric == "input_len" for each in shown):
            del columns["prompt tok"], columns["output tok"]
        columns |= {each.title: [_shown(run, each) for run in own] for each in shown}
        columns["obtained"] = [run.obtained for run in own]
        columns["verdict"] = ["VALID" if run.validity.valid else "INVALID" for run in own]
        print_table("Runs", tuple(columns), list(zip(*columns.values(), strict=True)))


class _Row(NamedTuple):
    run: StoredRun
    lengths: Lengths


def rate_of(run: StoredRun) -> str:
    cell = run.cell
    if cell.rate is not None:
        return f"{cell.rate:g}"
    if cell.knob_values.get("arrivals") == "trace":
        return "the trace's"
    return "closed loop" if run.family.name == "prefill" else "inf"


COLUMNS: Mapping[str, Callable[[_Row], str]] = {
    "system": lambda row: row.run.title,
    "reading": lambda row: reading_of(row.run) or "-",
    "dataset": lambda row: row.run.cell.dataset,
    "lengths": lambda row: f"x {row.lengths.length_scale:g}",
    "prompt tok": lambda row: number(row.lengths.mean_prompt_tokens),
    "output tok": lambda row: number(row.lengths.mean_output_tokens),
    "platform": lambda row: row.run.cell.platform,
    "rate req/s": lambda row: rate_of(row.run),
    "tok/s": lambda row: number(row.run.summary["throughput_tok_s"]),
    "mean s": lambda row: number(row.run.summary["e2el_s"]["mean"], 2),
    "p50 s": lambda row: number(row.run.summary["e2el_s"]["p50"], 2),
    "p90 s": lambda row: number(row.run.summary["e2el_s"]["p90"], 2),
    "longest s": lambda row: number(row.run.summary["e2el_s"]["max"], 2),
}


def _shown(run: StoredRun, each: Shown) -> str:
    if each.is_predicted:
        if (found := run.facts["simulated"].get(each.metric)) is None:
            return "-"
        if each.is_share:
            return f"{percent(found['predicted'])} ({100 * found['error']:+.0f} points)"
        return f"{number(found['predicted'], scale=each.scale)} ({100 * found['error']:+.0f} %)"
    value = run.summary[each.metric]
    if each.stat is not None:
        value = value.get(each.stat)
    if each.is_share:
        return percent(value)
    if isinstance(value, int) and each.scale == 1:
        return str(value)
    return number(value, scale=each.scale)
