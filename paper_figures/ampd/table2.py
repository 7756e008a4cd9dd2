"""AMPD Table 2: deployments, planned and served.

All twelve first plans are even splits of the GPUs, and the rule "largest workers in an even split" finds ten of them. So the table says
little about a planner. Users want attainment, so the plans also serve the workload.
"""

from dataclasses import dataclass

import numpy as np

from engines.cluster.hardware import Deployment
from paper_figures.ampd.attainment import Attainments, tabulate
from paper_figures.ampd.contenders import TracePanel, grid, panels
from paper_figures.ampd.layout import DEFAULT, ampd_figure, seeds_text
from paper_figures.common.figure import Page, Table
from paper_figures.common.runs import Runs
from paper_figures.common.words import said
from repro.families.cluster.ampd import PLANNER_SYSTEM
from repro.families.cluster.ampd_settings import PLANNING_RATE, hardware_of
from repro.families.cluster.deployments import even_split
from repro.families.platforms import ArPart
from repro.reports.claims import Finding, load_table
from repro.reports.figures import View
from repro.runs.cell import Cell
from repro.runs.statistics import Interval
from repro.runs.store import StoredRun

SERVED_RATE = 1.6
SERVED = {"ampd": "", "planned": "the plan made for that rate", "ampd-tuned": "the best of a search"}
PLANNING_RATES = (0.4, PLANNING_RATE, 0.8, 1.6)
PRINTED, RANKED = 3, 6
"""How many plans of a pair Table 2 lists, and how many our planner ranks: more, so that a plan can move up from behind."""
GPUS_OF = ("hotpotqa", "toolbench", "dureader", "gaia")
"""Traces in the order of the claim."""


def planning(view: View, panel: TracePanel, rate: float) -> Cell:
    return view.cell(None, PLANNER_SYSTEM, panel.trace, rate=rate, knobs=(("model", panel.model), ("top", RANKED)))


def cells(view: View) -> list[Cell]:
    planned = [planning(view, panel, rate) for panel in panels() for rate in PLANNING_RATES]
    return [*planned, *grid(view, tuple(SERVED), panels(), (SERVED_RATE,))]


@dataclass(frozen=True, kw_only=True)
class Plans:
    """The planner's three best plans for one pair, at one rate."""

    panel: TracePanel
    found: tuple[str, ...]

    @property
    def printed(self) -> tuple[str, ...]:
        return tuple(map(str, self.panel.plans))

    @property
    def is_first(self) -> bool:
        return self.found[:1] == self.printed[:1]

    @property
    def overlap(self) -> int:
        return len(set(self.found) & set(self.printed))

    @property
    def num_equal(self) -> int:
        return sum(ours == theirs for ours, theirs in zip(self.found, self.printed, strict=False))


def plans_at(runs: Runs, rate: float) -> list[Plans]:
    return [
        Plans(panel=panel, found=best_of(run))
        for panel in panels()
        for run in runs.of(planning(runs.view, panel, rate))
    ]


def best_of(run: StoredRun) -> tuple[str, ...]:
    """Return the best plans; ties keep the planner's order."""
    ranked = sorted(run.summary["plans"], key=lambda plan: plan["worst_of_slo"])
    return tuple(plan["deployment"] for plan in ranked[:PRINTED])


def even(panel: TracePanel, view: View) -> Deployment | None:
    """Return the plan that the rule alone gives."""
    part, card = view.platform.part(ArPart), view.platform.gpu
    assert card is not None
    return even_split(panel.num_gpus, hardware_of(panel.model, card, part.constants).degrees())


def by_the_rule(view: View) -> int:
    """Count the first plans that the rule finds."""
    return sum(even(panel, view) == panel.plans[0] for panel in panels())


def served(runs: Runs) -> Attainments:
    return tabulate(runs, tuple(SERVED), panels(), (SERVED_RATE,))


