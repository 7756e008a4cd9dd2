"""AMPD Figure 4: SLO attainment against arrival rate.

Every system runs on AMPD's plan (Table 2's first) and on its own best deployment of a search. AMPD runs as printed, and with our two
switches. The paper prints gains, not attainments: we compare them in the table and in ``ampd/readings``.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from paper_figures.ampd.attainment import ATTAINED, Attainments, cell_interval, floor_of, gains, rates_of, tabulate
from paper_figures.ampd.contenders import (
    CONTENDERS,
    DETAIL_MODEL,
    DETAIL_RATE,
    FIGURE4,
    PAIRS,
    SAME_BASELINES,
    TRACES,
    TUNED_BASELINES,
    TracePanel,
    details,
    grid,
    panel_of,
    panels,
)
from paper_figures.ampd.layout import DEFAULT, SWITCHES, ampd_figure, over_rates, repeats_of, seeds_text
from paper_figures.common.figure import Columns, Page, Picture, Table
from paper_figures.common.panel import OF_SHARES, AtMost, Axis, Layer, Mark, Points
from paper_figures.common.panel import Panel as Drawn
from paper_figures.common.runs import Measure, Of, Runs
from paper_figures.common.words import is_above, is_below, number, said
from repro.reports.claims import Finding, stated, stated_together
from repro.reports.figures import View
from repro.runs.cell import Cell
from repro.runs.statistics import Interval
from repro.runs.store import StoredRun
from repro.workloads.sessions import load_session_card

DRAWN = ("ampd", "ampd-tuned", "ours-tuned", "dynamo", "dynamo-tuned", "vllm-tuned")
KNOWN_TRACE = "dureader"
"""Figure 6 prints AMPD's attainment on this trace, in one cell with the detail model."""
PRINTED = (
    "Hollow: the paper's. It prints gains of AMPD, and no attainments but one, AMPD's in Figure 6, from which those of Dynamo and vLLM "
    "follow in that cell (Llama-3.1-70B DuReader, 2 sessions/s). Arrows: what a baseline attains at most, from the printed gain. Its text states no latency."
)
DETAILED = ("ampd", "dynamo", "vllm", "continuum")
INITIAL = Measure(path="ttft_initial_s/mean", label="initial TTFT")
INCREMENTAL = Measure(path="ttft_incremental_s/mean", label="incremental TTFT")
ITL = Measure(path="itl_s/mean", label="ITL")
P99 = Measure(path="ttft_rounds_s/p99", label="P99 TTFT")
LONGEST = Measure(path="ttft_longest_s", label="longest TTFT")
DETAILS = (INITIAL, INCREMENTAL, P99, LONGEST, ITL)
"""Means, as in the figure's bottom row, and besides them the latencies that means hide."""
DETAIL_NAMES = ("first", "later", "P99", "longest", "ITL")
"""Short names for below an axis."""
AVERAGES = {"ampd-avg-dynamo": "dynamo", "ampd-avg-vllm": "vllm"}
LARGEST = {
    "ampd-max-dynamo": ("dynamo", "Llama-3.1-70B", "gaia"),
    "ampd-max-vllm": ("vllm", "Mixtral-8x7B", "hotpotqa"),
}
"""Claim -> baseline, and the panel of the printed label."""
COLUMNS: Columns[StoredRun] = {
    "system": lambda run: run.cell.system,
    "deployment": lambda run: run.facts["deployment"],
    "seed": lambda run: run.cell.seed,
    "slo_attainment": ATTAINED,
    "ttft_initial_mean_s": INITIAL,
    "ttft_initial_p50_s": Measure(path="ttft_initial_s/p50"),
    "ttft_incremental_mean_s": INCREMENTAL,
    "ttft_incremental_p50_s": Measure(path="ttft_incremental_s/p50"),
    "ttft_p99_s": P99,
    "ttft_longest_s": LONGEST,
    "itl_mean_s": ITL,
    "e2el_mean_s": Measure(path="e2el_s/mean"),
    "local_share": Measure(path="local_share"),
    "prefill_load": Measure(path="prefill_load"),
    "obtained": lambda run: run.obtained,
    "valid": lambda run: run.validity.valid,
    "run": lambda run: run.cell.key,
}


