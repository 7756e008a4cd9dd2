"""AMPD Figure 8 (App. B): mean end-to-end latency against arrival rate, on the runs of Figure 4."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from paper_figures.ampd.compare import Table, said
from paper_figures.ampd.contenders import CONTENDERS, PAIRED_SEEDS, grid
from paper_figures.ampd.fig4 import table_of
from paper_figures.ampd.layout import LINES, obtained_sentence, rates_of, seeds_text, transient_sentence
from paper_figures.ampd.panels import panels
from paper_figures.ampd.said import finding
from paper_figures.common import style
from paper_figures.common.caption import figure_title, invalid_notes
from repro.reports.claims import Finding
from repro.reports.figures import Rendered, View
from repro.runs.cell import Cell
from repro.runs.store import StoredRun

NAME = "fig8"
TITLE = "AMPD Figure 8: end-to-end latency against arrival rate"
SOURCE = "AMPD, Figure 8, App. B"
PLATFORMS = ("h20x32",)
NUM_RUNS = PAIRED_SEEDS
SHOWN = ("ampd", "ours", "dynamo", "vllm-tuned", "continuum-tuned")
CSV_COLUMNS = ("panel", "rate_sessions_s", "contender", "e2el_mean_s", "half_width", "over_dynamo", "obtained")


def cells(view: View) -> list[Cell]:
    return grid(NAME, view, SHOWN, panels(), rates_of(view))


def latencies(runs: Sequence[StoredRun], view: View) -> Table:
    """Seconds."""
    return table_of(runs, view, of=lambda run: run.summary["e2el_s"]["mean"])


def render(runs: Sequence[StoredRun], view: View, out: Path) -> Rendered:
    table = latencies(runs, view)
    means = table.means
    stem = f"{NAME}-{view.stem}"
    rows = []
    with style.drawing():
        figure, axes = style.grid_of_panels([panel.title for panel in table.panels], columns=4)
        for row, panel in enumerate(table.panels):
            for name in SHOWN:
                at = [table.at(name, row, column) for column in range(len(table.rates))]
                half = [(each.half_width or 0.0) / 100 for each in at]
                axes[row].errorbar(
                    table.rates, means[name][row], yerr=half, capsize=2, **LINES[name], label=CONTENDERS[name].title
                )
                rows += [
                    (panel.title, rate, name, mean, half[i], mean / means["dynamo"][row, i], "simulated")
                    for i, (rate, mean) in enumerate(zip(table.rates, means[name][row].tolist(), strict=True))
                ]
            axes[row].set_ylim(0)
            axes[row].set_xticks(table.rates)
            if row % 4 == 0:
                axes[row].set_ylabel("mean end-to-end (s)")
        files = style.publish(
            figure,
            axes,
            out,
            stem,
            num_rows=3,
            title=f"{figure_title(TITLE, runs, view)}; x: sessions/s",
            caption=[
                f"AMPD's mean latency is {np.nanmedian(means['ampd'] / means['dynamo']):.2f} times Dynamo's in the median cell.",
                obtained_sentence(runs),
                f"Last token minus arrival of a session. {seeds_text(view)}: mean, and bars for its 95 % interval. AMPD and "
                "Dynamo on Table 2's plan, vLLM and Continuum tuned for attainment.",
                transient_sentence(runs),
            ],
        )
    ratio = means["ampd"] / means["dynamo"]
    return Rendered(
        files=(*files, style.save_csv(out / f"{stem}.csv", CSV_COLUMNS, rows)),
        columns=("panel", *(f"AMPD / Dynamo at {rate:g}" for rate in table.rates)),
        rows=tuple((panel.title, *(f"{value:.2f}" for value in ratio[row])) for row, panel in enumerate(table.panels)),
        notes=tuple(invalid_notes(runs)),
    )


def findings(runs: Sequence[StoredRun], view: View) -> list[Finding]:
    table = latencies(runs, view)
    median = table.interval(lambda means: float(np.nanmedian(means["ampd"] / means["dynamo"])))
    ratio = table.means["ampd"] / table.means["dynamo"]
    how = (
        f"median ratio over {ratio.size} cells {said(median, digits=3)}, from {np.nanmin(ratio):.2f} to {np.nanmax(ratio):.2f}, "
        f"Dynamo lower in {int((ratio > 1).sum())}; on AMPD's plan, 99 sessions, {seeds_text(view)}"
    )
    return [finding("ampd-e2e", float(np.nanmedian(ratio)), how)]
