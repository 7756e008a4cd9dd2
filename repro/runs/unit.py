"""Units: the measured cells that a figure or an ablation compares, one repeat of them, made in one sitting.

Two systems measured half an hour apart are compared across whatever the machine did in between. So a repeat of a comparison
counts as done only as a whole, and its runs alternate between the systems.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from itertools import groupby

from repro.runs.cell import file_name
from repro.runs.experiment import Experiment
from repro.runs.store import StoredRun

Unit = Hashable


def unit_of(experiment: Experiment) -> tuple[str, str, str, int] | None:
    """None for a run that is compared with nothing, or is simulated."""
    cell = experiment.cell
    if not experiment.is_measured or cell.comparison is None:
        return None
    return (cell.comparison, cell.platform, cell.executor, cell.seed)


def name_of(unit: Sequence[Experiment]) -> str:
    """A file's name for a unit, whichever of its cells are asked for; a run without one is known by its own."""
    if (found := unit_of(unit[0])) is None:
        return unit[0].cell.folder_name
    return file_name("_".join(map(str, found)))


def units(experiments: Iterable[Experiment]) -> dict[Unit, list[Experiment]]:
    found: dict[Unit, list[Experiment]] = {}
    for experiment in experiments:
        if (unit := unit_of(experiment)) is not None:
            found.setdefault(unit, []).append(experiment)
    return found


def broken(unit: Sequence[Experiment], stored: Mapping[str, StoredRun]) -> str | None:
    """Why the unit has to be made again, whole; None where it is complete, or no part of it is stored."""
    runs = [stored[experiment.cell.key] for experiment in unit if experiment.cell.key in stored]
    if not runs:
        return None
    if len(runs) < len(unit):
        return f"made again with the other runs of its comparison, of which {len(unit) - len(runs)} are missing"
    sittings = {run.provenance.get("sitting") for run in runs}
    if len(runs) > 1 and (len(sittings) > 1 or None in sittings):
        return f"made again with the other runs of its comparison: they are of {len(sittings)} sittings"
    return None


def interleaved(experiments: Sequence[Experiment]) -> list[Experiment]:
    """Unit by unit; within one, the systems take turns at every load, and another begins in every repeat."""
    order = {unit: place for place, unit in enumerate(dict.fromkeys(map(unit_of, experiments)))}
    loads: dict[Hashable, int] = {}
    for experiment in experiments:
        loads.setdefault(_load(experiment), len(loads))
    grouped: dict[tuple[int, int], list[Experiment]] = {}
    for experiment in experiments:
        unit = unit_of(experiment)
        load = -1 if unit is None else loads[_load(experiment)]
        grouped.setdefault((order[unit], load), []).append(experiment)
    result: list[Experiment] = []
    for (_, load), turn in sorted(grouped.items()):
        first = 0 if load < 0 else turn[0].cell.seed % len(turn)
        result += [*turn[first:], *turn[:first]]
    return result


def together(experiments: Iterable[Experiment]) -> list[list[Experiment]]:
    """Neighbours of one unit in a list; a run without one by itself."""
    return [
        group
        for unit, neighbours in groupby(experiments, unit_of)
        for members in [list(neighbours)]
        for group in ([[member] for member in members] if unit is None else [members])
    ]


def _load(experiment: Experiment) -> Hashable:
    return (experiment.cell.dataset, experiment.cell.rate)
