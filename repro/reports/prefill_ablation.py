"""LAPS's components, switched one at a time on one prefill instance (LAPS §3, Figure 6), and ours."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from repro.runs.cell import Cell, Scalar
from repro.systems.platforms import Platform

Knobs = tuple[tuple[str, Scalar], ...]


@dataclass(frozen=True, kw_only=True)
class PrefillVariant:
    label: str
    system: str = "laps"
    knobs: Knobs = ()
    is_ours: bool = False
    """Not in the paper: this project's own repair or extension."""

    def cell(self, where: Platform, dataset: str, rate: float | None, seed: int, knobs: Knobs = ()) -> Cell:
        """Turns may outrun the instance: what then becomes of them is part of the answer."""
        return Cell(
            system=self.system,
            dataset=dataset,
            platform=where.name,
            executor=where.executor,
            rate=rate,
            seed=seed,
            knobs=tuple({"transient": True, **dict(knobs), **dict(self.knobs)}.items()),
        )


PREFILL_COMPONENTS: Mapping[str, tuple[PrefillVariant, ...]] = MappingProxyType(
    {
        "graphs": (
            PrefillVariant(label="no graphs", knobs=(("graphs", "none"),)),
            PrefillVariant(label="the nearest captured one (§3.1)", knobs=(("graphs", "nearest"),)),
            PrefillVariant(label="where predicted faster", is_ours=True),
            PrefillVariant(label="packed sizes, where predicted faster", knobs=(("graphs", "ladder"),), is_ours=True),
        ),
        "disaggregation": (
            PrefillVariant(label="one queue, first come, first served", system="laps-graphs-only"),
            PrefillVariant(label="classes apart, one long prompt a step (§3.2)", knobs=(("long_dispatch", "single"),)),
            PrefillVariant(label="classes apart, long prompts packed", is_ours=True),
            PrefillVariant(label="the more urgent class first", knobs=(("class_rule", "urgency"),), is_ours=True),
        ),
        "awd": (
            PrefillVariant(label="no waiting", knobs=(("wait", "off"),)),
            PrefillVariant(label="Algorithm 1 to the letter", knobs=(("wait", "printed"),)),
            PrefillVariant(label="Algorithm 1 with D >= 1", knobs=(("wait", "guarded"),)),
            PrefillVariant(label="repaired, 5 ms at most", is_ours=True),
            PrefillVariant(label="repaired, 20 ms at most", knobs=(("max_window_s", 0.02),), is_ours=True),
        ),
        "reserve": (
            PrefillVariant(label="SGLang PD", system="sglang-pd"),
            PrefillVariant(label="LAPS"),
            PrefillVariant(label="Reserve, share by its bound", system="reserve", is_ours=True),
            PrefillVariant(label="Reserve, share 0.25", system="reserve", knobs=(("share", 0.25),), is_ours=True),
            PrefillVariant(label="Reserve, share 0.5", system="reserve", knobs=(("share", 0.5),), is_ours=True),
            PrefillVariant(label="Reserve without aging", system="reserve", knobs=(("aging", 0.0),), is_ours=True),
        ),
    }
)
"""The first of each is the component switched off."""