def cells(view: View) -> list[Cell]:
    return grid(view, FIGURE4, panels(), rates_of(view))


def table_of(runs: Runs, of: Of = ATTAINED) -> Attainments:
    return tabulate(runs, FIGURE4, panels(), rates_of(runs.view), of=of)


def detail_of(runs: Runs, of: Measure) -> Attainments:
    return tabulate(runs, DETAILED, details(), (DETAIL_RATE,), of=of)


def page(runs: Runs) -> Page:
    table, view = table_of(runs), runs.view
    axis = Axis(label="SLO attainment (%)", better="higher", limits=(0, 105))
    drawn = over_rates(table, DRAWN, table.at, axis, within=OF_SHARES)
    drawn = [with_printed(each, panel, table.rates) for each, panel in zip(drawn, table.panels, strict=True)]
    notes = summary_notes(table, view)
    return Page(
        picture=Picture(
            panels=[*drawn, *(bottom_row(runs) if DETAIL_RATE in table.rates else ())],
            columns=len(TRACES),
            caption=[
                *notes[:4],
                f"SLO attainment in {DEFAULT}.",
                "AMPD and Dynamo on the first plan of Table 2; tuned systems on the best of searches of one size, on other samples of the same "
                f"workload. {SWITCHES} {PRINTED} Lines lie a little beside each other; Continuum is within a "
                "point of vLLM and not drawn as a line; the CSV has it and all other systems that ran. ampd/knee has the rates at which each falls to 90 %. The panels of latency have "
                "the mean TTFT of first and of later prefills, the P99 and the longest TTFT, and the mean ITL, all on Table 2's plan.",
                repeats_of(view),
            ],
        ),
        csv=Table(
            columns=("model", "trace", "rate_sessions_s", "contender", *COLUMNS),
            rows=[
                (panel.model, panel.trace, rate, name, *(column(run) for column in COLUMNS.values()))
                for panel in panels()
                for rate in table.rates
                for name in FIGURE4
                for run in runs.of(CONTENDERS[name].on(view, panel, rate))
            ],
        ),
        notes=notes,
    )


def with_printed(drawn: Drawn, panel: TracePanel, rates: Sequence[float]) -> Drawn:
    """Add what the paper's text says of the panel. No system attains more than 100 %. So if AMPD exceeds a baseline by a printed ratio,
    the baseline attains at most 100 % over it. In one cell the paper gives the values themselves."""
    layers: list[Layer] = list(drawn.layers)
    is_known = (panel.model, panel.trace) == (DETAIL_MODEL, KNOWN_TRACE)
    for name in ("dynamo", "vllm"):
        gains = {rate: panel.gains.get((rate, name), math.nan) for rate in rates}
        bounded = [rate for rate, ratio in gains.items() if ratio > 1 and not (is_known and rate == DETAIL_RATE)]
        label, look = f"{CONTENDERS[name].title} (at most, from the printed gain)", CONTENDERS[name].look
        bounds = [100 / gains[rate] for rate in bounded]
        if bounded:
            layers.append(AtMost(label=label, places=bounded, bounds=bounds, look=look, arrow=6))
    if is_known and DETAIL_RATE in rates:
        for name, value in zip(("ampd", "dynamo", "vllm"), stated_together("ampd", "ampd-derived-abs"), strict=True):
            look, label = CONTENDERS[name].look, f"{CONTENDERS[name].title} (paper)"
            layers.append(Mark(label=label, place=DETAIL_RATE, value=value, look=look, size=6))
    return replace(drawn, layers=layers)


