"""AMPD Figure 4 (§7.2): SLO attainment against arrival rate in twelve panels, and the latencies behind one row of them.

Every system runs on AMPD's plan (Table 2's first) and on its own best deployment of a search; AMPD as printed, and with
our two switches. The paper prints gains, not attainments: they are compared in the table and in ``ampd/readings``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from paper_figures.ampd.compare import Of, Table, attained, cell_interval, printed, said, tabulate
from paper_figures.ampd.contenders import CONTENDERS, FIGURE4, PAIRED_SEEDS, grid
from paper_figures.ampd.gains import (
    SAME_BASELINES,
    TUNED_BASELINES,
    behind,
    count_ahead,
    floor_of,
    gain_over,
    summary_notes,
)
from paper_figures.ampd.layout import LINES, obtained_sentence, rates_of, seeds_text, transient_sentence
from paper_figures.ampd.panels import DETAIL_MODEL, DETAIL_RATE, TRACES, Panel, panel_of, panels
from paper_figures.ampd.said import DEFAULT, finding
from paper_figures.common import style
from paper_figures.common.caption import figure_title, invalid_notes, missing_note
from repro.reports.claims import Finding
from repro.reports.figures import Rendered, View
from repro.runs.cell import Cell
from repro.runs.statistics import Interval
from repro.runs.store import StoredRun

NAME = "fig4"
TITLE = "AMPD Figure 4: SLO attainment against arrival rate"
SOURCE = "AMPD, Figure 4, §7.2"
PLATFORMS = ("h20x32",)
NUM_RUNS = PAIRED_SEEDS
DRAWN = ("ampd", "ours", "dynamo", "dynamo-tuned", "vllm-tuned", "continuum-tuned")
DETAILS: tuple[tuple[str, Of], ...] = (
    ("initial TTFT", lambda run: run.summary["ttft_initial_s"]["mean"]),
    ("incremental TTFT", lambda run: run.summary["ttft_incremental_s"]["mean"]),
    ("ITL", lambda run: run.summary["itl_s"]["mean"]),
)
"""Means, as the figure's bottom row has them."""
CSV_COLUMNS = (
    "model",
    "trace",
    "rate_sessions_s",
    "contender",
    "system",
    "deployment",
    "seed",
    "slo_attainment",
    "ttft_initial_mean_s",
    "ttft_initial_p50_s",
    "ttft_incremental_mean_s",
    "ttft_incremental_p50_s",
    "itl_mean_s",
    "e2el_mean_s",
    "local_share",
    "prefill_load",
    "obtained",
    "valid",
    "run",
)


def cells(view: View) -> list[Cell]:
    return grid(NAME, view, FIGURE4, panels(), rates_of(view))


def render(runs: Sequence[StoredRun], view: View, out: Path) -> Rendered:
    table = table_of(runs, view)
    stem = f"{NAME}-{view.stem}"
    files = _draw(table, runs, view, out, stem)
    csv = style.save_csv(out / f"{stem}.csv", CSV_COLUMNS, _csv_rows(runs, view))
    return Rendered(
        files=(*files, csv),
        columns=(
            "panel",
            "rate",
            *(CONTENDERS[name].title for name in FIGURE4),
            "over Dynamo (tuned)",
            "paper",
            "over vLLM (tuned)",
            "paper",
        ),
        rows=tuple(
            _row(table, row, column, view) for row in range(len(table.panels)) for column in range(len(table.rates))
        ),
        notes=(*summary_notes(table, view), *invalid_notes(runs), *_missing(table)),
    )


def table_of(runs: Sequence[StoredRun], view: View, of: Of = attained) -> Table:
    return tabulate(runs, view, FIGURE4, panels(), rates_of(view), view.seeds, of=of)


