"""What the paper leaves open, scored: sixteen readings of SLO attainment times five sets of constants against Figure 4.

A score is the mean over cells of |ln(simulated gain) - ln(printed gain)|, gains being ratios of AMPD's attainment over
Dynamo's and over vLLM's; beside it stands the null, under which all systems attain the same.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from engines.ar.constants import CONSTANTS
from engines.ar.slo import READINGS
from paper_figures.ampd.compare import Floats, Table, attained_in, gains, printed, tabulate
from paper_figures.ampd.contenders import PAIRED_SEEDS, Knobs, grid
from paper_figures.ampd.gains import floor_of
from paper_figures.ampd.layout import obtained_sentence, rates_of, seeds_text
from paper_figures.ampd.panels import panels
from paper_figures.common import style
from paper_figures.common.caption import figure_title, invalid_notes
from paper_figures.common.repeats import Repeats
from repro.reports.claims import Finding
from repro.reports.figures import Rendered, View
from repro.runs.cell import Cell
from repro.runs.statistics import Interval
from repro.runs.store import StoredRun
from repro.systems.ar.part import ArPart
from repro.systems.ar.settings import DEFAULT_READING

NAME = "readings"
TITLE = "AMPD readings: what attainment and constants may mean, scored against Figure 4"
SOURCE = "AMPD, Figure 4, §7.1-7.2"
PLATFORMS = ("h20x32",)
NUM_RUNS = PAIRED_SEEDS
SAME = ("ampd", "dynamo", "vllm")
TUNED = ("ampd", "dynamo-tuned", "vllm-tuned")
"""Searched in the default reading; for the platform's own constants only."""
NULL = "null: all systems equal"


def cells(view: View) -> list[Cell]:
    own = _own(view)
    found = grid(NAME, view, tuple(dict.fromkeys((*SAME, *TUNED))), panels(), rates_of(view))
    for constants in CONSTANTS:
        if constants.name != own:
            found += grid(NAME, view, SAME, panels(), rates_of(view), knobs=_knobs(view, constants.name))
    return found


@dataclass(frozen=True, kw_only=True)
class Score:
    constants: str
    reading: str
    plans: str
    dynamo: float
    vllm: float
    whole: Interval
    """Of the sum."""
    llama_vllm: float
    """vLLM's part over Llama's panels alone."""
    winner_right: int
    """Cells in which the better of Dynamo and vLLM is the paper's."""
    gaia_colocated: int
    """Of GAIA's 15 cells, those in which vLLM is ahead of Dynamo."""
    others_disaggregated: int
    """Of the other 45, those in which Dynamo is."""

    @property
    def sort_key(self) -> float:
        return math.inf if self.whole.mean is None else self.whole.mean


def scores(runs: Sequence[StoredRun], view: View) -> list[Score]:
    """Best first; the null among them."""
    found, repeats = [_null(view)], Repeats(runs, view)
    for constants in CONSTANTS:
        knobs = _knobs(view, constants.name)
        for reading in map(str, READINGS):
            for plans, names in (("same", SAME), ("tuned", TUNED)):
                if plans == "tuned" and constants.name != _own(view):
                    continue
                table = tabulate(
                    repeats, view, names, panels(), rates_of(view), view.seeds, of=attained_in(reading), knobs=knobs
                )
                found.append(_score(table, view, constants.name, reading, plans))
    return sorted(found, key=lambda score: score.sort_key)


