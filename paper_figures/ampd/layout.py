"""Code that AMPD's figures share: how they are asked for, how they look, and what their captions say."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from paper_figures.ampd.attainment import Attainments
from paper_figures.ampd.contenders import CONTENDERS, PAIRED_SEEDS
from paper_figures.common.caption import on_a_cluster
from paper_figures.common.figure import figure
from paper_figures.common.panel import ANYWHERE, Axis, Bounds, Layer, Line, Panel
from paper_figures.common.runs import Runs
from repro.reports.figures import View
from repro.runs.statistics import Interval

DEFAULT = "reading round/every/p95, 99 sessions a run"
RATE = "sessions/s"
SWITCHES = "load + backlog: our two switches of the router."


def origin(runs: Runs) -> list[str]:
    """Tell how the runs were obtained, and how many of them are overloaded."""
    overloaded = sum(run.facts["overload_reason"] is not None for run in runs.all)
    return [
        on_a_cluster(runs),
        f"In {overloaded} of {len(runs.all)} runs prefills ask for more than the workers have time for while sessions arrive: what "
        "they attain is of this number of sessions: with more of them it falls, and latency grows.",
    ]


ampd_figure = partial(figure, paper="ampd", platforms=("h20x32",), num_runs=PAIRED_SEEDS, origin=origin)
"""``cells`` hold all seeds, those of one seed before the next."""


def over_rates(
    table: Attainments,
    names: Sequence[str],
    at: Callable[[str, int, int], Interval],
    y: Axis,
    *,
    more: Sequence[Layer] = (),
    rates: Sequence[Sequence[float]] | None = None,
    within: Bounds = ANYWHERE,
) -> list[Panel]:
    """Draw a panel for each of the table's, with lines of contenders over the rates; ``at`` takes name, row and column. Lines are shifted
    slightly, so that equal ones can be told apart. ``rates`` gives each panel its own rates, on a logarithmic axis; intervals are drawn
    ``within`` bounds."""
    own = rates or [table.rates] * len(table.panels)
    return [
        Panel(
            title=panel.title,
            layers=[
                *(
                    Line(
                        label=CONTENDERS[name].title,
                        places=_beside(own[row], index - (len(names) - 1) / 2, is_log=rates is not None),
                        at=[at(name, row, column) for column in range(len(own[row]))],
                        look=CONTENDERS[name].look,
                        within=within,
                        names=[f"{rate:g}" for rate in own[row]],
                    )
                    for index, name in enumerate(names)
                ),
                *more,
            ],
            x=replace(Axis(ticks=own[row]) if rates is None else Axis(ticks=own[row][::2], scale="log"), label=RATE),
            y=y,
        )
        for row, panel in enumerate(table.panels)
    ]


def _beside(rates: Sequence[float], place: float, *, is_log: bool) -> list[float]:
    """Shift the rates by ``place`` hundredths of their range."""
    if is_log:
        return [rate * (rates[-1] / rates[0]) ** (0.008 * place) for rate in rates]
    return [rate + 0.01 * place * (rates[-1] - rates[0]) for rate in rates]


def seeds_text(view: View) -> str:
    return f"{len(view.seeds)} paired seeds"


def repeats_of(view: View, of: str = "mean", by: str = "Student's t", *, is_share: bool = True) -> str:
    """Tell how many seeds there are, and what the bars are; bars of shares end at 0 and 100 %."""
    cut = ", drawn from 0 to 100 %" if is_share else ""
    return f"{seeds_text(view)}: {of}, and bars for its 95 % interval ({by}){cut}."