def findings(runs: Sequence[StoredRun], view: View) -> list[Finding]:
    table, floor = table_of(runs, view), floor_of(view)
    num_cells = len(table.panels) * len(table.rates)
    seeds = seeds_text(view)
    found = []
    for claim, theirs, same in (("ampd-avg-dynamo", "dynamo-tuned", "dynamo"), ("ampd-avg-vllm", "vllm-tuned", "vllm")):
        gain, on_plan = gain_over(table, "ampd", theirs, floor), gain_over(table, "ampd", same, floor)
        ours = gain_over(table, "ours-tuned", theirs, floor)
        how = (
            f"mean over {num_cells} cells against the tuned baseline {said(gain.mean, '%')} (median {said(gain.median, '%')}); "
            f"on AMPD's plan {said(on_plan.mean, '%')} (median {said(on_plan.median, '%')}); with our switches, both tuned, "
            f"{said(ours.mean, '%')}; {DEFAULT}, {seeds}"
        )
        found.append(finding(claim, _value(gain.mean), how))
    for claim, theirs, (model, trace), label in (
        ("ampd-max-dynamo", "dynamo", ("Llama-3.1-70B", "gaia"), 967.54),
        ("ampd-max-vllm", "vllm", ("Mixtral-8x7B", "hotpotqa"), 3435.1),
    ):
        worst = panels().index(panel_of(model, trace))
        share, tuned = (100 * float(table.means[name][worst, -1]) for name in (theirs, f"{theirs}-tuned"))
        there = (
            f"the label needs a baseline below {100 / (1 + label / 100):.0f} % on {panels()[worst].title} at {table.rates[-1]:g}/s, which "
            f"attains {share:.0f} % on AMPD's plan and {tuned:.0f} % tuned"
        )
        theirs = f"{theirs}-tuned"
        gain = gain_over(table, "ampd", theirs, floor)
        how = f"largest of {num_cells} cells, {gain.where}: {said(gain.largest, '%')}; {there}; {DEFAULT}, {seeds}"
        found.append(finding(claim, _value(gain.largest), how))
    found += _orderings(table, num_cells, seeds) + _bars(runs, view, seeds)
    return found


def _orderings(table: Table, num_cells: int, seeds: str) -> list[Finding]:
    means = table.means
    ahead = {
        name: count_ahead(table, "ampd", others) for name, others in (("t", TUNED_BASELINES), ("s", SAME_BASELINES))
    }
    ours = num_cells - len({text.partition(":")[0] for text in behind(table, "ours-tuned", TUNED_BASELINES)})
    rank = 1 + np.mean([means[other] > means["ampd"] + 1e-9 for other in TUNED_BASELINES], axis=(1, 2)).sum()
    found = [
        finding(
            "ampd-best-everywhere",
            float(rank),
            f"mean rank of AMPD among tuned baselines; mean attainment not below any baseline in {ahead['s']} of {num_cells} cells on AMPD's plan, {ahead['t']} against "
            f"tuned ones; with our switches, all tuned, in {ours} outside noise; {DEFAULT}, {seeds}",
        )
    ]
    colocated = np.maximum(means["vllm-tuned"], means["continuum-tuned"])
    is_gaia = np.array([panel.trace == "gaia" for panel in table.panels])
    gaia = colocated[is_gaia] > means["dynamo-tuned"][is_gaia]
    others = means["dynamo-tuned"][~is_gaia] > colocated[~is_gaia]
    same = means["vllm"][is_gaia] > means["dynamo"][is_gaia]
    found.append(
        finding(
            "ampd-gaia-colocated",
            float(gaia.sum()),
            f"in {gaia.sum()} of {gaia.size} cells, all tuned ({same.sum()} on AMPD's plan); {DEFAULT}, {seeds}",
            holds=bool(2 * gaia.sum() > gaia.size),
        )
    )
    found.append(
        finding(
            "ampd-disagg-others",
            float(others.sum()),
            f"in {others.sum()} of {others.size} cells, all tuned; {DEFAULT}, {seeds}",
            holds=bool(2 * others.sum() > others.size),
        )
    )
    apart = 100 * np.abs(means["vllm"] - means["continuum"])
    found.append(
        finding(
            "ampd-continuum-tie",
            float(np.median(apart)),
            f"median difference in points on the same plan; within 1 point in {int((apart <= 1).sum())} of {apart.size} cells; "
            f"{DEFAULT}, {seeds}",
            holds=bool((apart <= 1).mean() >= 0.5),
        )
    )
    detail = panel_of(DETAIL_MODEL, "dureader")
    if detail in table.panels and DETAIL_RATE in table.rates:
        at = table.panels.index(detail), table.rates.index(DETAIL_RATE)
        shares = {name: table.at(name, *at) for name in FIGURE4}
        found.append(
            finding(
                "ampd-derived-abs",
                tuple(_value(shares[name]) for name in ("ampd", "dynamo-tuned", "vllm-tuned")),
                f"AMPD {said(shares['ampd'], '%')}, tuned Dynamo {said(shares['dynamo-tuned'], '%')} (on AMPD's plan "
                f"{said(shares['dynamo'], '%')}), tuned vLLM {said(shares['vllm-tuned'], '%')} (on AMPD's plan "
                f"{said(shares['vllm'], '%')}); {DEFAULT}, {seeds}",
            )
        )
    return found


