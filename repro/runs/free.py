"""What no source prints of a system: said by itself, and set by a search (repro.runs.tuning)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

from engines.knobs import Checked
from repro.runs.cell import Cell, Scalar

Tune = Literal["off", "search"]
TUNE = "tune"
Setting = tuple[tuple[str, Scalar], ...]
"""Knobs by name, in order."""


@dataclass(frozen=True, kw_only=True)
class TuneKnobs(Checked):
    tune: Tune = "off"
    """search: set the knobs that no source prints (docs/tuning.md) to the best of 64 simulated trials on other seeds."""


class Free(NamedTuple):
    """Something that no source prints, and what it may be besides what it is by default."""

    what: str
    settings: tuple[Mapping[str, Scalar], ...]
    why: str
    """What the source says of it."""
    settings_of: Callable[[Cell], tuple[Mapping[str, Scalar], ...]] | None = None
    """More of them, where they depend on what a cell asks for; its docstring says which."""
    has_default: bool = True
    """False: one of them is taken, the first of all candidates the first."""

    def among(self, cell: Cell) -> tuple[Setting, ...]:
        """What it may be in a cell; nothing where the cell says what it is."""
        more = () if self.settings_of is None else self.settings_of(cell)
        settings = (*self.settings, *more)
        if {name for setting in settings for name in setting} & set(cell.asked):
            return ()
        return tuple(tuple(setting.items()) for setting in settings)

    @property
    def said(self) -> tuple[str, ...]:
        """In words, each."""
        more = () if self.settings_of is None else (" ".join((self.settings_of.__doc__ or "").split()),)
        return (
            *(" ".join(f"{name}={_written(value)}" for name, value in each.items()) for each in self.settings),
            *more,
        )


def _written(value: Scalar) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
