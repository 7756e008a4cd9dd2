"""A grid: the settings of a cell, with one or more values each; every combination is a cell.

``repro bench`` makes a grid of its options, ``repro sweep`` of a file, ``repro.sweep`` of a mapping. The same grid gives the same cells.
"""

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import product
from pathlib import Path
from typing import Annotated, Any

from engines.errors import UserError, require
from engines.knobs import Range, check_value, knobs_of
from repro.families.platforms import platform as platform_of
from repro.files import is_file, one_line, read_yaml, size_of, unreadable_yaml
from repro.runs.cell import COMPARISON, NOTES, WORKLOAD, Cell, Scalar, knob_value, plain
from repro.runs.system import SYSTEMS, default_dataset, settings_of
from repro.workloads.knobs import named_after

Repeats = Annotated[int, Range(1, 1000)]
MOST_CELLS = 20_000
"""Most cells of a grid by default: listing so many takes seconds."""


@dataclass(frozen=True, kw_only=True)
class Grid:
    """Each field holds values for the cell's field of this name; an empty one stands for the default of ``repro bench``. Without
    ``dataset``, a cell with the knob ``workload`` is named after that."""

    system: tuple[str, ...] = ()
    dataset: tuple[str, ...] = ()
    platform: tuple[str, ...] = ("cpu-tiny",)
    executor: tuple[str, ...] = ()
    rate: tuple[float | None, ...] = (None,)
    seed: tuple[int, ...] = (0,)
    knobs: Mapping[str, tuple[Scalar, ...]]

    @classmethod
    def from_dict(cls, given: object) -> "Grid":
        """Read a mapping of fields to a value or a list of values. ``knobs`` maps knob names to the same."""
        if not isinstance(given, Mapping) or not given:
            raise UserError(
                f"grid={given!r} must be a mapping: write system, dataset, rate and others with their values"
            )
        allowed = [field.name for field in fields(cls)]
        if unknown := [name for name in given if name not in allowed]:
            raise UserError(
                f"grid key {unknown[0]!r} is unknown: use {', '.join(allowed)}, and write a knob below knobs"
            )
        knobs = {} if given.get("knobs") is None else given["knobs"]
        if not isinstance(knobs, Mapping):
            raise UserError(f"knobs={knobs!r} must be a mapping of knob names to values, or lists of values")
        if notes := [name for name in knobs if name in (*NOTES, COMPARISON)]:
            raise UserError(f"knob {notes[0]!r} is a note about a run and asks nothing of it: leave it out")
        own = {name: _values(name, value) for name, value in given.items() if name != "knobs"}
        if "rate" in own:
            # inf means that all requests arrive at once; a cell has None for it.
            own["rate"] = tuple(None if value in ("inf", math.inf) else value for value in own["rate"])
        return cls(
            **own, knobs={name: tuple(map(knob_value, _values(f"knob {name}", value))) for name, value in knobs.items()}
        )

    def repeated(self, num: int | None) -> "Grid":
        """The grid with the seeds 0 to ``num`` - 1; unchanged if ``num`` is None."""
        num = plain(num)
        check_value(Repeats | None, "repeats", num)
        if num is None:
            return self
        require(self.seed == (0,), f"seed={self.seed} is given beside repeats={num}, which are seeds: leave one out")
        return replace(self, seed=tuple(range(num)))

    @property
    def varied(self) -> tuple[str, ...]:
        return tuple(name for name, values in self.knobs.items() if len(values) > 1)

    @property
    def files(self) -> tuple[str, ...]:
        """All values that are paths of files."""
        candidates = (*self.platform, *(value for values in self.knobs.values() for value in values))
        return tuple(value for value in candidates if isinstance(value, str) and is_file(value))

    @property
    def num_cells(self) -> int:
        """The most cells that the grid can have; some may be equal."""
        fields = (self.system, self.dataset, self.platform, self.executor, self.rate, self.seed, *self.knobs.values())
        return math.prod(max(1, len(values)) for values in fields)

    def cells(self, most: int = MOST_CELLS) -> list[Cell]:
        """The cells, with the repeats of a setting one after the other. Raises UserError for more than ``most``, before making any."""
        check_value(Annotated[int, Range(1, 10**8)], "max_cells", most)
        require(
            self.num_cells <= most,
            f"the grid has {self.num_cells:,} cells, more than max_cells={most:,}: leave values out, or raise it "
            "(repro sweep --max-cells)",
        )
        return list(dict.fromkeys(self._cells()))

    def _cells(self) -> Iterator[Cell]:
        for platform_name in self.platform:
            platform = platform_of(platform_name)
            systems = self.system or (platform.default_system,)
            # One value of each knob; null leaves a knob at its default.
            choices = [zip(self.knobs, chosen, strict=True) for chosen in product(*self.knobs.values())]
            knob_sets = [{name: value for name, value in knob_set if value is not None} for knob_set in choices]
            settings = [knobs_of_each(systems, knob_set) for knob_set in knob_sets]
            is_traced = all(values.get(WORKLOAD) is not None for setting in settings for values in setting.values())
            datasets = self.dataset or ("" if is_traced else default_dataset(systems[0], platform),)
            for executor, dataset, rate, knobs in product(
                self.executor or (platform.executor,), datasets, self.rate, settings
            ):
                for system, system_knobs in knobs.items():
                    workload = None if self.dataset else system_knobs.get(WORKLOAD)
                    cell = Cell(
                        system=system,
                        dataset=dataset if workload is None else named_after(str(workload)),
                        platform=platform.name,
                        executor=executor,
                        rate=rate,
                        seed=self.seed[0],
                        knobs=tuple(system_knobs.items()),
                    )
                    yield from map(cell.with_seed, self.seed)


