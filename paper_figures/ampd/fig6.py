"""AMPD Figure 6: sensitivity to w, alpha, beta and the window of statistics.

The paper's conclusion mentions the window, but the paper never sweeps it.
"""

import math
from collections.abc import Mapping
from types import MappingProxyType

from engines.ampd.policies import RoutingConfig
from engines.ampd.system import AmpdConfig
from paper_figures.ampd.contenders import CONTENDERS, DETAIL_MODEL, DETAIL_RATE, panel_of
from paper_figures.ampd.layout import DEFAULT, ampd_figure, repeats_of, seeds_text
from paper_figures.common.figure import Columns, Page, Picture, seed_by_seed, table
from paper_figures.common.panel import OF_SHARES, Axis, Line, Mark, Panel
from paper_figures.common.runs import Measure, Runs
from paper_figures.common.style import Look, system_look
from paper_figures.common.words import is_above, number, said
from repro.reports.claims import Finding, load_table
from repro.reports.figures import Knobs, View
from repro.runs.cell import Cell
from repro.runs.statistics import Interval

SWEEPS: Mapping[str, tuple[float, ...]] = MappingProxyType(
    {
        "w": (2, 3, 4, 5),
        "alpha": (0.75, 0.8, 0.85, 0.9, 0.95, 1.0),
        "beta": (0.75, 0.8, 0.85, 0.9, 0.95),
        "window_s": (2.0, 5.0, 10.0, 20.0, 60.0),
    }
)
AXES = {"w": "w", "alpha": "alpha", "beta": "beta", "window_s": "seconds"}
TITLES = {
    "w": "w: postponed at most",
    "alpha": "alpha",
    "beta": "beta",
    "window_s": "window of statistics (not in the paper)",
}
POINTS = [(name, value) for name, values in SWEEPS.items() for value in values]
PRINTED_DEFAULTS: Mapping[str, float] = MappingProxyType({"w": 3, "alpha": 0.9, "beta": 0.85, "window_s": 10.0})
PERCENT = Measure(path="slo_attainment", scale=100)
PEAKS = {"alpha": "ampd-alpha-peak", "beta": "ampd-beta-peak"}


def cell(view: View, name: str, value: float) -> Cell:
    """At the defaults we set no knobs, so that Figures 4 and 5 share the run."""
    knobs: Knobs = () if value == PRINTED_DEFAULTS[name] else ((name, value),)
    return CONTENDERS["ampd"].on(view, panel_of(DETAIL_MODEL, "dureader"), DETAIL_RATE, knobs)


def cells(view: View) -> list[Cell]:
    return [each for point in POINTS for each in seed_by_seed([cell(view, *point)], view)]


def off(runs: Runs, name: str, value: float) -> Interval:
    """Return the paired difference from the default's attainment."""
    return runs.versus(cell(runs.view, name, value), cell(runs.view, "w", PRINTED_DEFAULTS["w"]), PERCENT, "points")


def at(runs: Runs, name: str, value: float) -> Interval:
    return runs.at(cell(runs.view, name, value), PERCENT)


def peak(runs: Runs, name: str) -> float:
    """Return the value with the highest mean. It is negative if there is no peak: the value does not lie between both ends, or not above
    them outside noise."""
    values = SWEEPS[name]
    best = max(values, key=lambda value: number(at(runs, name, value)))
    ends = (values[0], values[-1])
    inner = [cell(runs.view, name, best)] if best not in ends else []
    gains = [runs.versus(each, cell(runs.view, name, end), PERCENT, "points") for each in inner for end in ends]
    return best if gains and all(map(is_above, gains)) else -best


def page(runs: Runs) -> Page:
    columns: Columns[tuple[str, float]] = {
        "parameter": lambda point: point[0],
        "value": lambda point: point[1],
        "attainment_percent": lambda point: at(runs, *point).mean,
        "half_width": lambda point: at(runs, *point).half_width,
        "difference_from_default": lambda point: off(runs, *point).mean,
        "its_half_width": lambda point: off(runs, *point).half_width,
        "paper": printed().get,
    }
    return Page(
        table=table(POINTS, columns),
        picture=Picture(
            panels=[panel(runs, name) for name in SWEEPS],
            after_title=f"; {panel_of(DETAIL_MODEL, 'dureader').title}, {DETAIL_RATE:g} sessions/s",
            caption=[
                f"{conclusion(runs)}.",
                f"Attainment in {DEFAULT}. Differences from the default are paired.",
                repeats_of(runs.view),
            ],
        ),
    )


