"""What the harness asks of a system, the one seam between them; and where systems are found by name."""

import csv
import json
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Generic, Literal, NamedTuple, Protocol, TypeVar, cast

from engines.data import load_named, where_of
from engines.errors import UserError
from engines.knobs import Checked
from repro.runs.cell import Cell, Scalar

T = TypeVar("T")
Tune = Literal["off", "search"]
TUNE = "tune"
Setting = tuple[tuple[str, Scalar], ...]
"""Knobs by name, in order."""
PAPER, CARDS = "paper", "cards"


@dataclass(frozen=True, kw_only=True)
class TuneKnobs(Checked):
    tune: Tune = "off"
    """search: set the knobs that no source prints (docs/tuning.md) to the best of simulated trials on other seeds."""


class FreeSetting(NamedTuple):
    """Something that no source prints, and what it may be besides what it is by default."""

    what: str
    settings: tuple[Mapping[str, Scalar], ...]
    why: str
    """What the source says of it."""
    settings_of: Callable[[Cell], tuple[Mapping[str, Scalar], ...]] | None = None
    """More of them, where they depend on what a cell asks for; its docstring says which."""
    has_default: bool = True
    """False: one of them is taken, the first of all candidates the first."""
    where: str = ""
    """paper: on the clusters of AMPD's figures alone; cards: everywhere else."""

    def among(self, cell: Cell) -> tuple[Setting, ...]:
        """What it may be in a cell; nothing where the cell says what it is."""
        more = () if self.settings_of is None else self.settings_of(cell)
        settings = (*self.settings, *more)
        if self.where == CARDS:
            return _left_free(settings, cell.asked)
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


def _left_free(settings: Sequence[Mapping[str, Scalar]], given: Mapping[str, Scalar]) -> tuple[Setting, ...]:
    """What a user has not given of them. The first knob of a setting says what it is: one with another value there is left out."""
    found: dict[Setting, None] = {}
    for setting in settings:
        kind, value = next(iter(setting.items()))
        if given.get(kind, value) == value:
            found[tuple(pair for pair in setting.items() if pair[0] not in given)] = None
    return tuple(each for each in found if each)


def _written(value: Scalar) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def setting_said(setting: Setting) -> str:
    return " ".join(f"{name}={'null' if value is None else _written(value)}" for name, value in setting)


def options_said(settings: Mapping[str, Scalar]) -> str:
    """Settings by name as options of ``repro bench``, for a shell."""
    named = {name: _written(settings[name]) for name in sorted(settings)}
    model = named.pop("model", None)
    words = [] if model is None else ["--model", shlex.quote(model)]
    return " ".join([*words, *(f"--knob {shlex.quote(f'{name}={value}')}" for name, value in named.items())])


@cache
def free_settings(of: str) -> tuple[FreeSetting, ...]:
    """What no source prints of a system, or of any ``baseline``, as ``free.csv`` lists it."""
    with Path(__file__).with_name("free.csv").open(newline="", encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if of in row["systems"].split()]
    return tuple(
        FreeSetting(
            row["what"],
            tuple(map(_setting, filter(None, row["settings"].split("; ")))),
            row["why"],
            load_named("free setting", row["more"]) if row["more"] else None,
            has_default=row["default"] != "none",
            where=row["where"],
        )
        for row in rows
    )


def _setting(text: str) -> dict[str, Scalar]:
    found: dict[str, Scalar] = {}
    for word in text.split():
        name, _, value = word.partition("=")
        try:
            found[name] = json.loads(value)
        except ValueError:
            found[name] = value
    return found


if TYPE_CHECKING:
    from repro.runs.family import Family
    from repro.runs.record import Obtained, OnProgress, RunRecord


class PreparedWorkload(Protocol):
    @property
    def provenance(self) -> Any:
        """Where requests came from; a dataclass, whose fields go into the run's manifest, with a ``checksum`` of the requests."""


class Deployment(Protocol):
    """A system configured for one cell, checked, with nothing heavy loaded; it pickles where it is simulated. Has a
    ``device`` besides where its runs are measured on another than the CPU: cuda or cuda:N; and ``is_tied_here`` where they
    drive servers or start processes beside this one, so that no other machine can make them."""

    @property
    def obtained(self) -> "Obtained":
        """Measured runs are made alone, simulated ones in parallel."""

    @property
    def basis(self) -> str:
        """A digest of what is behind the numbers besides requests and code: a checkpoint, a calibration."""

    @property
    def modules(self) -> tuple[str, ...]:
        """Modules that decide the run's numbers; what they import counts too (repro.runs.code)."""

    @property
    def facts(self) -> Mapping[str, Any]:
        """What was learnt by planning."""

    def check_machine(self) -> None:
        """Raise UserError where this machine lacks something that the run needs."""

    def run(self, workload: Any, on_progress: "OnProgress | None" = None) -> "RunRecord":
        """Serve the workload."""


