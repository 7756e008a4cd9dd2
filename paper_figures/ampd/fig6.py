"""AMPD Figure 6 (§7.2): sensitivity to w, alpha and beta; and to the window of the statistics, which the paper's conclusion
speaks of and never sweeps."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from engines.ampd.routing import RoutingConfig
from engines.ampd.system import AmpdConfig
from engines.ar.slo import Slo
from paper_figures.ampd.compare import attained, said
from paper_figures.ampd.contenders import PAIRED_SEEDS, grid
from paper_figures.ampd.layout import obtained_sentence, seeds_text, transient_sentence
from paper_figures.ampd.panels import DETAIL_MODEL, DETAIL_RATE, panel_of
from paper_figures.ampd.said import DEFAULT, finding
from paper_figures.common import style
from paper_figures.common.caption import figure_title, invalid_notes
from paper_figures.common.repeats import Repeats
from repro.reports.claims import Finding
from repro.reports.figures import Rendered, View
from repro.reports.paper import load_table
from repro.runs.cell import Cell, Scalar
from repro.runs.statistics import Interval, mean_interval
from repro.runs.store import StoredRun

NAME = "fig6"
TITLE = "AMPD Figure 6: sensitivity to w, alpha, beta and the window of statistics"
SOURCE = "AMPD, Figure 6, §7.2"
PLATFORMS = ("h20x32",)
NUM_RUNS = PAIRED_SEEDS

SWEEPS: Mapping[str, tuple[float, ...]] = MappingProxyType(
    {
        "w": (2, 3, 4, 5),
        "alpha": (0.75, 0.8, 0.85, 0.9, 0.95, 1.0),
        "beta": (0.75, 0.8, 0.85, 0.9, 0.95),
        "window_s": (2.0, 5.0, 10.0, 20.0, 60.0),
    }
)
PRINTED_DEFAULTS: Mapping[str, float] = MappingProxyType({"w": 3, "alpha": 0.9, "beta": 0.85, "window_s": 10.0})
CSV_COLUMNS = (
    "parameter",
    "value",
    "attainment_percent",
    "half_width",
    "difference_from_default",
    "its_half_width",
    "paper",
)


def cells(view: View) -> list[Cell]:
    """At the defaults without knobs, so that Figure 4 and 5 share the run."""
    swept = (cell for name, values in SWEEPS.items() for value in values for cell in _cells(view, name, value))
    return list(dict.fromkeys(swept))


def _cells(view: View, name: str, value: float) -> list[Cell]:
    knobs: tuple[tuple[str, Scalar], ...] = () if value == PRINTED_DEFAULTS[name] else ((name, value),)
    return grid(NAME, view, ("ampd",), [panel_of(DETAIL_MODEL, "dureader")], (DETAIL_RATE,), knobs=knobs)


Swept = dict[tuple[str, float], tuple[Interval, Interval]]
"""Attainment and its paired difference from the default, in percent."""


def swept(runs: Sequence[StoredRun], view: View) -> Swept:
    shares = shares_of(runs, view)
    base = shares["w", PRINTED_DEFAULTS["w"]]
    return {key: (mean_interval(list(own.values())), paired(own, base)) for key, own in shares.items()}


def shares_of(runs: Sequence[StoredRun], view: View) -> dict[tuple[str, float], dict[int, float]]:
    """Attainment in percent, by seed."""
    repeats = Repeats(runs, view)
    return {
        (name, value): {
            run.cell.seed: 100 * share
            for run in repeats.of(_cells(view, name, value)[0])
            if run.validity.valid and (share := attained(run)) is not None
        }
        for name, sweep in SWEEPS.items()
        for value in sweep
    }


def paired(one: Mapping[int, float], other: Mapping[int, float]) -> Interval:
    return mean_interval([share - other[seed] for seed, share in one.items() if seed in other])


def peak(shares: Mapping[tuple[str, float], Mapping[int, float]], name: str) -> float:
    """The value with the highest mean; negative where it does not lie between both ends and above them outside noise: there
    is no peak then."""
    values = SWEEPS[name]
    best = max(values, key=lambda value: _number(mean_interval(list(shares[name, value].values()))))
    ends = (values[0], values[-1])
    above = [paired(shares[name, best], shares[name, end]) for end in ends if best not in ends]
    is_peak = bool(above) and all(each.mean is not None and each.mean > (each.half_width or 0.0) for each in above)
    return best if is_peak else -best


def render(runs: Sequence[StoredRun], view: View, out: Path) -> Rendered:
    found, paper = swept(runs, view), printed()
    stem = f"{NAME}-{view.stem}"
    rows = [
        (name, value, at.mean, at.half_width, off.mean, off.half_width, paper.get((name, value)))
        for (name, value), (at, off) in found.items()
    ]
    with style.drawing():
        figure, axes = style.row_of_panels(list(SWEEPS))
        for place, (name, values) in enumerate(SWEEPS.items()):
            at = [found[name, value][0] for value in values]
            axes[place].errorbar(
                values,
                [each.mean if each.mean is not None else math.nan for each in at],
                yerr=[each.half_width or 0.0 for each in at],
                marker="o",
                capsize=3,
                color="#0072B2",
                label="AMPD",
            )
            for value in values:
                if (name, value) in paper:
                    style.paper_marker(
                        axes[place], value, paper[name, value], color="black", marker="D", label="AMPD (paper)"
                    )
            axes[place].set_ylim(0, 100)
            axes[place].set_xticks(values)
        axes[3].set_xscale("log")
        axes[3].set_xticks(SWEEPS["window_s"], [f"{value:g}" for value in SWEEPS["window_s"]])
        axes[3].set_xticks([], minor=True)
        axes[0].set_ylabel("SLO attainment (%)")
        files = style.publish(
            figure,
            axes,
            out,
            stem,
            title=f"{figure_title(TITLE, runs, view)}; {panel_of(DETAIL_MODEL, 'dureader').title}, {DETAIL_RATE:g} sessions/s",
            caption=[
                f"{_conclusion(found)}.",
                obtained_sentence(runs),
                f"Attainment in {DEFAULT}. {seeds_text(view)}: mean, and bars for its 95 % interval; differences from the default are paired.",
                transient_sentence(runs),
            ],
        )
    return Rendered(
        files=(*files, style.save_csv(out / f"{stem}.csv", CSV_COLUMNS, rows)),
        columns=("parameter", "value", "attainment %", "minus the default's, points", "paper %"),
        rows=tuple(
            (name, f"{value:g}", said(at), said(off), "-" if (name, value) not in paper else f"{paper[name, value]:g}")
            for (name, value), (at, off) in found.items()
        ),
        notes=tuple(invalid_notes(runs)),
    )


def findings(runs: Sequence[StoredRun], view: View) -> list[Finding]:
    found, paper = swept(runs, view), printed()
    where = f"{panel_of(DETAIL_MODEL, 'dureader').title} at {DETAIL_RATE:g}/s, {DEFAULT}, {seeds_text(view)}"
    answers = []
    for (name, value), _ in paper.items():
        at, off = found[name, value]
        answers.append(
            finding(
                f"ampd-f6-{name}-{value:g}",
                _number(at),
                f"{said(at, '%')}, {said(off)} points from the default; {where}",
            )
        )
    for name, claim in (("alpha", "ampd-alpha-peak"), ("beta", "ampd-beta-peak")):
        values = SWEEPS[name]
        apart = [value for value in values if _is_apart(found[name, value][1])]
        text = ", ".join(f"{value:g}: {said(found[name, value][0])}" for value in values)
        answers.append(
            finding(
                claim,
                peak(shares_of(runs, view), name),
                f"below 0 the highest mean is no peak; means of {text} %; differs from the default outside noise at {', '.join(map(str, apart)) or 'none'}; {where}",
            )
        )
    means = [_number(found["w", value][0]) for value in SWEEPS["w"]]
    answers.append(
        finding(
            "ampd-w-insensitive",
            max(means) - min(means),
            f"largest minus least mean over w = 2..5 ({', '.join(f'{mean:.1f}' for mean in means)} %); {where}",
        )
    )
    config, routing = AmpdConfig(), RoutingConfig(slo=Slo(ttft_s=1.0, itl_s=1.0))
    own = [run for run in runs if not SWEEPS.keys() & run.cell.knob_values.keys()]
    most = max((run.summary["most_postponed"] for run in own), default=0)
    answers.append(
        finding(
            "ampd-postpone",
            float(config.w if most <= config.w else most),
            f"the limit, or more if it was passed: the most that any prefill was postponed in {len(own)} runs is {most}",
        )
    )
    given = (routing.alpha, routing.beta, float(config.w))
    set_here: tuple[tuple[str, float | tuple[float, ...], str], ...] = (
        ("ampd-defaults", given, "our defaults, set to the paper's"),
        ("ampd-window", config.window_s, "our default, set to the paper's"),
        ("ampd-orderings", float(math.factorial(config.w)), "orderings of a window of w = 3, all tried (Algorithm 2)"),
        ("ampd-derived-n", float(runs[0].num_requests), "sessions a run, set to what Figure 6's values imply"),
    )
    for claim, ours, how in set_here:
        answers.append(Finding(claim=claim, value=ours, obtained="computed", how=how))
    return answers


def _conclusion(found: Swept) -> str:
    apart = [f"{name} = {value:g} ({said(off)} points)" for (name, value), (_, off) in found.items() if _is_apart(off)]
    return (
        f"Attainment differs from that of the defaults outside noise at {', '.join(apart)}"
        if apart
        else "No value moves attainment outside noise"
    )


def printed() -> dict[tuple[str, float], float]:
    return {
        (str(row["parameter"]), float(str(row["value"]))): float(str(row["slo_attainment_pct"]))
        for row in load_table("ampd/fig6.csv")
    }


def _is_apart(difference: Interval) -> bool:
    return difference.mean is not None and abs(difference.mean) > (difference.half_width or 0.0) + 1e-9


def _number(interval: Interval) -> float:
    return math.nan if interval.mean is None else interval.mean
