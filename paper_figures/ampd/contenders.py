"""What is compared in AMPD's figures: systems, each on AMPD's plan and on its own best one, and AMPD's switches."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from paper_figures.ampd.panels import TracePanel
from paper_figures.common.contender import Contender
from paper_figures.common.figure import seed_by_seed
from repro.reports.figures import Knobs, View
from repro.runs.cell import Cell, Scalar

PAIRED_SEEDS = 10
"""Repeats of a figure where a view asks for no other number: with 99 sessions one seed is an anecdote."""


@dataclass(frozen=True, kw_only=True)
class OnPlan(Contender):
    is_tuned: bool = False
    """On the best deployment of a search; else on Table 2's first, co-located ones with the degree of its decode pool."""

    def deployment(self, panel: TracePanel) -> str:
        if self.is_tuned:
            return "search"
        plan = panel.plans[0]
        if self.system in ("ampd", "dynamo-sim"):
            return str(plan)
        degree = plan.decode[0].degree
        return f"TP{degree}x{panel.num_gpus // degree}"

    def on(self, view: View, panel: TracePanel, rate: float, knobs: Knobs = ()) -> Cell:
        """``transient``: the paper's cells are of so many sessions, most of them beyond what the workers keep up with."""
        usual: dict[str, Scalar] = {"model": panel.model, "deployment": self.deployment(panel), "transient": True}
        return self.cell(view, panel.trace, {**usual, **dict(self.knobs), **dict(knobs)}, rate=rate)


_LOAD: Knobs = (("route_order", "load"),)
_BACKLOG: Knobs = (("window", "backlog"),)
_NO_PR: Knobs = (("prefill_reordering", False),)
_NO_AR: Knobs = (("adaptive_routing", False),)
_RANDOM: Knobs = (("dispatch", "random"),)
_BLACK, _SKY, _AMBER, _GREEN = "#000000", "#56B4E9", "#E69F00", "#009E73"


def _ampd(name: str, title: str, knobs: Knobs, color: str | None = None, marker: str | None = None) -> OnPlan:
    return OnPlan(name=name, system="ampd", title=title, knobs=knobs, color=color, marker=marker)


_ON_PLAN = (
    OnPlan(name="ampd", system="ampd", title="AMPD"),
    _ampd("ours", "AMPD + load + backlog", _LOAD + _BACKLOG, _BLACK, "P"),
    OnPlan(name="dynamo", system="dynamo-sim", title="Dynamo"),
    OnPlan(name="vllm", system="vllm-sim", title="vLLM"),
    OnPlan(name="continuum", system="continuum-sim", title="Continuum"),
)
_TUNED_MARKERS = ("*", "X", "D", "v", "d")
_TUNED = tuple(
    replace(each, name=f"{each.name}-tuned", title=f"{each.title}, tuned", is_tuned=True, linestyle="--", marker=marker)
    for each, marker in zip(_ON_PLAN, _TUNED_MARKERS, strict=True)
)
_SWITCHED = (
    _ampd("load", "AMPD + load", _LOAD, _SKY, "v"),
    replace(_ampd("backlog", "AMPD + backlog", _BACKLOG, _AMBER, "<"), linestyle="--"),
    _ampd("ar", "AMPD w/o PR", _NO_PR),
    _ampd("pr", "AMPD w/o AR", _NO_AR),
    _ampd("none", "AMPD w/o AR+PR", _NO_AR + _NO_PR),
    _ampd("none-random", "AMPD w/o AR+PR, random dispatch", _NO_AR + _NO_PR + _RANDOM),
    _ampd("planned", "AMPD, planner's plan", (("deployment", "planner"),)),
)
_ON_TIME: Knobs = (("queue_order", "on-time"),)
_ORDERS = tuple(
    replace(_ampd(f"{name}-tuned", f"{title}, tuned", _ON_TIME + knobs, color, marker), is_tuned=True, linestyle="--")
    for name, title, knobs, color, marker in (
        ("on-time-0", "On-time, share 0", (*_NO_AR, ("share", 0.0)), _SKY, "v"),
        ("on-time", "On-time", _NO_AR, _GREEN, "s"),
        ("by-due-time", "By due time", (*_NO_AR, ("share", 1.0), ("patience", 0.0)), _AMBER, "<"),
        ("ampd-on-time", "AMPD + On-time", (), "#CC79A7", "^"),
        ("ours-on-time", "AMPD + load + backlog + On-time", _LOAD + _BACKLOG, "#999999", "p"),
    )
)
ORDERED = tuple(each.name for each in _ORDERS)
"""Dynamo's shortest queue with On-time's order: nothing for those given up, a quarter, and all of it at once; and AMPD's router with it."""
_OWN: Knobs = (("history_read", "own-cache"),)
_READINGS = tuple(
    OnPlan(name=f"dynamo-{name}", system="dynamo-sim", title=f"Dynamo, {title}", knobs=knobs, linestyle=":")
    for name, title, knobs in (
        ("serial", "reads in turn", (("history_read", "serial"),)),
        ("own", "own cache", _OWN),
        ("own-cost", "own cache, by cost", (*_OWN, ("affinity", "cost"))),
        ("own-none", "own cache, no affinity", (*_OWN, ("affinity", "none"))),
    )
)
CONTENDERS: Mapping[str, OnPlan] = MappingProxyType(
    {each.name: each for each in (*_ON_PLAN, *_TUNED, *_SWITCHED, *_ORDERS, *_READINGS)}
)
"""Tuned ones, and Dynamo in its readings of where a history comes from, under names of their own."""
DYNAMOS = ("dynamo", *(each.name for each in _READINGS))

SAME_BASELINES = ("dynamo", "vllm", "continuum")
TUNED_BASELINES = ("dynamo-tuned", "vllm-tuned")
"""Continuum is vLLM within a point in every cell: on AMPD's plan it says so, and is not searched for as well."""
FIGURE4 = (*(each.name for each in _ON_PLAN), *(each.name for each in _TUNED if each.system != "continuum-sim"))


def grid(
    view: View, names: Sequence[str], panels: Iterable[TracePanel], rates: Sequence[float], *, knobs: Knobs = ()
) -> list[Cell]:
    asked = (CONTENDERS[name].on(view, panel, rate, knobs) for panel in panels for rate in rates for name in names)
    return seed_by_seed(asked, view)
