"""The table of ``repro bench``: what was asked of each run, and what came of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from repro.cli.output import number, percent, print_table
from repro.cli.said import lengths_of, reading_of

if TYPE_CHECKING:
    from repro.runs.family import Shown
    from repro.runs.store import StoredRun


def print_runs(runs: Sequence[StoredRun]) -> None:
    """One table a family, which shows what only its runs have, and what was asked, as far as they have it."""
    for family in dict.fromkeys(run.family.name for run in runs):
        own = [run for run in runs if run.family.name == family]
        columns = {title: [of(run) for run in own] for title, of in COLUMNS.items()}
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


def rate_of(run: StoredRun) -> str:
    cell = run.cell
    if cell.rate is not None:
        return f"{cell.rate:g}"
    if cell.knob_values.get("arrivals") == "trace":
        return "the trace's"
    return "closed loop" if run.family.name == "prefill" else "inf"


COLUMNS: Mapping[str, Callable[[StoredRun], str]] = {
    "system": lambda run: run.title,
    "reading": lambda run: reading_of(run) or "-",
    "dataset": lambda run: run.cell.dataset,
    "lengths": lambda run: f"x {lengths_of(run).length_scale:g}",
    "prompt tok": lambda run: number(lengths_of(run).mean_prompt_tokens),
    "output tok": lambda run: number(lengths_of(run).mean_output_tokens),
    "platform": lambda run: run.cell.platform,
    "rate req/s": rate_of,
    "tok/s": lambda run: number(run.summary["throughput_tok_s"]),
    "mean s": lambda run: number(run.summary["e2el_s"]["mean"], 2),
    "p50 s": lambda run: number(run.summary["e2el_s"]["p50"], 2),
    "p90 s": lambda run: number(run.summary["e2el_s"]["p90"], 2),
    "longest s": lambda run: number(run.summary["e2el_s"]["max"], 2),
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
