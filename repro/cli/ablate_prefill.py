"""``repro ablate`` of LAPS's components."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from repro.cli import options as opt
from repro.cli.output import number, print_json, print_table

if TYPE_CHECKING:
    from repro.runs.store import StoredRun

NUM_RUNS = 10
RATE = 60.0
"""Turns/s, seven tenths of what an instance serves with Qwen2.5-14B."""
PLOTTED = {"slo_violations": "TTFT over the objective (share)", "ttft_mean_s": "mean TTFT (s)"}


def ablate_prefill(
    component: str,
    *,
    platform: str,
    datasets: Sequence[str] | None,
    request_rate: str | None,
    num_runs: int | None,
    model: str | None,
    result_dir: Path | None,
    force: bool,
    accept_other_code: bool,
    plot: Path | None,
    json: bool,
) -> None:
    from engines.errors import require
    from repro.cli.plots import check_plot, save_plot
    from repro.cli.sweep import run_sweep, say_what_ran, sweep_of
    from repro.paths import LOCAL
    from repro.reports.prefill_ablation import PREFILL_COMPONENTS
    from repro.runs.store import Store
    from repro.systems.laps.part import part_of
    from repro.systems.platforms import platform as platform_of

    require(num_runs is None or num_runs >= 1, f"num_runs={num_runs} must be at least 1")
    where, rate = platform_of(platform), RATE if request_rate is None else opt.parse_rate(request_rate)
    part = part_of(where)
    knobs = tuple(opt.given(model=model).items())
    grid = {
        (dataset, variant): [
            variant.cell(where, dataset, rate, seed, knobs)
            for seed in range(NUM_RUNS if num_runs is None else num_runs)
        ]
        for dataset in datasets or (part.dataset,)
        for variant in PREFILL_COMPONENTS[component]
    }
    store = Store(result_dir or LOCAL, accept_other_code=accept_other_code)
    sweep = sweep_of([cell for cells in grid.values() for cell in cells], store, force=force)
    if plot is not None:
        check_plot(plot)
    outcomes = run_sweep(sweep)
    runs = iter(sweep.runs)
    base: dict[str, list[StoredRun]] = {}
    rows = []
    for (dataset, variant), cells in grid.items():
        own = [next(runs) for _ in cells]
        row = _row(own, base.setdefault(dataset, own))
        rows.append({"dataset": dataset, "variant": variant.label, "ours": variant.is_ours, **row})
    title = f"Ablation of {component} on {part.title}"
    if json:
        print_json({"component": component, "platform": where.name, "rate": rate, "rows": rows})
    else:
        print_table(
            f"{title}, {f'{part.clients} clients' if rate is None else f'{rate:g} turns/s'}",
            (
                "dataset",
                "variant",
                "late %",
                "added, points",
                "turns/s",
                "mean ms",
                "P90 short",
                "P90 long",
                "longest s",
                "graphs %",
                "valid",
            ),
            [_as_text(row) for row in rows],
        )
        for row in rows:
            if row["reasons"]:
                print(f"{row['variant']}: {row['reasons'][0]}")
    if plot is not None:
        plotted = [{"label": f"{row['dataset']}: {row['variant']}", **row} for row in rows]
        drawn = save_plot(plot, title, plotted, PLOTTED)
        print(f"files: {', '.join(map(str, drawn))}", file=sys.stderr)
    say_what_ran(outcomes, store.root)


def _row(runs: Sequence[StoredRun], base: Sequence[StoredRun]) -> dict[str, Any]:
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
        "num_runs": len(runs),
        "obtained": "; ".join(sorted({run.obtained for run in runs})),
        "valid": all(run.validity.valid for run in runs),
        "reasons": sorted({reason for run in runs for reason in run.validity.reasons}),
        "run_folders": [run.cell.folder_name for run in runs],
    }


def _as_text(row: dict[str, Any]) -> tuple[str, ...]:
    def pm(value: float | None, half: float | None, scale: float) -> str:
        return number(None if value is None else scale * value) + ("" if half is None else f" ± {scale * half:.1f}")

    def ms(name: str) -> str:
        return number(None if row[name] is None else 1e3 * row[name], 0)

    return (
        row["dataset"],
        row["variant"] + (" (ours)" if row["ours"] else ""),
        pm(row["slo_violations"], row["half_width"], 100),
        pm(row["added_points"], row["added_half_width"], 1),
        number(row["rps"]),
        ms("ttft_mean_s"),
        ms("ttft_p90_short_s"),
        ms("ttft_p90_long_s"),
        number(row["longest_s"]),
        number(None if row["graph_share"] is None else 100 * row["graph_share"], 0),
        "VALID" if row["valid"] else "INVALID",
    )
