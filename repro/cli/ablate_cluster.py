"""``repro ablate`` of AMPD's components."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from repro.cli import options as opt
from repro.cli.ablate_paired import Paired, Row
from repro.cli.output import percent

if TYPE_CHECKING:
    from repro.runs.store import StoredRun

TRACES = ("dureader", "gaia")
RATE = 2.0
"""Of the paper's Figure 5."""


def of_cluster(component: str, platform: str, request_rate: str | None) -> Paired:
    from repro.reports.ablation import CLUSTER_COMPONENTS
    from repro.systems.platforms import platform as platform_of

    where, rate = platform_of(platform), RATE if request_rate is None else opt.parse_rate(request_rate)
    return Paired(
        variants=CLUSTER_COMPONENTS[component],
        platform=where,
        title=where.title,
        datasets=TRACES,
        dataset="trace",
        rate=rate,
        rate_said="all at once" if rate is None else f"{rate:g} session{'' if rate == 1 else 's'}/s",
        columns=("attainment", "added, points", "TTFT initial s", "incremental s", "ITL ms", "local"),
        row=_row,
        as_text=_as_text,
        plotted={"slo_attainment": "SLO attainment", "itl_s": "mean ITL (s)"},
    )


def _row(runs: Sequence[StoredRun], base: Sequence[StoredRun]) -> Row:
    """Differences are paired by seed."""
    from repro.runs.statistics import mean_interval
    from repro.runs.store import over_repeats

    pairs = [
        100 * (one.summary["slo_attainment"] - other.summary["slo_attainment"])
        for one, other in zip(runs, base, strict=True)
        if one.validity.valid and other.validity.valid
    ]
    attainment, added = over_repeats(runs, "slo_attainment"), mean_interval(pairs)
    return {
        "slo_attainment": attainment.mean,
        "half_width": attainment.half_width,
        "added_points": added.mean,
        "added_half_width": added.half_width,
        "ttft_initial_s": over_repeats(runs, "ttft_initial_s", "mean").mean,
        "ttft_incremental_s": over_repeats(runs, "ttft_incremental_s", "mean").mean,
        "itl_s": over_repeats(runs, "itl_s", "mean").mean,
        "local_share": over_repeats(runs, "local_share").mean,
        "deployment": runs[0].facts["deployment"],
    }


def _as_text(row: Row) -> tuple[str, ...]:
    def pm(value: float | None, half: float | None, scale: float = 1.0) -> str:
        if value is None:
            return "-"
        return f"{scale * value:z.1f}" + ("" if half is None else f" ± {scale * half:.1f}")

    return (
        f"{pm(row['slo_attainment'], row['half_width'], 100)} %",
        pm(row["added_points"], row["added_half_width"]),
        pm(row["ttft_initial_s"], None),
        pm(row["ttft_incremental_s"], None),
        pm(row["itl_s"], None, 1e3),
        percent(row["local_share"]),
    )