def _score(table: Table, view: View, constants: str, reading: str, plans: str) -> Score:
    floor = floor_of(view)
    ampd, dynamo, vllm = table.values
    to_dynamo, to_vllm = (np.log(printed(table.panels, table.rates, each)) for each in ("dynamo", "vllm"))

    def off(means: dict[str, Floats], other: str, target: Floats) -> Floats:
        return np.abs(np.log(gains(means, ampd, other, floor)) - target)

    means = dict(table.means)
    is_llama = np.array([panel.model.startswith("Llama") for panel in table.panels])
    is_gaia = np.array([panel.trace == "gaia" for panel in table.panels])
    simulated = means[dynamo] - means[vllm]
    stated = to_vllm - to_dynamo
    return Score(
        constants=constants,
        reading=reading,
        plans=plans,
        dynamo=float(np.nanmean(off(means, dynamo, to_dynamo))),
        vllm=float(np.nanmean(off(means, vllm, to_vllm))),
        whole=table.interval(
            lambda each: float(
                np.nanmean(off(dict(each), dynamo, to_dynamo)) + np.nanmean(off(dict(each), vllm, to_vllm))
            )
        ),
        llama_vllm=float(np.nanmean(off(means, vllm, to_vllm)[is_llama])),
        winner_right=int(((simulated * stated > 0) | (stated == 0)).sum()),
        gaia_colocated=int((simulated[is_gaia] < 0).sum()),
        others_disaggregated=int((simulated[~is_gaia] > 0).sum()),
    )


def _null(view: View) -> Score:
    to_dynamo, to_vllm = (np.abs(np.log(printed(panels(), rates_of(view), each))) for each in ("dynamo", "vllm"))
    is_llama = np.array([panel.model.startswith("Llama") for panel in panels()])
    both = float(np.nanmean(to_dynamo) + np.nanmean(to_vllm))
    return Score(
        constants="-",
        reading=NULL,
        plans="-",
        dynamo=float(np.nanmean(to_dynamo)),
        vllm=float(np.nanmean(to_vllm)),
        whole=Interval(mean=both, half_width=None, n=1, confidence=0.95),
        llama_vllm=float(np.nanmean(to_vllm[is_llama])),
        winner_right=0,
        gaia_colocated=0,
        others_disaggregated=0,
    )


def render(runs: Sequence[StoredRun], view: View, out: Path) -> Rendered:
    found = scores(runs, view)
    stem = f"{NAME}-{view.stem}"
    files = _draw(runs, found, view, out, stem)
    columns = (
        "constants",
        "reading",
        "plans",
        "score",
        "half_width",
        "dynamo",
        "vllm",
        "llama_vllm",
        "winner_right",
        "gaia_colocated",
        "others_disaggregated",
    )
    rows = [
        (
            s.constants,
            s.reading,
            s.plans,
            s.whole.mean,
            s.whole.half_width,
            s.dynamo,
            s.vllm,
            s.llama_vllm,
            *(
                None if s.reading == NULL else count
                for count in (s.winner_right, s.gaia_colocated, s.others_disaggregated)
            ),
        )
        for s in found
    ]
    num_cells = len(panels()) * len(rates_of(view))
    return Rendered(
        files=(*files, style.save_csv(out / f"{stem}.csv", columns, rows)),
        columns=(
            "constants",
            "reading",
            "plans",
            "score",
            "Dynamo",
            "vLLM",
            "vLLM, Llama",
            f"winner right of {num_cells}",
            "GAIA co-located",
            "others disaggregated",
        ),
        rows=tuple(
            (
                s.constants,
                s.reading,
                s.plans,
                "-" if s.whole.mean is None else f"{s.whole.mean:.3f} ± {s.whole.half_width or 0:.3f}",
                f"{s.dynamo:.3f}",
                f"{s.vllm:.3f}",
                f"{s.llama_vllm:.3f}",
                *(
                    str(count) if s.reading != NULL else "-"
                    for count in (s.winner_right, s.gaia_colocated, s.others_disaggregated)
                ),
            )
            for s in found
        ),
        notes=(*conclusions(found, view), *invalid_notes(runs)),
    )


def conclusions(found: Sequence[Score], view: View) -> list[str]:
    null = next(score for score in found if score.reading == NULL)
    default = next(s for s in found if (s.constants, s.reading, s.plans) == (_own(view), str(DEFAULT_READING), "same"))
    best = next(score for score in found if score.reading != NULL)
    better = sum(score.sort_key < null.sort_key for score in found)
    surely = sum(score.sort_key + (score.whole.half_width or 0.0) < null.sort_key for score in found)
    return [
        f"The null scores {null.sort_key:.3f}; {better} of {len(found) - 1} combinations score less (are nearer to Figure 4), "
        f"{surely} of them outside noise.",
        f"Best: {best.constants} with {best.reading} ({best.plans} plans), {best.sort_key:.3f}.",
        f"The default, {default.constants} with {default.reading}, scores {default.sort_key:.3f} on AMPD's plan, number "
        f"{found.index(default) + 1} of {len(found)}: it says little more of Figure 4 than that no system differs.",
        _both_orders(found),
        f"For Llama against vLLM alone the default is {default.llama_vllm:.3f} off and the null {null.llama_vllm:.3f}.",
    ]


