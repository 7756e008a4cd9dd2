"""AMPD Figure 5 (§7.2): gains of adaptive routing and prefill reordering, and where prefills run.

The paper's base, "w/o AR+PR", does not say how it picks a prefill worker; both ways are shown: the shortest queue, and at
random as Algorithm 1 does while all workers have slack.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from paper_figures.ampd.compare import Means, Table, said, tabulate
from paper_figures.ampd.contenders import CONTENDERS, PAIRED_SEEDS, grid
from paper_figures.ampd.gains import floor_of
from paper_figures.ampd.layout import obtained_sentence, seeds_text, transient_sentence
from paper_figures.ampd.panels import DETAIL_MODEL, DETAIL_RATE, TRACES, Panel, panel_of
from paper_figures.ampd.said import DEFAULT, finding
from paper_figures.common import style
from paper_figures.common.caption import figure_title, invalid_notes
from repro.reports.claims import Finding
from repro.reports.figures import Rendered, View
from repro.reports.paper import load_table
from repro.runs.cell import Cell
from repro.runs.statistics import Interval
from repro.runs.store import StoredRun
from repro.workloads.sessions import load_session_card

if TYPE_CHECKING:
    from matplotlib.axes import Axes

NAME = "fig5"
TITLE = "AMPD Figure 5: ablation, and where prefills run"
SOURCE = "AMPD, Figure 5, §7.2"
PLATFORMS = ("h20x32",)
NUM_RUNS = PAIRED_SEEDS

ABLATED = ("dureader", "gaia")
LADDER = ("none", "none-random", "pr", "ar", "ampd")
BASES = ("none", "none-random")
SHARES = ("ampd", "ours")
CSV_COLUMNS = ("part", "trace", "contender", "value_percent", "half_width", "paper_percent", "obtained")


def cells(view: View) -> list[Cell]:
    ablated = grid(NAME, view, LADDER, [panel_of(DETAIL_MODEL, trace) for trace in ABLATED], (DETAIL_RATE,))
    shares = grid(NAME, view, SHARES, _panels(), (DETAIL_RATE,))
    return list(dict.fromkeys([*ablated, *shares]))


def render(runs: Sequence[StoredRun], view: View, out: Path) -> Rendered:
    stem, floor = f"{NAME}-{view.stem}", floor_of(view)
    ladder, shares = ladder_of(runs, view), shares_of(runs, view)
    paper = printed()
    rows: list[tuple[object, ...]] = []
    for row, trace in enumerate(ABLATED):
        rows += [
            ("attainment", trace, name, at.mean, at.half_width, None, "simulated")
            for name in LADDER
            for at in [ladder.at(name, row, 0)]
        ]
        for base in BASES:
            for name in LADDER[2:]:
                gain = gain_of(ladder, name, base, row, floor)
                value = paper.get((trace, name)) if base == "none" else None
                rows.append(
                    (f"gain over {CONTENDERS[base].title}", trace, name, gain.mean, gain.half_width, value, "simulated")
                )
    for row, trace in enumerate(TRACES):
        for name in SHARES:
            share = shares.at(name, row, 0)
            value = paper.get((trace, "local")) if name == "ampd" else None
            rows.append(("local prefills", trace, name, share.mean, share.half_width, value, "simulated"))
    files = _draw(ladder, shares, paper, runs, view, out, stem)
    return Rendered(
        files=(*files, style.save_csv(out / f"{stem}.csv", CSV_COLUMNS, rows)),
        columns=("part", "trace", "contender", "ours %", "paper %"),
        rows=tuple(
            (
                str(part),
                _title(str(trace)),
                CONTENDERS[str(name)].title,
                _pm(mean, half),
                "-" if value is None else f"{value:g}",
            )
            for part, trace, name, mean, half, value, _ in rows
        ),
        notes=tuple(invalid_notes(runs)),
    )


def ladder_of(runs: Sequence[StoredRun], view: View) -> Table:
    own = [panel_of(DETAIL_MODEL, trace) for trace in ABLATED]
    return tabulate(runs, view, LADDER, own, (DETAIL_RATE,), view.seeds)


def shares_of(runs: Sequence[StoredRun], view: View) -> Table:
    """Local prefills."""
    return tabulate(
        runs, view, SHARES, _panels(), (DETAIL_RATE,), view.seeds, of=lambda run: run.summary["local_share"]
    )


def gain_of(table: Table, name: str, base: str, row: int, floor: float) -> Interval:
    """Percent."""

    def percent(means: Means) -> float:
        return 100 * float(max(means[name][row, 0], floor) / max(means[base][row, 0], floor) - 1)

    return table.interval(percent)


def printed() -> dict[tuple[str, str], float]:
    """(trace, contender) -> gain in percent, and (trace, "local") -> share."""
    names = {"AMPD w/o PR (adaptive routing only)": "ar", "AMPD (full)": "ampd", "local execution": "local"}
    return {
        (str(row["trace"]).lower(), names[str(row["series"])]): float(str(row["value"]))
        for row in load_table("ampd/fig5.csv")
        if str(row["series"]) in names
    }


def findings(runs: Sequence[StoredRun], view: View) -> list[Finding]:
    ladder, shares, floor, seeds = ladder_of(runs, view), shares_of(runs, view), floor_of(view), seeds_text(view)
    where = f"{DETAIL_MODEL} at {DETAIL_RATE:g}/s, Table 2's plan, {DEFAULT}, {seeds}"
    found = []

    def told(row: int, name: str) -> tuple[float, str]:
        by_base = {base: gain_of(ladder, name, base, row, floor) for base in BASES}
        texts = [f"{said(gain, '%')} over {CONTENDERS[base].title}" for base, gain in by_base.items()]
        return _number(by_base["none"]), f"{'; '.join(texts)}; {where}"

    base = _number(ladder.at("none", 1, 0))
    room = f"the base attains {base:.0f} %, so that at most {100 * (100 / base - 1) if base else math.inf:.0f} % are left to gain"
    for claim, row, name in (
        ("ampd-ar-dureader", 0, "ar"),
        ("ampd-full-dureader", 0, "ampd"),
        ("ampd-ar-gaia", 1, "ar"),
        ("ampd-full-gaia", 1, "ampd"),
    ):
        value, how = told(row, name)
        found.append(finding(claim, value, f"{room}; {how}" if row else how))
    reordering = {row: gain_of(ladder, "ampd", "ar", row, floor) for row in (0, 1)}
    alone = {row: gain_of(ladder, "pr", "none", row, floor) for row in (0, 1)}
    for claim, row in (("ampd-pr-low", 0), ("ampd-pr-high", 1)):
        how = f"{said(reordering[row], '%')} on top of adaptive routing, {said(alone[row], '%')} without it, {ABLATED[row]}; {where}"
        found.append(finding(claim, _number(reordering[row]), how))
    both = tuple(_number(gain_of(ladder, "ampd", "none", row, floor)) for row in (0, 1))
    found.append(
        finding("ampd-total-range", both, f"over {CONTENDERS['none'].title}; {room} in GAIA; {where}", of=ABLATED)
    )
    local = {}
    for row, trace in enumerate(TRACES):
        share = shares.at("ampd", row, 0)
        local[trace] = _number(share)
        found.append(finding(f"ampd-local-{trace}", local[trace], f"{said(share, '%')} of prefills; {where}"))
    found.append(finding("ampd-local-range", tuple(local.values()), f"of prefills; {where}", of=tuple(local)))
    return found


def _conclusions(ladder: Table, floor: float) -> list[str]:
    """Over the base without both, which joins the shortest queue, and over one that dispatches at random."""
    found = []
    for row, trace in enumerate(ABLATED):
        shortest, random = (said(gain_of(ladder, "ampd", base, row, floor), "%") for base in BASES)
        found.append(
            f"{_title(trace)}: both together gain {shortest} over joining the shortest queue, {random} over dispatch at random."
        )
    return found


def _panels() -> list[Panel]:
    return [panel_of(DETAIL_MODEL, trace) for trace in TRACES]


def _draw(
    ladder: Table,
    shares: Table,
    paper: dict[tuple[str, str], float],
    runs: Sequence[StoredRun],
    view: View,
    out: Path,
    stem: str,
) -> tuple[Path, ...]:
    titles = [*(f"{_title(trace)}: attainment" for trace in ABLATED), "prefills on decode workers"]
    with style.drawing():
        figure, axes = style.row_of_panels(titles)
        for row, _ in enumerate(ABLATED):
            _bars(axes[row], [ladder.at(name, row, 0) for name in LADDER], [CONTENDERS[name].title for name in LADDER])
        _bars(axes[2], [shares.at("ampd", row, 0) for row in range(len(TRACES))], [_title(trace) for trace in TRACES])
        for place, trace in enumerate(TRACES):
            if (trace, "local") in paper:
                style.paper_marker(axes[2], place, paper[trace, "local"], color="black", marker="D", label="paper")
        axes[0].set_ylabel("%")
        return style.publish(
            figure,
            axes,
            out,
            stem,
            title=f"{figure_title(TITLE, runs, view)}; {DETAIL_MODEL}, {DETAIL_RATE:g} sessions/s",
            caption=[
                *_conclusions(ladder, floor_of(view)),
                obtained_sentence(runs),
                f"Attainment in {DEFAULT}. {seeds_text(view)}: mean, and bars for its 95 % interval (Student's t).",
                "Gains over both bases, and those printed, are in the table beside the figure.",
                transient_sentence(runs),
            ],
        )


def _bars(axes: Axes, values: Sequence[Interval], labels: Sequence[str]) -> None:
    axes.bar(
        range(len(values)),
        [value.mean or 0.0 for value in values],
        0.6,
        yerr=[value.half_width or 0.0 for value in values],
        capsize=3,
        color="#56B4E9",
    )
    short = [label.replace("AMPD ", "").replace(", random dispatch", "\nrandom") for label in labels]
    axes.set_xticks(range(len(values)), short, fontsize=6.5)


def _title(trace: str) -> str:
    return load_session_card(trace).title


def _pm(mean: object, half: object) -> str:
    return "-" if mean is None else f"{mean:.1f}" + ("" if half is None else f" ± {half:.1f}")


def _number(interval: Interval) -> float:
    return math.nan if interval.mean is None else interval.mean