def bottom_row(runs: Runs) -> list[Drawn]:
    """Draw latencies in ms, a panel per trace, on one logarithmic axis. They are points, since bars on it have no natural start."""
    tables = {of.label: detail_of(runs, of) for of in DETAILS}
    ms = [1e3 * float(value) for table in tables.values() for name in DETAILED for value in table.means[name].ravel()]
    positive = [value for value in ms if value > 0] or [1.0]
    limits = (min(positive) / 1.5, 1.5 * max(positive))
    return [
        Drawn(
            title=f"{DETAIL_MODEL}\n{load_session_card(trace).title}, {DETAIL_RATE:g}/s",
            layers=[
                Points(
                    label=CONTENDERS[name].title,
                    places=[tick + 0.2 * (index - 1.5) for tick in range(len(DETAILS))],
                    values=[1e3 * float(table.means[name][row, 0]) for table in tables.values()],
                    look=replace(CONTENDERS[name].look, linestyle="none"),
                )
                for index, name in enumerate(DETAILED)
            ],
            x=Axis(ticks=range(len(DETAILS)), names=DETAIL_NAMES, size=7, rotation=90),
            y=Axis(label="latency (ms)", better="lower", scale="plain log", limits=limits),
        )
        for row, trace in enumerate(TRACES)
    ]


# -- who is ahead -------------------------------------------------------------------------------------------

CEILING = 0.97
"""Above this attainment a system may have no room to improve."""


@dataclass(frozen=True, kw_only=True)
class Gain:
    """The gain of one contender over another, over all cells, in percent."""

    mean: Interval
    median: Interval
    largest: Interval
    where: str
    """The cell with the largest gain."""


def gain_over(table: Attainments, ours: str, theirs: str, floor: float) -> Gain:
    def percent(means: Mapping[str, np.ndarray]) -> np.ndarray:
        return 100 * (gains(means, ours, theirs, floor) - 1)

    row, column = np.unravel_index(np.nanargmax(percent(table.means)), (len(table.panels), len(table.rates)))
    return Gain(
        mean=table.interval(lambda means: float(np.nanmean(percent(means)))),
        median=table.interval(lambda means: float(np.nanmedian(percent(means)))),
        largest=cell_interval(table, ours, theirs, int(row), int(column), floor),
        where=table.place(int(row), int(column)),
    )


@dataclass(frozen=True, kw_only=True)
class Standing:
    """Counts of cells by who is ahead outside noise, that is by more than the interval of the paired difference."""

    contested: int
    ahead: int
    """Cells in which the contender beats all others."""
    behind: int
    """Cells in which one of the others beats it."""
    texts: tuple[str, ...]
    """For each loss, the cell and the winner."""

    def __str__(self) -> str:
        return (
            f"ahead of all outside noise in {self.ahead} and behind one in {self.behind} of the {self.contested} cells in which one of them "
            f"is below {100 * CEILING:.0f} %"
        )


def standing(table: Attainments, ours: str, others: Sequence[str]) -> Standing:
    """Count over contested cells only: where all reach the ceiling, nobody can be behind."""
    means, ahead, texts, places = table.means, 0, list[str](), set[tuple[int, int]]()
    contested = [cell for cell in table.cells if min(float(means[name][cell]) for name in (ours, *others)) < CEILING]
    for row, column in contested:
        points = {other: table.at(ours, row, column, less=other) for other in others}
        ahead += all(is_above(gap, 1e-7) for gap in points.values())
        for other, gap in points.items():
            if is_below(gap, -1e-7):
                places.add((row, column))
                place = f"{table.panels[row].title} {table.rates[column]:g}/s"
                texts.append(f"{place}: {-(gap.mean or 0.0):.2g} points behind {CONTENDERS[other].title}")
    return Standing(contested=len(contested), ahead=ahead, behind=len(places), texts=tuple(texts))


