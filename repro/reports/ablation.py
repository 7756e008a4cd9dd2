"""Ablations: components that can be switched on and off, all else equal, and the paper's cumulative ladder (``components.yaml``)."""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import yaml

from engines.errors import UserError
from repro.families.platforms import Platform
from repro.reports.figures import Knobs, View
from repro.runs.cell import Cell

OURS, BASE = "dllm-serve", "sparse-dllm"


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One setting of a component, or one rung of a ladder."""

    label: str
    system: str
    knobs: Knobs = ()
    is_ours: bool = False
    """Whether this is our own repair or extension, which is not in the paper."""

    def cell(self, view: View, dataset: str, rate: float | None, seed: int, figure: str | None = None) -> Cell:
        """Return a cell of this variant. ``figure`` also names the comparison of a measured cell."""
        reading = view.baseline_knobs() if self.system == BASE else ()
        knobs: Knobs = tuple({**dict(reading), **dict(self.knobs)}.items())
        if figure is not None:
            knobs += view.together(figure)
        return view.cell(figure, self.system, dataset, rate=rate, seed=seed, knobs=knobs)


def _variants(rows: Iterable[Mapping[str, Any]], system: str) -> tuple[Variant, ...]:
    """``system`` is the system of rows that name none."""
    return tuple(Variant(**{"system": system, **row, "knobs": tuple(row.get("knobs", {}).items())}) for row in rows)


_STORED = yaml.safe_load(Path(__file__).with_name("components.yaml").read_text(encoding="utf-8"))
COMPONENTS: Mapping[str, Mapping[str, tuple[Variant, ...]]] = MappingProxyType(
    {
        system: {name: _variants(rows, system) for name, rows in _STORED[system].items()}
        for system in (OURS, "ampd", "laps")
    }
)
"""Variants by system and component; the first variant is the component switched off."""
CHANGES_TOKENS = ("engine", "sparsity", "refresh")
"""Components whose variants commit different tokens, so that accuracy is part of the comparison."""
LADDER = _variants(_STORED["ladder"], OURS)
OWN: Mapping[str, str] = MappingProxyType(
    {
        "scheduler": "scheduler",
        "refresh": "refresh_rule",
        "routing": "router",
        "reordering": "queue",
        "disaggregation": "batcher",
        "awd": "batcher",
        "reserve": "batcher",
    }
)
"""For each component, the knob that takes a user's own policy as a variant."""


def system_of(component: str) -> str:
    """The system that a component, or the ladder, belongs to."""
    if component == "ladder":
        return OURS
    for system, components in COMPONENTS.items():
        if component in components:
            return system
    ours, *others = COMPONENTS.values()
    known = (*ours, "ladder", *itertools.chain(*others))
    raise UserError(f"component={component!r} is unknown: use one of {', '.join(known)}")


def own_variant(component: str, policy: str, knobs: Mapping[str, Any]) -> Variant:
    """A variant with a user's own policy, and its knobs, in place of the component."""
    system = system_of(component)
    if component not in OWN:
        raise UserError(
            f"variant={policy!r} has no effect on component={component!r}, which is no policy: leave it out, or use one of "
            f"{', '.join(OWN)}"
        )
    label = ", ".join([policy.rpartition(":")[2], *(f"{name}={value}" for name, value in knobs.items())])
    return Variant(label=label, system=system, knobs=((OWN[component], policy), *knobs.items()))


def variants_of(name: str, view: View) -> tuple[Variant, ...]:
    """The variants of a component, or the rungs of the ladder."""
    return rungs(view) if name == "ladder" else COMPONENTS[OURS][name]


def rungs(view: View) -> tuple[Variant, ...]:
    """The ladder, without the rung for static batching if the first rung already has batches."""
    has_batches = view.reading != "published"
    return tuple(variant for variant in LADDER if not (has_batches and "reading" in dict(variant.knobs)))


def paired_cells(
    component: str,
    target: Platform,
    datasets: Iterable[str],
    rate: float | None,
    seeds: Iterable[int],
    knobs: Mapping[str, Any],
    own_variants: Sequence[Variant] = (),
) -> dict[tuple[str, Variant], list[Cell]]:
    """The cells of a simulated family's component, by data set and variant; ``own_variants`` come after the paper's. Arrivals may exceed
    what a system can serve; what happens then is part of the answer."""
    return {
        (dataset, variant): [
            Cell(
                system=variant.system,
                dataset=dataset,
                platform=target.name,
                executor=target.executor,
                rate=rate,
                seed=seed,
                knobs=tuple({"transient": True, **knobs, **dict(variant.knobs)}.items()),
            )
            for seed in seeds
        ]
        for dataset in datasets
        for variant in (*COMPONENTS[system_of(component)][component], *own_variants)
    }
