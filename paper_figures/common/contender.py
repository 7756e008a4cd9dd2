"""A contender: a system as a figure compares it, with a title, a look and knobs."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import TypeVar

from paper_figures.common.style import Look, system_look
from repro.files import read_yaml
from repro.reports.figures import Knobs, View
from repro.runs.cell import Cell, Scalar

Kind = TypeVar("Kind", bound="Contender")


def contenders_beside(module: str, kind: type[Kind]) -> Mapping[str, Kind]:
    """Return the contenders of the YAML file beside a module's file, by name."""
    rows = read_yaml(Path(module).with_suffix(".yaml"))
    contenders = (kind(**{**row, "knobs": tuple(row.get("knobs", {}).items())}) for row in rows)
    return MappingProxyType({contender.name: contender for contender in contenders})


@dataclass(frozen=True, kw_only=True)
class Contender:
    name: str
    system: str
    title: str = ""
    knobs: Knobs = ()
    color: str | None = None
    """By default the system's own color, and likewise its own marker."""
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
        """Its own knobs come before ``knobs``. ``together`` names the comparison that a measured cell is made in."""
        compared = () if together is None else view.together(together)
        merged = {**dict(self.knobs), **knobs, **dict(compared)}
        return view.cell(None, self.system, dataset, rate=rate, knobs=tuple(merged.items()))