def _bars(runs: Sequence[StoredRun], view: View, seeds: str) -> list[Finding]:
    """The figure's bottom row: Llama at 2 sessions/s."""
    bars = detail_tables(runs, view)
    if bars is None:
        return []

    def lower(metric: str, ours: str, theirs: str) -> tuple[int, str]:
        means = bars[metric].means
        count = int((means[ours][:, 0] < means[theirs][:, 0]).sum())
        pairs = ", ".join(
            f"{trace} {1e3 * means[ours][row, 0]:.0f}/{1e3 * means[theirs][row, 0]:.0f}"
            for row, trace in enumerate(TRACES)
        )
        return count, f"{metric} in ms {pairs}"

    initial, first_text = lower("initial TTFT", "ampd", "dynamo")
    incremental, then_text = lower("incremental TTFT", "ampd", "dynamo")
    itl, itl_text = lower("ITL", "ampd", "vllm")
    ttft_vllm, ttft_text = lower("incremental TTFT", "vllm", "dynamo")
    itl_dynamo, _ = lower("ITL", "dynamo", "vllm")
    where = f"{DETAIL_MODEL} at {DETAIL_RATE:g}/s, four traces, AMPD's plan, {seeds}"
    return [
        finding(
            "ampd-ttft-vs-dynamo",
            float(initial + incremental),
            f"AMPD/Dynamo: lower in {initial} of 4 (initial) and {incremental} of 4 (incremental): {first_text}; {then_text}; "
            f"{where}",
            holds=initial + incremental >= 6,
        ),
        finding("ampd-itl-vs-vllm", float(itl), f"AMPD/vLLM: lower in {itl} of 4: {itl_text}; {where}", holds=itl >= 3),
        finding(
            "ampd-colocated-ttft",
            float(ttft_vllm + itl_dynamo),
            f"vLLM/Dynamo: TTFT lower in {ttft_vllm} of 4 and Dynamo's ITL lower in {itl_dynamo} of 4: {ttft_text}; {where}",
            holds=ttft_vllm + itl_dynamo >= 7,
        ),
    ]


def detail_tables(runs: Sequence[StoredRun], view: View) -> dict[str, Table] | None:
    if DETAIL_RATE not in rates_of(view):
        return None
    own = [panel_of(DETAIL_MODEL, trace) for trace in TRACES]
    return {name: tabulate(runs, view, FIGURE4, own, (DETAIL_RATE,), view.seeds, of=of) for name, of in DETAILS}


