"""AMPD orders: attainment and P99 TTFT by the order of prefills.

This figure of our own shows what an order of AMPD's prefills can gain. It draws attainment and P99 TTFT by rate, for Dynamo's shortest
queue and for AMPD's router, each with On-time's order and with its own. Each system runs on the best deployment of a search of one size.

An order can raise the rate at which attainment falls to 90 % by letting given-up requests wait. So we also show the rate up to which P99
TTFT is no longer than Dynamo's at its own knee.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from paper_figures.ampd.attainment import ATTAINED, Attainments, Means, ends_of_logs, tabulate
from paper_figures.ampd.contenders import CONTENDERS, ORDERED, details
from paper_figures.ampd.knee import LEVEL, LONGEST, P99, SEEDS, Knees, cell_of, cells_at, crossing, curves, rates_in
from paper_figures.ampd.layout import DEFAULT, ampd_figure, over_rates, repeats_of
from paper_figures.common.figure import Page, Picture, Table
from paper_figures.common.panel import Axis
from paper_figures.common.runs import Runs
from repro.reports.figures import View
from repro.runs.cell import Cell
from repro.runs.statistics import Interval

RIVAL = "dynamo-tuned"
SHOWN = (RIVAL, "ampd-tuned", "ours-tuned", *ORDERED)
MULTIPLES = (0.85, 1.1, 1.4, 1.8, 2.3, 3.0, 4.0)
"""Rates as multiples of what the prefill workers of Table 2's plan keep up with, up to where tuned deployments fall."""
TUNED_FOR = (1.4, 2.3, 4.0)
"""Multiples for which we search deployments; other rates use that of the next multiple."""
WAITS = " P99"
P99_AXIS = Axis(label="P99 TTFT (s)", better="lower", scale="plain log")
cell_at = partial(cell_of, tuned_for=TUNED_FOR)


def multiples_of(view: View) -> tuple[float, ...]:
    return view.rates or MULTIPLES


def cells(view: View) -> list[Cell]:
    return cells_at(multiples_of(view), details(), SHOWN, partial(cell_at, view), view)


@dataclass(frozen=True, kw_only=True)
class Fronts(Knees):
    """Knees with P99 TTFT beside the attainments, under the same names followed by ``WAITS``."""

    def at_equal_wait(self, means: Means, name: str, row: int) -> float:
        """Return the rate up to which attainment is at least ``LEVEL``, and P99 TTFT no longer than the rival's at its own knee."""
        rates = self.rates[row]
        limit_s = between(rates, means[RIVAL + WAITS][row], self.rate(means, RIVAL, row))
        within = crossing(rates, [-wait_s for wait_s in means[name + WAITS][row]], -limit_s)
        return min(self.rate(means, name, row), within)


def between(rates: Sequence[float], values: Sequence[float], rate: float) -> float:
    """Interpolate the value at a rate, linearly in the rate's logarithm, like ``crossing``."""
    for index in range(1, len(rates)):
        if rate <= rates[index]:
            part = math.log(rate / rates[index - 1]) / math.log(rates[index] / rates[index - 1])
            return float(values[index - 1] + part * (values[index] - values[index - 1]))
    return float(values[-1])


def fronts_of(runs: Runs) -> Fronts:
    view = runs.view
    table_of = partial(tabulate, runs, SHOWN, details(), multiples_of(view), ask=partial(cell_at, view))
    shares, waits = table_of(of=ATTAINED), table_of(of=P99)
    values = {**shares.values, **{name + WAITS: array for name, array in waits.values.items()}}
    table = Attainments(panels=shares.panels, rates=shares.rates, values=values)
    return Fronts(table=table, rates=rates_in(view, details(), multiples_of(view)))


def page(runs: Runs) -> Page:
    fronts = fronts_of(runs)
    table = fronts.table
    longest = tabulate(runs, SHOWN, details(), table.rates, of=LONGEST, ask=partial(cell_at, runs.view)).means
    notes = [conclusion(fronts, name) for name in SHOWN if name != RIVAL]

    def wait(name: str, row: int, column: int) -> Interval:
        return table.interval(lambda means: float(means[name + WAITS][row, column]))

    shares, waits = curves(table, SHOWN, fronts.rates), over_rates(table, SHOWN, wait, P99_AXIS, rates=fronts.rates)
    return Page(
        picture=Picture(
            panels=[panel for pair in zip(shares, waits, strict=True) for panel in pair],
            caption=[
                *notes,
                f"SLO attainment in {DEFAULT}, and P99 TTFT of all rounds. On-time and by due time: Dynamo's shortest queue with this order, a "
                "share for those given up; with 1 at once all go by due time. AMPD + On-time: its router with this order. All systems on the best deployment of searches of one size, three a panel.",
                repeats_of(runs.view, by="jackknife over seeds, of the ratios above too"),
            ],
        ),
        csv=Table(
            columns=(
                *("panel", "contender", "rate_sessions_s", "attainment_percent", "half_width", "ttft_p99_s"),
                *("ttft_longest_s", "knee_sessions_s", "at_equal_p99_sessions_s", "obtained"),
            ),
            rows=[
                (
                    *(panel.title, name, rate, 100 * float(table.means[name][row, column])),
                    *(table.at(name, row, column).half_width, float(table.means[name + WAITS][row, column])),
                    *(float(longest[name][row, column]), fronts.rate(table.means, name, row)),
                    *(fronts.at_equal_wait(table.means, name, row), runs.view.obtained),
                )
                for row, panel in enumerate(table.panels)
                for name in SHOWN
                for column, rate in enumerate(fronts.rates[row])
            ],
        ),
        notes=notes,
    )


def conclusion(found: Fronts, name: str) -> str:
    rows = range(len(found.table.panels))
    ratios = [ends_of_logs(found.ratio(name, RIVAL, rows, rate_of)) for rate_of in (found.rate, found.at_equal_wait)]
    knee, equal = (f"{ratio:.2f} [{low:.2f}, {high:.2f}]" for low, ratio, high in ratios)
    return (
        f"{CONTENDERS[name].title} attains {100 * LEVEL:.0f} % at {knee} times the rate of {CONTENDERS[RIVAL].title}, and at {equal} times it with a "
        f"P99 TTFT no longer than there: geometric means of {len(found.table.panels)} panels."
    )


FIGURE = ampd_figure("orders", "ours; the objective of AMPD §7.1", page=page, cells=cells, num_runs=SEEDS)
