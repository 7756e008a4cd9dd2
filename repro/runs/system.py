"""The interface that a system offers to the harness, and the registry that finds systems by name."""

import csv
import json
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Generic, Literal, NamedTuple, Protocol, TypeVar, cast

from engines.data import import_path_of, load_named
from engines.errors import UserError
from engines.knobs import Checked
from repro.runs.cell import Cell, Scalar

T = TypeVar("T")
Tune = Literal["off", "search"]
TUNE = "tune"
Setting = tuple[tuple[str, Scalar], ...]
"""(knob, value) pairs, in order."""
PAPER, CARDS = "paper", "cards"


@dataclass(frozen=True, kw_only=True)
class TuneKnobs(Checked):
    tune: Tune = "off"
    """search: set the knobs that no source prints (docs/tuning.md) to the best of simulated trials on other seeds."""


class FreeSetting(NamedTuple):
    """A setting that no source prints, and the values it may take besides its default."""

    what: str
    settings: tuple[Mapping[str, Scalar], ...]
    why: str
    """The source's words about it."""
    settings_of: Callable[[Cell], tuple[Mapping[str, Scalar], ...]] | None = None
    """Returns more settings, which depend on what a cell asks for; its docstring describes them."""
    has_default: bool = True
    """False: one of these settings is always taken, and the first candidate takes the first."""
    where: str = ""
    """paper: only on the clusters of AMPD's figures; cards: everywhere else; empty: both."""

    def among(self, cell: Cell) -> tuple[Setting, ...]:
        """The values it may take in a cell; empty if the cell sets it itself."""
        extra = () if self.settings_of is None else self.settings_of(cell)
        settings = (*self.settings, *extra)
        if self.where == CARDS:
            return _unset_parts(settings, cell.requested)
        if {name for setting in settings for name in setting} & set(cell.requested):
            return ()
        return tuple(tuple(setting.items()) for setting in settings)

    @property
    def said(self) -> tuple[str, ...]:
        """Each setting in words."""
        extra = () if self.settings_of is None else (" ".join((self.settings_of.__doc__ or "").split()),)
        return (
            *(" ".join(f"{name}={_value_text(value)}" for name, value in setting.items()) for setting in self.settings),
            *extra,
        )


def _unset_parts(settings: Sequence[Mapping[str, Scalar]], knobs: Mapping[str, Scalar]) -> tuple[Setting, ...]:
    """The parts of these settings that a user has not given. A setting is left out if its first knob, its kind, has another value."""
    remaining: dict[Setting, None] = {}
    for setting in settings:
        kind, value = next(iter(setting.items()))
        if knobs.get(kind, value) == value:
            remaining[tuple(pair for pair in setting.items() if pair[0] not in knobs)] = None
    return tuple(setting for setting in remaining if setting)


def _value_text(value: Scalar) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def setting_text(setting: Setting) -> str:
    return " ".join(f"{name}={'null' if value is None else _value_text(value)}" for name, value in setting)


def options_text(settings: Mapping[str, Scalar]) -> str:
    """Settings as options of ``repro bench``, quoted for a shell."""
    texts = {name: _value_text(settings[name]) for name in sorted(settings)}
    model = texts.pop("model", None)
    words = [] if model is None else ["--model", shlex.quote(model)]
    return " ".join([*words, *(f"--knob {shlex.quote(f'{name}={value}')}" for name, value in texts.items())])


@cache
def free_settings(system: str) -> tuple[FreeSetting, ...]:
    """The settings of a system, or of any ``baseline``, that no source prints, as listed in ``free.csv``."""
    with Path(__file__).with_name("free.csv").open(newline="", encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if system in row["systems"].split()]
    return tuple(
        FreeSetting(
            row["what"],
            tuple(map(_parse_setting, filter(None, row["settings"].split("; ")))),
            row["why"],
            load_named("free setting", row["more"]) if row["more"] else None,
            has_default=row["default"] != "none",
            where=row["where"],
        )
        for row in rows
    )


def _parse_setting(text: str) -> dict[str, Scalar]:
    setting: dict[str, Scalar] = {}
    for word in text.split():
        name, _, value = word.partition("=")
        try:
            setting[name] = json.loads(value)
        except ValueError:
            setting[name] = value
    return setting


if TYPE_CHECKING:
    from repro.runs.family import Family
    from repro.runs.record import Obtained, OnProgress, RunRecord


class PreparedWorkload(Protocol):
    @property
    def provenance(self) -> Any:
        """Source of the requests: a dataclass whose fields go into the run's manifest, with a ``checksum`` of the requests."""


