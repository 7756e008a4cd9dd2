"""``repro ablate`` of LAPS's components."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from repro.cli.output import number
from repro.cli.study import Row, Runs, Study, added, difference_text, paired_notes

if TYPE_CHECKING:
    from repro.cli.ablate import Asked

RATE = 60.0
"""Turns/s, seven tenths of what an instance serves with Qwen2.5-14B."""
NUM_RUNS = 10

COLUMNS = {
    "late %": lambda row: number(row["slo_violations"], scale=100, half_width=row["half_width"]),
    "added, points": lambda row: number(row["added_points"], half_width=row["added_half_width"]),
    "difference": difference_text,
    "turns/s": lambda row: number(row["rps"]),
    "mean ms": lambda row: number(row["ttft_mean_s"], 0, scale=1e3),
    "P90 short": lambda row: number(row["ttft_p90_short_s"], 0, scale=1e3),
    "P90 long": lambda row: number(row["ttft_p90_long_s"], 0, scale=1e3),
    "longest s": lambda row: number(row["longest_s"]),
    "graphs %": lambda row: number(row["graph_share"], 0, scale=100),
}


def study(asked: Asked, knobs: Mapping[str, Any]) -> Study:
    from repro.reports.ablation import paired_cells
    from repro.systems.platforms import PrefillPart
    from repro.systems.platforms import platform as platform_of

    asked.refuse("reading", "limit")
    where, rate = platform_of(asked.platform or "h200"), asked.rate(RATE)
    part = where.part(PrefillPart)
    datasets = asked.dataset or (part.dataset,)
    return Study(
        component=asked.component,
        platform=where,
        title=part.title,
        cells=paired_cells(asked.component, where, datasets, rate, asked.seeds(NUM_RUNS), knobs, asked.own()),
        said=f"{part.clients} clients" if rate is None else f"{rate:g} turn{'' if rate == 1 else 's'}/s",
        about={"rate": rate},
        row=_row,
        columns=COLUMNS,
        notes=lambda rows: paired_notes(rows, "added"),
        halves={"slo_violations": "half_width"},
        plotted={"slo_violations": "TTFT over the objective (share)", "ttft_mean_s": "mean TTFT (s)"},
    )


def _row(runs: Runs, base: Runs) -> Row:
    """The row of all runs, INVALID ones too: that a policy never ends is what some of these show. Differences are paired by seed."""
    from repro.runs.statistics import mean_interval

    def over(metric: str, part: str | None = None) -> float | None:
        values = [run.summary[metric] for run in runs]
        known = [value if part is None else value[part] for value in values if value is not None]
        return mean_interval([value for value in known if value is not None]).mean

    late = mean_interval([run.summary["slo_violations"] for run in runs])
    pairs = [
        100 * (one.summary["slo_violations"] - other.summary["slo_violations"])
        for one, other in zip(runs, base, strict=True)
    ]
    return {
        "slo_violations": late.mean,
        "half_width": late.half_width,
        **added(pairs, ("better", "worse")),
        "rps": over("rps"),
        "ttft_mean_s": over("ttft_all_s", "mean"),
        "ttft_p90_short_s": over("ttft_short_s", "p90"),
        "ttft_p90_long_s": over("ttft_long_s", "p90"),
        "longest_s": over("ttft_all_s", "max"),
        "graph_share": over("graph_share"),
    }