def _draw(table: Table, runs: Sequence[StoredRun], view: View, out: Path, stem: str) -> tuple[Path, ...]:
    bars = detail_tables(runs, view)
    titles = [panel.title for panel in table.panels]
    if bars is not None:
        titles += [f"{DETAIL_MODEL} {panel_title(trace)}, {DETAIL_RATE:g}/s" for trace in TRACES]
    with style.drawing():
        figure, axes = style.grid_of_panels(titles, columns=4)
        for row, _ in enumerate(table.panels):
            for name in DRAWN:
                means = 100 * table.means[name][row]
                half = [_half(table, name, row, column) for column in range(len(table.rates))]
                axes[row].errorbar(
                    table.rates,
                    means,
                    yerr=half if any(half) else None,
                    capsize=2,
                    **LINES[name],
                    label=CONTENDERS[name].title,
                )
            axes[row].set_ylim(0, 105)
            axes[row].set_xticks(table.rates)
            if row % 4 == 0:
                axes[row].set_ylabel("SLO attainment (%)")
        if bars is not None:
            for column in range(4):
                _draw_bars(axes[len(table.panels) + column], bars, column)
            axes[len(table.panels)].set_ylabel("mean (ms)")
        return style.publish(
            figure,
            axes,
            out,
            stem,
            num_rows=-(-len(titles) // 4),
            title=f"{figure_title(TITLE, runs, view)}; x: sessions/s",
            caption=[
                *summary_notes(table, view)[:3],
                obtained_sentence(runs),
                f"SLO attainment in {DEFAULT}. {seeds_text(view)}: mean, and bars for its 95 % interval (Student's t).",
                "AMPD and Dynamo on the first plan of Table 2; tuned systems on the best of a search on other samples of the same "
                "workload. load + backlog: our two switches of the router. The paper prints no attainments, only gains.",
                transient_sentence(runs),
            ],
        )


def _draw_bars(axes: object, bars: dict[str, Table], row: int) -> None:
    from matplotlib.axes import Axes

    assert isinstance(axes, Axes)
    shown = ("ampd", "dynamo", "vllm", "continuum")
    for place, name in enumerate(shown):
        heights = [1e3 * float(bars[metric].means[name][row, 0]) for metric, _ in DETAILS]
        axes.bar([x + 0.2 * (place - 1.5) for x in range(len(heights))], heights, 0.19, color=LINES[name]["color"])
    axes.set_yscale("log")
    axes.set_xticks(range(len(DETAILS)), [metric for metric, _ in DETAILS], fontsize=7)


def panel_title(trace: str) -> str:
    return panel_of(DETAIL_MODEL, trace).title.removeprefix(f"{DETAIL_MODEL} ")


def _half(table: Table, name: str, row: int, column: int) -> float:
    return table.at(name, row, column).half_width or 0.0


def _row(table: Table, row: int, column: int, view: View) -> tuple[str, ...]:
    panel, rate, floor = table.panels[row], table.rates[column], floor_of(view)
    means = {name: float(100 * values[row, column]) for name, values in table.means.items()}
    texts = []
    for theirs, baseline in (("dynamo-tuned", "dynamo"), ("vllm-tuned", "vllm")):
        gain = cell_interval(table, "ampd", theirs, row, column, floor)
        ratio = float(printed([panel], [rate], baseline)[0, 0])
        texts += [said(gain, "%", 0), "-" if math.isnan(ratio) else f"{100 * (ratio - 1):.0f} %"]
    return (
        panel.title,
        f"{rate:g}",
        *("-" if math.isnan(means[name]) else f"{means[name]:.0f}" for name in FIGURE4),
        *texts,
    )


def _csv_rows(runs: Sequence[StoredRun], view: View) -> list[tuple[object, ...]]:
    from paper_figures.common.repeats import Repeats

    repeats = Repeats(runs, view)
    return [
        _csv_row(panel, rate, name, run)
        for panel in panels()
        for rate in rates_of(view)
        for name in FIGURE4
        for run in repeats.of(CONTENDERS[name].cell(NAME, view, panel, rate, 0))
    ]


def _csv_row(panel: Panel, rate: float, name: str, run: StoredRun) -> tuple[object, ...]:
    summary = run.summary
    return (
        panel.model,
        panel.trace,
        rate,
        name,
        run.cell.system,
        run.facts["deployment"],
        run.cell.seed,
        summary["slo_attainment"],
        summary["ttft_initial_s"]["mean"],
        summary["ttft_initial_s"]["p50"],
        summary["ttft_incremental_s"]["mean"],
        summary["ttft_incremental_s"]["p50"],
        summary["itl_s"]["mean"],
        summary["e2el_s"]["mean"],
        summary["local_share"],
        summary["prefill_load"],
        run.obtained,
        run.validity.valid,
        run.cell.key,
    )


def _missing(table: Table) -> list[str]:
    absent = [
        f"{panel.title} {CONTENDERS[name].title} at {rate:g}/s"
        for name, values in table.values.items()
        for row, panel in enumerate(table.panels)
        for column, rate in enumerate(table.rates)
        if np.isnan(values[row, column]).any()
    ]
    return missing_note(absent, len(table.panels) * len(table.rates) * len(table.values))


def _value(interval: Interval) -> float:
    return math.nan if interval.mean is None else interval.mean
