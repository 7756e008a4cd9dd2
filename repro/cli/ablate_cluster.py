"""``repro ablate`` of AMPD's components."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from repro.cli import options as opt
from repro.cli.output import percent, print_json, print_table, say

if TYPE_CHECKING:
    from repro.runs.store import StoredRun

NUM_RUNS = 10
"""Where none are asked for: with 99 sessions one seed is an anecdote."""
TRACES = ("dureader", "gaia")
RATE = 2.0
"""Of the paper's Figure 5."""
PLOTTED = {"slo_attainment": "SLO attainment", "itl_s": "mean ITL (s)"}


def ablate_cluster(
    component: str,
    *,
    platform: str,
    traces: Sequence[str] | None,
    request_rate: str | None,
    num_runs: int | None,
    model: str | None,
    result_dir: Path | None,
    force: bool,
    accept_other_code: bool,
    plot: Path | None,
    json: bool,
) -> None:
    from engines.bounds import check_most
    from engines.errors import require
    from repro.cli.plots import check_plot, save_plot
    from repro.cli.sweep import run_sweep, say_what_ran, sweep_of
    from repro.paths import LOCAL
    from repro.reports.cluster_ablation import CLUSTER_COMPONENTS
    from repro.runs.store import Store
    from repro.systems.platforms import platform as platform_of

    check_most("num_runs", num_runs)
    require(num_runs is None or num_runs >= 1, f"num_runs={num_runs} must be at least 1")
    where, rate = platform_of(platform), RATE if request_rate is None else opt.parse_rate(request_rate)
    knobs = tuple(opt.given(model=model).items())
    grid = {
        (trace, variant): [
            variant.cell(where, trace, rate, seed, knobs) for seed in range(NUM_RUNS if num_runs is None else num_runs)
        ]
        for trace in traces or TRACES
        for variant in CLUSTER_COMPONENTS[component]
    }
    store = Store(result_dir or LOCAL, accept_other_code=accept_other_code)
    sweep = sweep_of([cell for cells in grid.values() for cell in cells], store, force=force)
    if plot is not None:
        check_plot(plot)
    outcomes = run_sweep(sweep)
    runs = iter(sweep.runs)
    base: dict[str, list[StoredRun]] = {}
    rows = []
    for (trace, variant), cells in grid.items():
        own = [next(runs) for _ in cells]
        row = _row(own, base.setdefault(trace, own))
        rows.append({"trace": trace, "variant": variant.label, "ours": variant.is_ours, **row})
    if json:
        print_json({"component": component, "platform": where.name, "rate": rate, "rows": rows})
    else:
        print_table(
            f"Ablation of {component} on {where.title}, {'all at once' if rate is None else f'{rate:g} sessions/s'}",
            (
                "trace",
                "variant",
                "attainment",
                "added, points",
                "TTFT initial s",
                "incremental s",
                "ITL ms",
                "local",
                "verdict",
            ),
            [_as_text(row) for row in rows],
        )
    if plot is not None:
        plotted = [{"label": f"{row['trace']}: {row['variant']}", **row} for row in rows]
        drawn = save_plot(plot, f"Ablation of {component} on {where.title}", plotted, PLOTTED)
        say(f"files: {', '.join(map(str, drawn))}", file=sys.stderr)
    say_what_ran(outcomes, store.root)


def _row(runs: Sequence[StoredRun], base: Sequence[StoredRun]) -> dict[str, Any]:
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
        "num_runs": len(runs),
        "obtained": "; ".join(sorted({run.obtained for run in runs})),
        "valid": all(run.validity.valid for run in runs),
        "run_folders": [run.cell.folder_name for run in runs],
    }


def _as_text(row: dict[str, Any]) -> tuple[str, ...]:
    def pm(value: float | None, half: float | None, scale: float = 1.0) -> str:
        if value is None:
            return "-"
        return f"{scale * value:.1f}" + ("" if half is None else f" ± {scale * half:.1f}")

    return (
        row["trace"],
        row["variant"] + (" (ours)" if row["ours"] else ""),
        f"{pm(row['slo_attainment'], row['half_width'], 100)} %",
        pm(row["added_points"], row["added_half_width"]),
        pm(row["ttft_initial_s"], None),
        pm(row["ttft_incremental_s"], None),
        pm(row["itl_s"], None, 1e3),
        percent(row["local_share"]),
        "VALID" if row["valid"] else "INVALID",
    )
