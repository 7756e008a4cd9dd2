"""``repro ablate`` of AMPD's components."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from repro.cli.output import number, percent
from repro.cli.study import Row, Runs, Study, added, difference_text, paired_notes

if TYPE_CHECKING:
    from repro.cli.ablate import Asked

TRACES = ("dureader", "gaia")
RATE = 2.0
"""The rate of the paper's Figure 5."""
NUM_RUNS = 10
"""Where none are asked for: one seed is an anecdote."""

COLUMNS = {
    "attainment": lambda row: f"{number(row['slo_attainment'], scale=100, half_width=row['half_width'])} %",
    "added, points": lambda row: number(row["added_points"], half_width=row["added_half_width"]),
    "difference": difference_text,
    "TTFT initial s": lambda row: number(row["ttft_initial_s"]),
    "incremental s": lambda row: number(row["ttft_incremental_s"]),
    "ITL ms": lambda row: number(row["itl_s"], scale=1e3),
    "local": lambda row: percent(row["local_share"]),
}


def study(asked: Asked, knobs: Mapping[str, Any]) -> Study:
    from repro.reports.ablation import paired_cells
    from repro.systems.platforms import platform as platform_of

    asked.refuse("reading", "limit")
    where, rate = platform_of(asked.platform or "h20x32"), asked.rate(RATE)
    return Study(
        component=asked.component,
        platform=where,
        title=where.title,
        cells=paired_cells(
            asked.component, where, asked.dataset or TRACES, rate, asked.seeds(NUM_RUNS), knobs, asked.own()
        ),
        dataset="trace",
        said="all at once" if rate is None else f"{rate:g} session{'' if rate == 1 else 's'}/s",
        about={"rate": rate},
        row=_row,
        columns=COLUMNS,
        notes=lambda rows: paired_notes(rows, "added"),
        halves={"slo_attainment": "half_width"},
        plotted={"slo_attainment": "SLO attainment", "itl_s": "mean ITL (s)"},
    )


def _row(runs: Runs, base: Runs) -> Row:
    """Differences are paired by seed."""
    from repro.runs.store import over_repeats

    pairs = [
        100 * (one.summary["slo_attainment"] - other.summary["slo_attainment"])
        for one, other in zip(runs, base, strict=True)
        if one.validity.valid and other.validity.valid
    ]
    attainment = over_repeats(runs, "slo_attainment")
    return {
        "slo_attainment": attainment.mean,
        "half_width": attainment.half_width,
        **added(pairs, ("worse", "better")),
        "ttft_initial_s": over_repeats(runs, "ttft_initial_s", "mean").mean,
        "ttft_incremental_s": over_repeats(runs, "ttft_incremental_s", "mean").mean,
        "itl_s": over_repeats(runs, "itl_s", "mean").mean,
        "local_share": over_repeats(runs, "local_share").mean,
        "deployment": runs[0].facts["deployment"],
    }
