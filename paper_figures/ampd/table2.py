"""AMPD Table 2 (App. A.3): the three best deployments, planned and as printed; and what each attains when it serves.

Twelve of twelve first plans are even splits of the GPUs, and the rule "largest workers in an even split" finds ten of them: the
table says little about a planner. What a user wants is attainment, so the plans also serve the workload.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from engines.ar.deployment import Deployment
from paper_figures.ampd.compare import Table, said, tabulate
from paper_figures.ampd.contenders import PAIRED_SEEDS, grid
from paper_figures.ampd.layout import seeds_text
from paper_figures.ampd.panels import Panel, panels
from paper_figures.ampd.said import DEFAULT, finding
from paper_figures.common.caption import invalid_notes
from paper_figures.common.repeats import Repeats
from paper_figures.common.table import save_table
from repro.reports.claims import Finding
from repro.reports.figures import Rendered, View
from repro.reports.paper import load_table
from repro.runs.cell import Cell
from repro.runs.store import StoredRun
from repro.systems.ar.part import ArPart
from repro.systems.ar.planning import PLANNER_SYSTEM
from repro.systems.ar.plans import even_split
from repro.systems.ar.settings import PLANNING_RATE, hardware_of

NAME = "table2"
TITLE = "AMPD Table 2: deployments, planned and served"
SOURCE = "AMPD, Table 2, App. A.3"
PLATFORMS = ("h20x32",)
NUM_RUNS = PAIRED_SEEDS
SERVED_RATE = 1.6
SERVED = ("ampd", "planned", "ampd-tuned")
PLANNING_RATES = (0.4, PLANNING_RATE, 0.8, 1.6)
PRINTED, RANKED = 3, 6
"""Plans of a pair that Table 2 lists, and that ours ranks: more, so that a plan can come in from behind."""


def cells(view: View) -> list[Cell]:
    planned = [_planning(view, panel, rate) for panel in panels() for rate in PLANNING_RATES]
    return [*planned, *grid(NAME, view, SERVED, panels(), (SERVED_RATE,))]


def _planning(view: View, panel: Panel, rate: float) -> Cell:
    return Cell(
        figure=NAME,
        system=PLANNER_SYSTEM,
        dataset=panel.trace,
        platform=view.platform.name,
        executor=view.platform.executor,
        rate=rate,
        seed=0,
        knobs=(("model", panel.model), ("top", RANKED)),
    )


@dataclass(frozen=True, kw_only=True)
class Plans:
    """The planner's three best for one pair, at one rate."""

    panel: Panel
    rate: float
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


def plans_at(runs: Sequence[StoredRun], view: View, rate: float) -> list[Plans]:
    repeats = Repeats(runs, view)
    return [
        Plans(panel=panel, rate=rate, found=_best(run))
        for panel in panels()
        for run in repeats.of(_planning(view, panel, rate))
    ]


def _best(run: StoredRun) -> tuple[str, ...]:
    """Equal ones in the planner's order."""
    ranked = sorted(run.summary["plans"], key=lambda plan: plan["worst_of_slo"])
    return tuple(plan["deployment"] for plan in ranked[:PRINTED])


def even(panel: Panel, view: View) -> Deployment | None:
    """What the rule alone says."""
    part, card = view.platform.part(ArPart), view.platform.gpu
    assert card is not None
    return even_split(panel.num_gpus, hardware_of(panel.model, card, part.constants).degrees())


def served(runs: Sequence[StoredRun], view: View) -> Table:
    return tabulate(runs, view, SERVED, panels(), (SERVED_RATE,), view.seeds)