def panel(runs: Runs, name: str) -> Panel:
    values, paper = SWEEPS[name], printed()
    line = Line(
        label="AMPD",
        places=values,
        at=[at(runs, name, value) for value in values],
        look=system_look("ampd"),
        capsize=3,
        within=OF_SHARES,
    )
    look = Look(color="black", marker="D")
    marks = [
        Mark(label="AMPD (paper)", place=value, value=paper[name, value], look=look)
        for value in values
        if (name, value) in paper
    ]
    return Panel(
        title=TITLES[name],
        layers=[line, *marks],
        x=Axis(label=AXES[name], ticks=values, scale="log" if name == "window_s" else "linear"),
        y=Axis(label="SLO attainment (%)", better="higher", limits=(0, 105)),
    )


def findings(runs: Runs) -> list[Finding]:
    setup = f"{panel_of(DETAIL_MODEL, 'dureader').title} at {DETAIL_RATE:g}/s, {DEFAULT}, {seeds_text(runs.view)}"
    results = []
    for name, value in printed():
        attained = at(runs, name, value)
        how = f"{said(attained, '%')}, {said(off(runs, name, value))} points from the default; {setup}"
        results.append(runs.finding(f"ampd-f6-{name}-{value:g}", number(attained), how))
    for name, claim in PEAKS.items():
        differing = ", ".join(str(value) for value in SWEEPS[name] if is_apart(off(runs, name, value))) or "none"
        text = ", ".join(f"{value:g}: {said(at(runs, name, value))}" for value in SWEEPS[name])
        how = f"below 0 the highest mean is no peak; means of {text} %; differs from the default outside noise at {differing}; {setup}"
        results.append(runs.finding(claim, peak(runs, name), how))
    return [*results, insensitive(runs, setup), postponed(runs), *set_here(runs)]


def insensitive(runs: Runs, where: str) -> Finding:
    """The ends of the interval are its readings: a bound between them is neither met nor missed."""
    means = {value: number(at(runs, "w", value)) for value in SWEEPS["w"]}
    best, worst = (pick(means, key=means.__getitem__) for pick in (max, min))
    gap = runs.versus(cell(runs.view, "w", best), cell(runs.view, "w", worst), PERCENT, "points")
    texts = ", ".join(f"{mean:.1f}" for mean in means.values())
    ends = {"low end of the interval": gap.low, "high end": gap.high}
    return runs.finding(
        "ampd-w-insensitive",
        means[best] - means[worst],
        f"largest minus least mean over w = 2..5 ({texts} %), {said(gap)} points paired by seed; {where}",
        readings=tuple((name, end) for name, end in ends.items() if end is not None),
    )


def postponed(runs: Runs) -> Finding:
    own = [run for run in runs.all if not SWEEPS.keys() & run.cell.knob_values.keys()]
    limit, most = AmpdConfig().w, max((run.summary["most_postponed"] for run in own), default=0)
    how = f"the limit, or more if it was passed: the most that any prefill was postponed in {len(own)} runs is {most}"
    return runs.finding("ampd-postpone", float(limit if most <= limit else most), how)


def set_here(runs: Runs) -> list[Finding]:
    config, routing = AmpdConfig(), RoutingConfig()
    defaults = (routing.alpha, routing.beta, float(config.w))
    sessions = float(runs.all[0].num_requests)
    rows: tuple[tuple[str, float | tuple[float, ...], str], ...] = (
        ("ampd-defaults", defaults, "our defaults, set to the paper's"),
        ("ampd-window", config.window_s, "our default, set to the paper's"),
        ("ampd-orderings", float(math.factorial(config.w)), "orderings of a window of w = 3, all tried (Algorithm 2)"),
        ("ampd-derived-n", sessions, "sessions a run, set to what Figure 6's values imply"),
    )
    return [runs.finding(claim, ours, how, obtained="computed") for claim, ours, how in rows]


def conclusion(runs: Runs) -> str:
    differences = {point: off(runs, *point) for point in POINTS}
    texts = [f"{name} = {value:g} ({said(gap)} points)" for (name, value), gap in differences.items() if is_apart(gap)]
    if not texts:
        return "No value moves attainment outside noise"
    return f"Attainment differs from that of the defaults outside noise at {', '.join(texts)}"


def printed() -> dict[tuple[str, float], float]:
    return {
        (str(row["parameter"]), float(str(row["value"]))): float(str(row["slo_attainment_pct"]))
        for row in load_table("ampd/fig6.csv")
    }


def is_apart(difference: Interval) -> bool:
    return difference.mean is not None and abs(difference.mean) > (difference.half_width or 0.0) + 1e-9


FIGURE = ampd_figure("fig6", "AMPD, Figure 6, §7.2", page=page, cells=cells, findings=findings)