def summary_notes(table: Attainments, view: View) -> list[str]:
    notes = []
    for ours, theirs in PAIRS["fig4"]:
        gain = gain_over(table, ours, theirs, floor_of(view))
        notes.append(
            f"{CONTENDERS[ours].title} over {CONTENDERS[theirs].title}: mean {said(gain.mean, '%')}, median "
            f"{said(gain.median, '%')}, largest {said(gain.largest, '%')} ({gain.where})."
        )
    for ours in ("ampd", "ours", "ampd-tuned", "ours-tuned"):
        for others, kind in (((TUNED_BASELINES[0],), "tuned Dynamo"), (TUNED_BASELINES, "tuned baselines")):
            result = standing(table, ours, others)
            losses = f"; behind: {'; '.join(result.texts)}" if result.texts and ours.endswith("tuned") else ""
            notes.append(f"{CONTENDERS[ours].title} beside {kind}: {result}{losses}.")
    return notes


# -- claims -------------------------------------------------------------------------------------------------


def findings(runs: Runs) -> list[Finding]:
    table = table_of(runs)
    bottom = latencies(runs) if DETAIL_RATE in table.rates else []
    return [*averages(runs, table), *largest(runs, table), *orderings(runs, table), *bottom]


def averages(runs: Runs, table: Attainments) -> list[Finding]:
    results, floor = [], floor_of(runs.view)
    for claim, baseline in AVERAGES.items():
        theirs = f"{baseline}-tuned"
        gain, on_plan = gain_over(table, "ampd", theirs, floor), gain_over(table, "ampd", baseline, floor)
        ours = gain_over(table, "ours-tuned", theirs, floor)
        how = (
            f"mean over {table.num_cells} cells against the tuned baseline {said(gain.mean, '%')} (median {said(gain.median, '%')}); "
            f"on AMPD's plan {said(on_plan.mean, '%')} (median {said(on_plan.median, '%')}); with our switches, both tuned, "
            f"{said(ours.mean, '%')}; {DEFAULT}, {seeds_text(runs.view)}"
        )
        results.append(runs.finding(claim, number(gain.mean), how))
    return results


def largest(runs: Runs, table: Attainments) -> list[Finding]:
    results = []
    for claim, (theirs, model, trace) in LARGEST.items():
        worst = panels().index(panel_of(model, trace))
        share, tuned = (100 * float(table.means[name][worst, -1]) for name in (theirs, f"{theirs}-tuned"))
        gain = gain_over(table, "ampd", f"{theirs}-tuned", floor_of(runs.view))
        how = (
            f"largest of {table.num_cells} cells, {gain.where}: {said(gain.largest, '%')}; the label needs a baseline below "
            f"{100 / (1 + stated('ampd', claim) / 100):.0f} % on {table.place(worst, -1)}, which attains {share:.0f} % on AMPD's plan and "
            f"{tuned:.0f} % tuned; {DEFAULT}, {seeds_text(runs.view)}"
        )
        results.append(runs.finding(claim, number(gain.largest), how))
    return results


def orderings(runs: Runs, table: Attainments) -> list[Finding]:
    means, setup = table.means, f"{DEFAULT}, {seeds_text(runs.view)}"
    same, tuned, ours = (
        standing(table, name, others)
        for name, others in (("ampd", SAME_BASELINES), ("ampd-tuned", TUNED_BASELINES), ("ours-tuned", TUNED_BASELINES))
    )
    rank = 1 + np.mean([means[other] > means["ampd"] + 1e-9 for other in TUNED_BASELINES], axis=(1, 2)).sum()
    colocated = means["vllm-tuned"]
    is_gaia = np.array([panel.trace == "gaia" for panel in table.panels])
    gaia = colocated[is_gaia] > means["dynamo-tuned"][is_gaia]
    others = means["dynamo-tuned"][~is_gaia] > colocated[~is_gaia]
    on_plan = means["vllm"][is_gaia] > means["dynamo"][is_gaia]
    gaps = 100 * np.abs(means["vllm"] - means["continuum"])
    return [
        runs.finding(
            "ampd-best-everywhere",
            float(rank),
            f"mean rank of AMPD among tuned baselines; on AMPD's plan {same}; all tuned {tuned}; with our switches, all tuned, {ours}; {setup}",
        ),
        runs.finding(
            "ampd-gaia-colocated",
            float(gaia.sum()),
            f"in {gaia.sum()} of {gaia.size} cells, all tuned ({on_plan.sum()} on AMPD's plan); {setup}",
            holds=bool(2 * gaia.sum() > gaia.size),
        ),
        runs.finding(
            "ampd-disagg-others",
            float(others.sum()),
            f"in {others.sum()} of {others.size} cells, all tuned; {setup}",
            holds=bool(2 * others.sum() > others.size),
        ),
        runs.finding(
            "ampd-continuum-tie",
            float(np.median(gaps)),
            f"median difference in points on the same plan; within 1 point in {int((gaps <= 1).sum())} of {gaps.size} cells; {setup}",
            holds=bool((gaps <= 1).mean() >= 0.5),
        ),
        *absolute(runs, table),
    ]


