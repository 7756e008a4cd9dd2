"""``repro ablate`` of LAPS's components."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from repro.cli import options as opt
from repro.cli.ablate_paired import Paired, Row
from repro.cli.output import number

if TYPE_CHECKING:
    from repro.runs.store import StoredRun

RATE = 60.0
"""Turns/s, seven tenths of what an instance serves with Qwen2.5-14B."""


def of_prefill(component: str, platform: str, request_rate: str | None) -> Paired:
    from repro.reports.ablation import PREFILL_COMPONENTS
    from repro.systems.laps.part import part_of
    from repro.systems.platforms import platform as platform_of

    where, rate = platform_of(platform), RATE if request_rate is None else opt.parse_rate(request_rate)
    part = part_of(where)
    return Paired(
        variants=PREFILL_COMPONENTS[component],
        platform=where,
        title=part.title,
        datasets=(part.dataset,),
        dataset="dataset",
        rate=rate,
        rate_said=f"{part.clients} clients" if rate is None else f"{rate:g} turn{'' if rate == 1 else 's'}/s",
        columns=("late %", "added, points", "turns/s", "mean ms", "P90 short", "P90 long", "longest s", "graphs %"),
        row=_row,
        as_text=_as_text,
        plotted={"slo_violations": "TTFT over the objective (share)", "ttft_mean_s": "mean TTFT (s)"},
    )


def _row(runs: Sequence[StoredRun], base: Sequence[StoredRun]) -> Row:
    """Of all runs, INVALID ones too: that a policy never ends is what some of these show. Differences are paired by seed."""
    from repro.runs.statistics import mean_interval

    def over(metric: str, part: str | None = None) -> float | None:
        values = [run.summary[metric] for run in runs]
        known = [value if part is None else value[part] for value in values if value is not None]
        return mean_interval([value for value in known if value is not None]).mean

    late = mean_interval([run.summary["slo_violations"] for run in runs])
    pairs = zip(runs, base, strict=True)
    added = mean_interval(
        [100 * (one.summary["slo_violations"] - other.summary["slo_violations"]) for one, other in pairs]
    )
    return {
        "slo_violations": late.mean,
        "half_width": late.half_width,
        "added_points": added.mean,
        "added_half_width": added.half_width,
        "rps": over("rps"),
        "ttft_mean_s": over("ttft_all_s", "mean"),
        "ttft_p90_short_s": over("ttft_short_s", "p90"),
        "ttft_p90_long_s": over("ttft_long_s", "p90"),
        "longest_s": over("ttft_all_s", "max"),
        "graph_share": over("graph_share"),
    }


def _as_text(row: Row) -> tuple[str, ...]:
    def pm(value: float | None, half: float | None, scale: float) -> str:
        return number(None if value is None else scale * value) + ("" if half is None else f" ± {scale * half:.1f}")

    def ms(name: str) -> str:
        return number(None if row[name] is None else 1e3 * row[name], 0)

    return (
        pm(row["slo_violations"], row["half_width"], 100),
        pm(row["added_points"], row["added_half_width"], 1),
        number(row["rps"]),
        ms("ttft_mean_s"),
        ms("ttft_p90_short_s"),
        ms("ttft_p90_long_s"),
        number(row["longest_s"]),
        number(None if row["graph_share"] is None else 100 * row["graph_share"], 0),
    )