def render(runs: Sequence[StoredRun], view: View, out: Path) -> Rendered:
    table = served(runs, view)
    rows = []
    for row, at in enumerate(plans_at(runs, view, PLANNING_RATE)):
        panel = at.panel
        rows.append(
            (
                panel.title,
                "; ".join(at.printed),
                "; ".join(at.found),
                "yes" if at.is_first else "no",
                str(at.overlap),
                "yes" if even(panel, view) == panel.plans[0] else "no",
                *(said(table.at(name, row, 0), "%") for name in SERVED),
            )
        )
    return save_table(
        out,
        f"{NAME}-{view.stem}",
        title=TITLE,
        columns=(
            "pair",
            "printed",
            f"planner at {PLANNING_RATE:g}/s",
            "first",
            "of three",
            "rule: even split",
            f"Table 2's first at {SERVED_RATE:g}/s",
            f"planner for {SERVED_RATE:g}/s",
            "best of a search",
        ),
        rows=rows,
        notes=(*_notes(runs, view), *invalid_notes(runs)),
    )


def _notes(runs: Sequence[StoredRun], view: View) -> list[str]:
    table = served(runs, view)
    notes = [f"Served: AMPD as printed, {DEFAULT}, {seeds_text(view)}; simulated."]
    for rate in PLANNING_RATES:
        found = plans_at(runs, view, rate)
        notes.append(
            f"Planned for {rate:g} sessions/s: {sum(each.is_first for each in found)} of {len(found)} first plans and "
            f"{sum(each.overlap for each in found)} of {PRINTED * len(found)} rows are among Table 2's, "
            f"{sum(each.num_equal for each in found)} in their place."
        )
    rule = sum(even(panel, view) == panel.plans[0] for panel in panels())
    notes.append(
        f"The rule of the largest even split alone: {rule} of {len(panels())} first plans: Table 2 does not tell planners apart."
    )
    for name, what in (("planned", "the plan made for that rate"), ("ampd-tuned", "the best of a search")):
        gained = table.interval(lambda means, n=name: 100 * float(np.nanmean(means[n] - means["ampd"])))  # type: ignore[misc]
        each = 100 * (table.means[name] - table.means["ampd"])[:, 0]
        notes.append(
            f"Serving {SERVED_RATE:g} sessions/s, {what} attains {said(gained, 'points')} over Table 2's first on average "
            f"({np.nanmin(each):+.0f} to {np.nanmax(each):+.0f})."
        )
    return notes


def findings(runs: Sequence[StoredRun], view: View) -> list[Finding]:
    found = plans_at(runs, view, PLANNING_RATE)
    first, overlap = sum(each.is_first for each in found), sum(each.overlap for each in found)
    rule = sum(even(panel, view) == panel.plans[0] for panel in panels())
    gained = served(runs, view).interval(lambda means: 100 * float(np.nanmean(means["planned"] - means["ampd"])))
    gpus = {panel.trace: panel.num_gpus for panel in panels()}
    printed = {str(row["trace"]).lower(): row["gpus_available"] for row in load_table("ampd/table2.csv")}
    part = view.platform.part(ArPart)
    return [
        finding(
            "ampd-plan-match",
            float(sum(each.num_equal for each in found)),
            f"rows equal at {PLANNING_RATE:g}/s; {first} of {len(found)} first plans and {overlap} of {PRINTED * len(found)} rows among "
            f"Table 2's three; an even split alone finds {rule} first plans; serving {SERVED_RATE:g}/s, plans made for it attain "
            f"{said(gained, 'points')} over Table 2's, {seeds_text(view)}",
        ),
        finding(
            "ampd-plan-distinct",
            float(len({each.found for each in found})),
            f"distinct top-three rankings of {len(found)} pairs at {PLANNING_RATE:g}/s",
            holds=len({each.found for each in found}) == len({each.printed for each in found}),
        ),
        Finding(
            claim="ampd-gpus",
            value=tuple(float(gpus[trace]) for trace in ("hotpotqa", "toolbench", "dureader", "gaia")),
            obtained="computed",
            how=f"of the traces' cards, on a cluster of {part.num_gpus}; Table 2 says {sorted(set(printed.values()), key=str)}",
        ),
    ]