def absolute(runs: Runs, table: Attainments) -> list[Finding]:
    """Compare with the attainments that printed gains imply in one cell, all on Table 2's plan. Tuned ones stand only beside them."""
    detail = panel_of(DETAIL_MODEL, "dureader")
    if detail not in table.panels or DETAIL_RATE not in table.rates:
        return []
    cell = table.panels.index(detail), table.rates.index(DETAIL_RATE)
    shares = {name: table.at(name, *cell) for name in FIGURE4}
    same, tuned = ("ampd", "dynamo", "vllm"), ("ampd-tuned", "dynamo-tuned", "vllm-tuned")
    on_plan, searched = (", ".join(said(shares[name], "%") for name in names) for names in (same, tuned))
    how = f"AMPD, Dynamo and vLLM on AMPD's plan: {on_plan}; all tuned: {searched}; {DEFAULT}, {seeds_text(runs.view)}"
    values = tuple(number(shares[name]) for name in same)
    return [runs.finding("ampd-derived-abs", values, how)]


def latencies(runs: Runs) -> list[Finding]:
    """Findings on the figure's bottom row: Llama at 2 sessions/s."""

    def lower(of: Measure, ours: str, theirs: str) -> tuple[int, str]:
        means = detail_of(runs, of).means
        pairs = [(means[ours][row, 0], means[theirs][row, 0]) for row in range(len(TRACES))]
        texts = (f"{trace} {1e3 * a:.0f}/{1e3 * b:.0f}" for trace, (a, b) in zip(TRACES, pairs, strict=True))
        return sum(bool(a < b) for a, b in pairs), f"{of.label} in ms {', '.join(texts)}"

    initial, first_text = lower(INITIAL, "ampd", "dynamo")
    incremental, then_text = lower(INCREMENTAL, "ampd", "dynamo")
    itl, itl_text = lower(ITL, "ampd", "vllm")
    ttft_vllm, ttft_text = lower(INCREMENTAL, "vllm", "dynamo")
    itl_dynamo, _ = lower(ITL, "dynamo", "vllm")
    setup = f"{DETAIL_MODEL} at {DETAIL_RATE:g}/s, four traces, AMPD's plan, {seeds_text(runs.view)}"
    return [
        runs.finding(
            "ampd-ttft-vs-dynamo",
            float(initial + incremental),
            f"AMPD/Dynamo: lower in {initial} of 4 (initial) and {incremental} of 4 (incremental): {first_text}; {then_text}; {setup}",
            holds=initial + incremental == 2 * len(TRACES),
        ),
        runs.finding(
            "ampd-itl-vs-vllm",
            float(itl),
            f"AMPD/vLLM: lower in {itl} of 4: {itl_text}; {setup}",
            holds=itl == len(TRACES),
        ),
        runs.finding(
            "ampd-colocated-ttft",
            float(ttft_vllm + itl_dynamo),
            f"vLLM/Dynamo: TTFT lower in {ttft_vllm} of 4 and Dynamo's ITL lower in {itl_dynamo} of 4: {ttft_text}; {setup}",
            holds=ttft_vllm + itl_dynamo == 2 * len(TRACES),
        ),
    ]


FIGURE = ampd_figure("fig4", "AMPD, Figure 4, §7.2", page=page, cells=cells, findings=findings)