class System(Protocol):
    """One may have besides: ``knobs``, the settings whose fields are its cells' knobs; ``default_dataset(platform)``, the data set where
    none is named; ``implied(given)``, what the knobs that a user gave say of others; ``free``, which of its settings no source prints
    (``FreeSetting``); where cells can ask for a device, ``check_device(cell)``, which raises UserError where this machine lacks it,
    before the cell's requests are looked at; and ``reseeded(deployment, cell)``, which returns the deployment and workload of a cell
    that differs in its seed alone from the one that ``deployment`` was prepared for, or None if it has to be prepared anew."""

    @property
    def name(self) -> str: ...

    @property
    def title(self) -> str: ...

    @property
    def family(self) -> "Family": ...

    def prepare(self, cell: Cell) -> tuple[Deployment, PreparedWorkload]:
        """Raise UserError for whatever a user can get wrong, before any run."""


class SystemEntry(NamedTuple):
    """A system that comes with the package, as ``systems.csv`` lists it: all that is said of it outside of its own modules."""

    name: str
    where: str
    """The system as module:NAME, or the method that ``made_by`` makes one of."""
    made_by: str
    """A class of systems as module:NAME; empty where ``where`` is a system."""
    colour: str
    marker: str
    """Both in figures, where it has its own."""
    says: str
    """Its description, in a clause."""


with Path(__file__).with_name("systems.csv").open(newline="", encoding="utf-8") as _listed:
    ENTRIES: Mapping[str, SystemEntry] = {row["name"]: SystemEntry(**row) for row in csv.DictReader(_listed)}
"""By name: importing all systems takes longer than listing them."""
_MOVED = {"repro.systems.ar.planning:AMPD_PLANNER": "repro.families.cluster.planning:AMPD_PLANNER"}


class Registry(Generic[T]):
    """``entries`` maps a name to where it is, ``module:NAME``, which is imported when it is asked for. Packages add
    to it through the entry-point group ``repro.<kind>``. What lacks one of ``having`` is refused."""

    def __init__(
        self,
        kind: str,
        entries: Mapping[str, str],
        *,
        having: tuple[str, ...] = (),
        moved: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """``moved`` says where things are now that stored cells name by an older ``module:NAME``."""
        self.kind, self._moved = kind, moved
        self._having = having
        self._entries = dict(entries)

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def get(self, name: str) -> T:
        """Raises UserError for a name that is not known or is none, or a module that has no such thing."""
        if not isinstance(name, str):
            raise UserError(f"{self.kind}={name!r} must be a name: use one of {', '.join(self)}, or module:NAME")
        where = self._entries.get(name) or self._moved.get(name) or where_of(self.kind, name, self)
        return cast(T, load_named(self.kind, where, having=self._having))


class _Systems(Registry[System]):
    """Those of ``ENTRIES``, each imported when it is asked for, and those of installed packages."""

    def get(self, name: str) -> System:
        entry = ENTRIES.get(name) if isinstance(name, str) else None
        return super().get(name) if entry is None or not entry.made_by else _made(entry.made_by, entry.where)


@cache
def _made(kind: str, where: str) -> System:
    found: System = load_named("system", kind)(load_named("system", where))
    return found


SYSTEMS = _Systems(
    "system",
    {name: entry.where for name, entry in ENTRIES.items()},
    having=("name", "title", "family", "prepare"),
    moved=_MOVED,
)


def settings_of(name: str) -> tuple[type, ...]:
    """The settings whose fields are the knobs of a system's cells; none where it does not say."""
    return (*getattr(SYSTEMS.get(name), "knobs", ()), *((TuneKnobs,) if free_of(name) else ()))


def free_of(name: str, where: str = PAPER) -> tuple[FreeSetting, ...]:
    """What no source prints of a system, or on ``CARDS`` what a user may choose; nothing where it does not say."""
    return tuple(each for each in getattr(SYSTEMS.get(name), "free", ()) if each.where in ("", where))


def default_dataset(name: str, platform: Any) -> str:
    """What a system serves on a platform where no data set is named."""
    own = getattr(SYSTEMS.get(name), "default_dataset", None)
    return "osc" if own is None else str(own(platform))
