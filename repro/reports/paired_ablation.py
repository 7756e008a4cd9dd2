"""A component of a simulated family, switched: variants that differ in knobs and are paired by seed."""

from __future__ import annotations

from dataclasses import dataclass

from repro.runs.cell import Cell, Scalar
from repro.systems.platforms import Platform

Knobs = tuple[tuple[str, Scalar], ...]


@dataclass(frozen=True, kw_only=True)
class PairedVariant:
    label: str
    system: str
    knobs: Knobs = ()
    is_ours: bool = False
    """Not in the paper: this project's own repair or extension."""

    def cell(self, where: Platform, dataset: str, rate: float | None, seed: int, knobs: Knobs = ()) -> Cell:
        """Arrivals may outrun what serves them: what then becomes of them is part of the answer."""
        return Cell(
            system=self.system,
            dataset=dataset,
            platform=where.name,
            executor=where.executor,
            rate=rate,
            seed=seed,
            knobs=tuple({"transient": True, **dict(knobs), **dict(self.knobs)}.items()),
        )
