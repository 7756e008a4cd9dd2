"""What is compared in AMPD's figures: systems, each on AMPD's plan and on its own best one, and AMPD's switches."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from paper_figures.ampd.panels import Panel
from repro.reports.figures import View
from repro.runs.cell import Cell, Scalar

PAIRED_SEEDS = 10
"""Repeats of a figure where a view asks for no other number: with 99 sessions one seed is an anecdote."""

Knobs = tuple[tuple[str, Scalar], ...]


@dataclass(frozen=True, kw_only=True)
class Contender:
    name: str
    system: str
    title: str
    is_tuned: bool = False
    """On the best deployment of a search; else on Table 2's first, co-located ones with the degree of its decode pool."""
    knobs: Knobs = ()

    def deployment(self, panel: Panel) -> str:
        if self.is_tuned:
            return "search"
        plan = panel.plans[0]
        if self.system in ("ampd", "dynamo-sim"):
            return str(plan)
        degree = plan.decode[0].degree
        return f"TP{degree}x{panel.num_gpus // degree}"

    def cell(self, figure: str | None, view: View, panel: Panel, rate: float, seed: int, knobs: Knobs = ()) -> Cell:
        """``transient``: the paper's cells are of so many sessions, most of them beyond what the workers keep up with."""
        own: dict[str, Scalar] = {
            "model": panel.model,
            "deployment": self.deployment(panel),
            "transient": True,
            **dict(self.knobs),
            **dict(knobs),
        }
        return Cell(
            figure=figure,
            system=self.system,
            dataset=panel.trace,
            platform=view.platform.name,
            executor=view.platform.executor,
            rate=rate,
            seed=seed,
            knobs=tuple(own.items()),
        )


_LOAD: Knobs = (("route_order", "load"),)
_BACKLOG: Knobs = (("window", "backlog"),)
_NO_PR: Knobs = (("prefill_reordering", False),)
_NO_AR: Knobs = (("adaptive_routing", False),)

CONTENDERS: Mapping[str, Contender] = MappingProxyType(
    {
        each.name: each
        for each in (
            Contender(name="ampd", system="ampd", title="AMPD"),
            Contender(name="ampd-tuned", system="ampd", title="AMPD, tuned", is_tuned=True),
            Contender(name="ours", system="ampd", title="AMPD + load + backlog", knobs=_LOAD + _BACKLOG),
            Contender(
                name="ours-tuned",
                system="ampd",
                title="AMPD + load + backlog, tuned",
                is_tuned=True,
                knobs=_LOAD + _BACKLOG,
            ),
            Contender(name="dynamo", system="dynamo-sim", title="Dynamo"),
            Contender(name="dynamo-tuned", system="dynamo-sim", title="Dynamo, tuned", is_tuned=True),
            Contender(name="vllm", system="vllm-sim", title="vLLM"),
            Contender(name="vllm-tuned", system="vllm-sim", title="vLLM, tuned", is_tuned=True),
            Contender(name="continuum", system="continuum-sim", title="Continuum"),
            Contender(name="continuum-tuned", system="continuum-sim", title="Continuum, tuned", is_tuned=True),
            Contender(name="load", system="ampd", title="AMPD + load", knobs=_LOAD),
            Contender(name="backlog", system="ampd", title="AMPD + backlog", knobs=_BACKLOG),
            Contender(name="ar", system="ampd", title="AMPD w/o PR", knobs=_NO_PR),
            Contender(name="pr", system="ampd", title="AMPD w/o AR", knobs=_NO_AR),
            Contender(name="none", system="ampd", title="AMPD w/o AR+PR", knobs=_NO_AR + _NO_PR),
            Contender(
                name="none-random",
                system="ampd",
                title="AMPD w/o AR+PR, random dispatch",
                knobs=(*_NO_AR, *_NO_PR, ("dispatch", "random")),
            ),
            Contender(name="planned", system="ampd", title="AMPD, planner's plan", knobs=(("deployment", "planner"),)),
        )
    }
)

FIGURE4 = (
    "ampd",
    "ampd-tuned",
    "ours",
    "ours-tuned",
    "dynamo",
    "dynamo-tuned",
    "vllm",
    "vllm-tuned",
    "continuum",
    "continuum-tuned",
)


def grid(
    figure: str,
    view: View,
    names: Sequence[str],
    panels: Iterable[Panel],
    rates: Sequence[float],
    *,
    knobs: Knobs = (),
    seeds: range | None = None,
) -> list[Cell]:
    """All of one seed, then of the next: a sweep that is stopped has whole repeats."""
    chosen = list(panels)
    return [
        CONTENDERS[name].cell(figure, view, panel, rate, seed, knobs)
        for seed in (view.seeds if seeds is None else seeds)
        for panel in chosen
        for rate in rates
        for name in names
    ]