def _both_orders(found: Sequence[Score]) -> str:
    """Co-location ahead in GAIA and Dynamo ahead elsewhere: the paper has both."""
    same = [score for score in found if score.plans == "same"]
    turned = [score for score in same if score.gaia_colocated >= 8]
    most = max((score.others_disaggregated for score in turned), default=0)
    return (
        f"GAIA turns to co-location, as in the paper, in {len(turned)} of {len(same)} combinations on AMPD's plan; in these Dynamo is "
        f"ahead in at most {most} of the 45 other cells, where the paper has 41."
    )


def findings(runs: Sequence[StoredRun], view: View) -> list[Finding]:
    """The claims are answered by the figures, in the default reading."""
    return []


def _draw(runs: Sequence[StoredRun], found: Sequence[Score], view: View, out: Path, stem: str) -> tuple[Path, ...]:
    """Simulated against printed gains, in the default reading."""
    knobs = _knobs(view, _own(view))
    table = tabulate(
        runs, view, SAME, panels(), rates_of(view), view.seeds, of=attained_in(str(DEFAULT_READING)), knobs=knobs
    )
    colors = {"Qwen3-32B": "#E69F00", "Llama-3.1-70B": "#0072B2", "Mixtral-8x7B": "#009E73"}
    with style.drawing():
        figure, axes = style.row_of_panels(["gain over Dynamo", "gain over vLLM", "scores"])
        for place, baseline in enumerate(("dynamo", "vllm")):
            ours = gains(table.means, "ampd", baseline, floor_of(view))
            paper = printed(table.panels, table.rates, baseline)
            for model, color in colors.items():
                rows = [index for index, panel in enumerate(table.panels) if panel.model == model]
                axes[place].plot(
                    paper[rows].ravel(),
                    ours[rows].ravel(),
                    linestyle="none",
                    marker="o",
                    markersize=4,
                    color=color,
                    label=model,
                )
            span = [0.5, 40.0]
            axes[place].plot(span, span, linestyle="--", linewidth=1, color=style.GUIDE_COLOR, label="as printed")
            axes[place].axhline(1.0, linestyle=":", linewidth=1, color=style.GUIDE_COLOR)
            axes[place].set_xscale("log")
            axes[place].set_yscale("log")
            axes[place].set_xlabel("printed ratio of attainments")
        axes[0].set_ylabel("simulated ratio")
        shown = [score for score in found if score.reading != NULL and score.plans == "same"]
        for constants in dict.fromkeys(score.constants for score in shown):
            own = sorted(score.sort_key for score in shown if score.constants == constants)
            axes[2].plot(range(1, len(own) + 1), own, marker=".", linewidth=1, label=constants)
        null = next(score for score in found if score.reading == NULL)
        axes[2].axhline(null.sort_key, linestyle="--", color="black", linewidth=1, label="null")
        axes[2].set_xlabel("readings, best first")
        axes[2].set_ylabel("score (less is nearer)")
        return style.publish(
            figure,
            axes,
            out,
            stem,
            title=figure_title(TITLE, runs, view),
            caption=[
                *conclusions(found, view),
                obtained_sentence(runs),
                f"Left: {len(table.panels) * len(table.rates)} cells in the default reading, {DEFAULT_READING}, all on AMPD's plan. Right: "
                "mean over cells of |ln(simulated gain) - ln(printed gain)|, Dynamo's and vLLM's added.",
                f"{seeds_text(view)}.",
            ],
        )


def _own(view: View) -> str:
    return view.platform.part(ArPart).constants


def _knobs(view: View, constants: str) -> Knobs:
    return () if constants == _own(view) else (("constants", constants),)