def gained(table: Attainments, name: str) -> Interval:
    """Mean gain in points over Table 2's first plan."""
    return table.interval(lambda means: 100 * float(np.nanmean(means[name] - means["ampd"])))


def page(runs: Runs) -> Page:
    table = served(runs)
    rows = [
        (
            plans.panel.title,
            "; ".join(plans.printed),
            "; ".join(plans.found),
            "yes" if plans.is_first else "no",
            plans.overlap,
            "yes" if even(plans.panel, runs.view) == plans.panel.plans[0] else "no",
            *(said(table.at(name, row, 0), "%") for name in SERVED),
        )
        for row, plans in enumerate(plans_at(runs, PLANNING_RATE))
    ]
    return Page(
        table=Table(
            columns=(
                *("pair", "printed", f"planner at {PLANNING_RATE:g}/s", "first", "of three", "rule: even split"),
                f"Table 2's first at {SERVED_RATE:g}/s",
                f"planner for {SERVED_RATE:g}/s",
                "best of a search",
            ),
            rows=rows,
        ),
        notes=notes(runs, table),
    )


def notes(runs: Runs, table: Attainments) -> list[str]:
    lines = [f"Served: AMPD as printed, {DEFAULT}, {seeds_text(runs.view)}; simulated."]
    for rate in PLANNING_RATES:
        plans = plans_at(runs, rate)
        lines.append(
            f"Planned for {rate:g} sessions/s: {sum(plan.is_first for plan in plans)} of {len(plans)} first plans and "
            f"{sum(plan.overlap for plan in plans)} of {PRINTED * len(plans)} rows are among Table 2's, "
            f"{sum(plan.num_equal for plan in plans)} in their place."
        )
    lines.append(
        f"The rule of the largest even split alone: {by_the_rule(runs.view)} of {len(panels())} first plans: Table 2 does not tell planners apart."
    )
    for name in ("planned", "ampd-tuned"):
        gains = 100 * (table.means[name] - table.means["ampd"])[:, 0]
        lines.append(
            f"Serving {SERVED_RATE:g} sessions/s, {SERVED[name]} attains {said(gained(table, name), 'points')} over Table 2's first on average "
            f"({np.nanmin(gains):+.0f} to {np.nanmax(gains):+.0f})."
        )
    return lines


def findings(runs: Runs) -> list[Finding]:
    plans = plans_at(runs, PLANNING_RATE)
    first, overlap = sum(plan.is_first for plan in plans), sum(plan.overlap for plan in plans)
    ours, theirs = len({plan.found for plan in plans}), len({plan.printed for plan in plans})
    gpus = {panel.trace: float(panel.num_gpus) for panel in panels()}
    printed = sorted({row["gpus_available"] for row in load_table("ampd/table2.csv")}, key=str)
    return [
        runs.finding(
            "ampd-plan-match",
            float(sum(plan.num_equal for plan in plans)),
            f"rows equal at {PLANNING_RATE:g}/s; {first} of {len(plans)} first plans and {overlap} of {PRINTED * len(plans)} rows among "
            f"Table 2's three; an even split alone finds {by_the_rule(runs.view)} first plans; serving {SERVED_RATE:g}/s, plans made for it attain "
            f"{said(gained(served(runs), 'planned'), 'points')} over Table 2's, {seeds_text(runs.view)}",
        ),
        runs.finding(
            "ampd-plan-distinct",
            float(ours),
            f"distinct top-three rankings of {len(plans)} pairs at {PLANNING_RATE:g}/s",
            holds=ours == theirs,
        ),
        runs.finding(
            "ampd-gpus",
            tuple(gpus[trace] for trace in GPUS_OF),
            f"of the traces' cards, on a cluster of {runs.view.platform.part(ArPart).num_gpus}; Table 2 says {printed}",
            obtained="computed",
        ),
    ]


FIGURE = ampd_figure("table2", "AMPD, Table 2, App. A.3", page=page, cells=cells, findings=findings)