class Deployment(Protocol):
    """A system configured and checked for one cell, with nothing heavy loaded. It pickles if it is simulated. It has ``device``, cuda or
    cuda:N, if its runs are not measured on the CPU. It has ``is_tied_here`` if its runs drive servers or start processes, so that only this
    machine can make them. It has ``modules``, names of modules, if these decide its numbers and are neither of its family's code nor of
    the packages that its cell names (repro.runs.provenance)."""

    @property
    def obtained(self) -> "Obtained":
        """Decides how runs are made: measured ones alone, simulated ones in parallel."""

    @property
    def basis(self) -> str:
        """A digest of what else decides the numbers, besides requests and code: a checkpoint, a calibration."""

    def check_machine(self) -> None:
        """Raise UserError if this machine lacks something that the run needs."""

    def run(self, workload: Any, on_progress: "OnProgress | None" = None) -> "RunRecord":
        """Serve the workload."""


class System(Protocol):
    """A system may also have these: ``knobs`` are settings classes whose fields are its cells' knobs. ``default_dataset(platform)`` is the
    default data set. ``implied(given)`` returns knobs that a user's knobs imply. ``free`` lists settings that no source prints
    (``FreeSetting``). ``check_device(cell)`` raises UserError, before requests are prepared, if the device that a cell asks for is
    absent. ``reseeded(deployment, cell)`` returns what ``prepare`` would return for a cell that differs only in its seed from the cell of
    ``deployment``, or None if the cell has to be prepared."""

    @property
    def name(self) -> str: ...

    @property
    def title(self) -> str: ...

    @property
    def family(self) -> "Family": ...

    def prepare(self, cell: Cell) -> tuple[Deployment, PreparedWorkload]:
        """Raise UserError for any mistake of the user, before any run."""


def reseeded(system: System, deployment: Deployment | None, cell: Cell) -> tuple[Any, Any] | None:
    """Return ``system.reseeded(deployment, cell)``, or None if the system has no such method or there is no deployment."""
    reseed = getattr(system, "reseeded", None)
    return None if reseed is None or deployment is None else reseed(deployment, cell)


class SystemEntry(NamedTuple):
    """A system of this package, as listed in ``systems.csv``: everything about it outside of its own modules."""

    name: str
    where: str
    """The system as module:NAME, or the method that ``made_by`` turns into a system."""
    made_by: str
    """A class of systems as module:NAME; empty if ``where`` is a system."""
    colour: str
    marker: str
    """Colour and marker in figures, if it has its own."""
    says: str
    """A description of the system, as a clause."""


with Path(__file__).with_name("systems.csv").open(newline="", encoding="utf-8") as _listed:
    ENTRIES: Mapping[str, SystemEntry] = {row["name"]: SystemEntry(**row) for row in csv.DictReader(_listed)}
"""The systems by name. Listing them here is faster than importing them all."""
_MOVED = {"repro.systems.ar.planning:AMPD_PLANNER": "repro.families.cluster.ampd:AMPD_PLANNER"}


class Registry(Generic[T]):
    """``entries`` maps a name to its ``module:NAME``, which is imported on first use. Packages add entries through the entry-point group
    ``repro.<kind>``. An entry that lacks an attribute of ``having`` is refused."""

    def __init__(
        self,
        kind: str,
        entries: Mapping[str, str],
        *,
        having: tuple[str, ...] = (),
        moved: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """``moved`` maps an older ``module:NAME`` in stored cells to the current one."""
        self.kind, self._moved = kind, moved
        self._having = having
        self._entries = dict(entries)

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def get(self, name: str) -> T:
        """Return the entry of a name. Raises UserError for an unknown or invalid name, or if the module lacks the attribute."""
        if not isinstance(name, str):
            raise UserError(f"{self.kind}={name!r} must be a name: use one of {', '.join(self)}, or module:NAME")
        target = self._entries.get(name) or self._moved.get(name) or import_path_of(self.kind, name, self)
        return cast(T, load_named(self.kind, target, attributes=self._having))


class _Systems(Registry[System]):
    """The systems of ``ENTRIES``, each imported on first use, and those of installed packages."""

    def get(self, name: str) -> System:
        entry = ENTRIES.get(name) if isinstance(name, str) else None
        return super().get(name) if entry is None or not entry.made_by else _build(entry.made_by, entry.where)


@cache
def _build(kind: str, target: str) -> System:
    system: System = load_named("system", kind)(load_named("system", target))
    return system


SYSTEMS = _Systems(
    "system",
    {name: entry.where for name, entry in ENTRIES.items()},
    having=("name", "title", "family", "prepare"),
    moved=_MOVED,
)


def settings_of(name: str) -> tuple[type, ...]:
    """The settings classes whose fields are the knobs of a system's cells; empty if it names none."""
    return (*getattr(SYSTEMS.get(name), "knobs", ()), *((TuneKnobs,) if free_of(name) else ()))


def free_of(name: str, place: str = PAPER) -> tuple[FreeSetting, ...]:
    """The settings of a system that no source prints, or on ``CARDS`` those that a user may choose; empty if it names none."""
    return tuple(setting for setting in getattr(SYSTEMS.get(name), "free", ()) if setting.where in ("", place))


def default_dataset(name: str, platform: Any) -> str:
    """The data set that a system serves on a platform if the user names none."""
    default = getattr(SYSTEMS.get(name), "default_dataset", None)
    return "osc" if default is None else str(default(platform))
