"""A system as a figure compares it: under a title and a look of its own, with knobs that make it that."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from paper_figures.common.style import Look, system_look
from repro.reports.figures import Knobs, View
from repro.runs.cell import Cell, Scalar


@dataclass(frozen=True, kw_only=True)
class Contender:
    name: str
    system: str
    title: str
    knobs: Knobs = ()
    color: str | None = None
    """The system's own, as the marker, where nothing else is said."""
    marker: str | None = None
    linestyle: str = "-"

    @property
    def look(self) -> Look:
        own = system_look(self.system)
        return replace(own, color=self.color or own.color, marker=self.marker or own.marker, linestyle=self.linestyle)

    def cell(
        self,
        view: View,
        dataset: str,
        knobs: Mapping[str, Scalar],
        *,
        rate: float | None = None,
        together: str | None = None,
    ) -> Cell:
        """``knobs`` go before its own; ``together`` names the comparison that a measured cell is made in."""
        compared = () if together is None else view.together(together)
        own = {**dict(self.knobs), **knobs, **dict(compared)}
        return view.cell(None, self.system, dataset, rate=rate, knobs=tuple(own.items()))
