"""What can be switched: one component on and off, all else equal, and the paper's cumulative ladder (§6.6)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from engines.errors import UserError
from repro.reports.cluster_ablation import CLUSTER_COMPONENTS
from repro.reports.figures import Knobs, View
from repro.reports.prefill_ablation import PREFILL_COMPONENTS
from repro.runs.cell import Cell

OURS, BASE = "dllm-serve", "sparse-dllm"


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One setting of a component, or one rung of a ladder."""

    label: str
    system: str = OURS
    knobs: Knobs = ()
    is_ours: bool = False
    """Not in the paper: this project's own extension."""

    def cell(self, view: View, dataset: str, rate: float | None, seed: int, figure: str | None = None) -> Cell:
        """``figure`` is also the comparison that a measured cell is a part of."""
        knobs = view.baseline_knobs() if self.system == BASE else self.knobs
        if figure is not None:
            knobs += view.together(figure)
        return view.cell(figure, self.system, dataset, rate=rate, seed=seed, knobs=knobs)


@dataclass(frozen=True, kw_only=True)
class Component:
    name: str
    title: str
    section: str
    variants: tuple[Variant, ...]
    """The first is the component switched off."""
    changes_tokens: bool
    """Whether its variants commit other tokens, so that accuracy is part of the comparison."""


_REQUEST: Knobs = (("scheduler", "request"),)
_MONOLITHIC: Knobs = (("logit_rows", "monolithic"),)
_SINGLE: Knobs = (("refresh_delay", 0),)
_AHEAD: Knobs = (("scheduler", "lookahead"),)

COMPONENTS: Mapping[str, Component] = MappingProxyType(
    {
        component.name: component
        for component in (
            Component(
                name="engine",
                title="inference engine",
                section="§6.6",
                variants=(
                    Variant(label="Sparse-dLLM", system=BASE),
                    Variant(
                        label="packed engine, request-level scheduler, monolithic logits", knobs=_REQUEST + _MONOLITHIC
                    ),
                ),
                changes_tokens=True,
            ),
            Component(
                name="scheduler",
                title="phase-multiplexed scheduler",
                section="§4.4",
                variants=(
                    Variant(label="request", knobs=_REQUEST),
                    Variant(label="phase"),
                    Variant(label="lookahead", knobs=_AHEAD, is_ours=True),
                ),
                changes_tokens=False,
            ),
            Component(
                name="budgeting",
                title="logit-aware budgeting",
                section="§4.2-4.3",
                variants=(Variant(label="monolithic", knobs=_MONOLITHIC), Variant(label="decomposed")),
                changes_tokens=False,
            ),
            Component(
                name="sparsity",
                title="head-centric sparse KV cache",
                section="§4.5",
                variants=(
                    Variant(label="dense", knobs=(("selection", "dense"),)),
                    Variant(label="uniform", knobs=(("selection", "uniform"),)),
                    Variant(label="head"),
                ),
                changes_tokens=True,
            ),
            Component(
                name="refresh",
                title="Refreshes per block",
                section="§2.3",
                variants=(Variant(label="two (delay 1)"), Variant(label="one (delay 0)", knobs=_SINGLE, is_ours=True)),
                changes_tokens=True,
            ),
        )
    }
)

LADDER = (
    Variant(label="Sparse-dLLM", system=BASE),
    Variant(label="+ inference engine", knobs=_REQUEST + _MONOLITHIC),
    Variant(label="+ phase-multiplexed scheduler", knobs=_MONOLITHIC),
    Variant(label="+ logit-aware budgeting"),
    Variant(label="+ single refresh", knobs=_SINGLE, is_ours=True),
    Variant(label="+ look-ahead admission", knobs=_SINGLE + _AHEAD, is_ours=True),
)
"""Features added one by one; the first four rungs are the paper's Figure 8. Look-ahead comes last: it buys
steps without delay, not throughput."""


def component(name: str) -> Component:
    if name not in COMPONENTS:
        known = (*COMPONENTS, "ladder", *CLUSTER_COMPONENTS, *PREFILL_COMPONENTS)
        raise UserError(f"component={name!r} is unknown: use one of {', '.join(known)}")
    return COMPONENTS[name]