def grid_of_file(path: Path) -> Grid:
    try:
        content = read_yaml(path, "grid")
    except UserError:
        raise
    except unreadable_yaml() as error:
        raise UserError(f"grid={str(path)!r} cannot be read as YAML ({one_line(error)}): correct it") from None
    try:
        return Grid.from_dict(_with_numbers(content))
    except UserError as error:
        raise UserError(f"{path.name}: {error}") from None


def in_turns(cells: Iterable[Cell]) -> list[Cell]:
    """Orders cells repeat by repeat, each beginning with another setting, so that drifts of the machine affect all settings."""
    turns: dict[int, list[Cell]] = {}
    for cell in cells:
        turns.setdefault(cell.seed, []).append(cell)
    ordered: list[Cell] = []
    for index, turn in enumerate(turns.values()):
        start = index % len(turn)
        ordered += [*turn[start:], *turn[:start]]
    return ordered


def knobs_of_each(systems: Sequence[str], options: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The knobs of each system. Adds knobs that the given ones imply for it, and drops those that only other systems heed."""
    entries = {name: SYSTEMS.get(name) for name in systems}
    shared = dict(options)
    if "burstiness" in shared:
        shared.setdefault("arrivals", "gamma")
    if "dataset_path" in shared:
        shared.setdefault("dataset_source", "local")
    knobs = {name: {**getattr(system, "implied", dict)(shared), **shared} for name, system in entries.items()}
    heeding = {name for name, system in entries.items() if getattr(system, "has_readings", True)}
    for name in entries.keys() - heeding if heeding else ():
        # Only baselines have a reading; the system under test has none.
        knobs[name].pop("reading", None)
    for system, values in knobs.items():
        sizes = {name for kind in settings_of(system) for name, knob in knobs_of(kind).items() if knob.is_size}
        values |= {name: size_of(name, values[name]) for name in sizes if isinstance(values.get(name), str)}
    return knobs


def _values(name: object, given: Any) -> tuple[Any, ...]:
    value = plain(given)
    if isinstance(value, Mapping):
        raise UserError(f"{name}={value!r} must be a value, or a list of them")
    is_several = isinstance(value, list | tuple | range) or getattr(value, "shape", ()) != ()
    values = tuple(map(plain, value)) if is_several else (value,)
    require(values != (), f"{name}={value!r} has no value: give one, or leave it out")
    return values


def _with_numbers(given: Any) -> Any:
    """Turns texts into the numbers that a user means: YAML 1.1 reads 1e-4 as a text."""
    match given:
        case dict():
            return {name: _with_numbers(value) for name, value in given.items()}
        case list():
            return [_with_numbers(value) for value in given]
        case str() if given[:1] in "+-.0123456789":
            try:
                number = json.loads(given)
            except ValueError:
                return given
            # A number that is too large stays a text, which is refused later.
            return number if isinstance(number, float) and math.isfinite(number) else given
    return given
