"""The plot of ``repro capacity``: rates against GPUs, and which answers no other beats."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from repro.cli.plots import save_drawn

NOT_IN_CSV = ("cell",)


def save_capacity_plot(path: Path, title: str, rows: Sequence[Mapping[str, Any]], unit: str) -> tuple[Path, Path]:
    """A line for each system and card; the Pareto front joins what serves more than anything of as few GPUs."""
    from matplotlib.figure import Figure

    front = pareto(rows)
    figure = Figure(figsize=(6.5, 4.2), layout="constrained")
    axes = figure.subplots()
    for name in dict.fromkeys((row["system"], row["platform"]) for row in rows):
        own = sorted(
            (row["gpus"], row["rate"]) for row in rows if (row["system"], row["platform"]) == name and row["plan"]
        )
        if own:
            axes.plot(*zip(*own, strict=True), marker="o", linewidth=1, label=f"{name[0]}, {name[1]}")
    if front:
        places = [(row["gpus"], row["rate"]) for row in front]
        axes.plot(*zip(*places, strict=True), color="#999999", linewidth=4, alpha=0.4, zorder=0, label="Pareto front")
        axes.legend(fontsize="small")
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        ticks = sorted({row["gpus"] for row in rows})
        axes.set_xticks(ticks, [str(each) for each in ticks])
    axes.set_xlabel("GPUs")
    axes.set_ylabel(unit)
    obtained = ", ".join(sorted({str(row["obtained"]) for row in rows}))
    figure.suptitle(f"{title} ({obtained})", fontsize="medium", wrap=True)
    told = [
        {name: value for name, value in row.items() if name not in NOT_IN_CSV} | {"is_pareto": row in front}
        for row in rows
    ]
    return save_drawn(path, figure, told)


def pareto(rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Those that serve more than any of as few GPUs, by GPUs."""
    best: list[Mapping[str, Any]] = []
    for row in sorted((row for row in rows if row["plan"]), key=lambda each: (each["gpus"], -each["rate"])):
        if not best or row["rate"] > best[-1]["rate"]:
            best.append(row)
    return best
