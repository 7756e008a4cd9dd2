"""Measured runs: sittings, whose runs share a machine, minutes and an id; units, which are made in one sitting; and locks, which keep a
unit from other sweeps and end with the process that holds them.

Two systems measured half an hour apart are compared across whatever the machine did in between. So a repeat of a comparison, the unit,
counts as done only as a whole, and its runs alternate between the systems.
"""

import errno
import logging
import time
from collections.abc import Callable, Generator, Hashable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import TypeVar
from uuid import uuid4

import numpy as np
import numpy.typing as npt

from engines.errors import RunError
from repro.files import keep_mode
from repro.runs.cell import file_name
from repro.runs.experiment import Experiment
from repro.runs.provenance import MAX_SLOWDOWN, Load
from repro.runs.store import Store, StoredRun

WARM_UP = 10
"""Loops before the first run: libraries start up, and the sitting learns how fast the machine can be."""
FRESH_S = 0.5
"""A loop that found the machine quiet after a run serves the next run too, if that begins within so many seconds."""

_LOOP_SIZE, _LOOP_REPEATS = 192, 64
_LOOPS, _REST_S = 5, 0.05

T = TypeVar("T")


@dataclass(kw_only=True)
class Sitting:
    """``loop`` times a fixed piece of work; ``cpu`` and ``wall`` are the process's clocks."""

    id: str = field(default_factory=lambda: uuid4().hex[:12])
    loop: Callable[[], float] | None = None
    cpu: Callable[[], float] = time.process_time
    wall: Callable[[], float] = time.perf_counter
    best_s: float = float("inf")
    _last: tuple[float, float] = field(default=(float("-inf"), float("inf")), init=False)
    """When the last loop ended, and what it took."""

    def measure(self, run: Callable[[], T]) -> tuple[T, Load]:
        if self.best_s == float("inf"):
            for _ in range(WARM_UP):
                self._loop()
        ended, before = self._last
        if time.monotonic() - ended > FRESH_S or before > MAX_SLOWDOWN * self.best_s:
            before = self._loop()
        cpu, wall = self.cpu(), self.wall()
        result = run()
        cpu, wall = self.cpu() - cpu, self.wall() - wall
        after = self._loop()
        load = Load(cpu_s=cpu, wall_s=wall, loop_before_s=before, loop_after_s=after, best_loop_s=self.best_s)
        return result, load

    def _loop(self) -> float:
        taken = (self.loop or calibration_loop)()
        self.best_s = min(self.best_s, taken)
        self._last = time.monotonic(), taken
        return taken


def calibration_loop() -> float:
    """Seconds that a fixed number of matrix products takes on all cores, about 10 ms: the least of a few in a row, so that a
    moment's disturbance is none. Before them the threads of a run, which spin for a while after it, come to rest."""
    time.sleep(_REST_S)
    return min(_products() for _ in range(_LOOPS))


def _products() -> float:
    left, right, out = _matrices()
    began = time.perf_counter()
    for _ in range(_LOOP_REPEATS):
        np.matmul(left, right, out=out)
    return time.perf_counter() - began


@cache
def _matrices() -> tuple[npt.NDArray[np.float64], ...]:
    generator = np.random.default_rng(0)
    shape = (_LOOP_SIZE, _LOOP_SIZE)
    return generator.random(shape), generator.random(shape), np.empty(shape)


# -- units --------------------------------------------------------------------------------------------------

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
    found: list[list[Experiment]] = []
    for unit, neighbours in groupby(experiments, unit_of):
        members = list(neighbours)
        found += [[each] for each in members] if unit is None else [members]
    return found


def _load(experiment: Experiment) -> Hashable:
    return (experiment.cell.dataset, experiment.cell.rate)


# -- locks --------------------------------------------------------------------------------------------------

logger = logging.getLogger(__name__)

_HAS_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)

LOCKS = ".locks"
"""The folder of lock files, with the runs, so that all who share these meet."""

OnReused = Callable[[Experiment, StoredRun], None]


class UnitLocks:
    """Units that a sweep keeps from other sweeps while it makes them. ``seen`` says how each cell was stored when the sweep
    looked; ``on_reused`` hears of runs that another sweep has made since."""

    def __init__(self, store: Store, seen: Mapping[str, tuple[int, int] | None], on_reused: OnReused) -> None:
        self._store = store
        self._seen = seen
        self._on_reused = on_reused

    def lock(self, unit: Sequence[Experiment], *, wait: bool = False) -> ExitStack | None:
        """What unlocks the unit; None where others are at it. ``wait`` for those, which must not be done with units in hand:
        they may be waiting too."""
        return locked(self._store.root / LOCKS / f"{name_of(unit)}.lock", wait=wait)

    def one_by_one(self, experiments: Sequence[Experiment]) -> Generator[Experiment]:
        """Unit by unit, each locked until the next is asked for. Those that others are making come last."""
        busy = []
        for unit in together(experiments):
            if (lock := self.lock(unit)) is None:
                busy.append(unit)
                continue
            with lock:
                yield from self._to_make(unit)
        if busy:
            logger.warning("waiting for another sweep, which is making %d of the runs", sum(map(len, busy)))
        for unit in busy:
            with self.lock(unit, wait=True) or ExitStack():
                yield from self._to_make(unit)

    def _to_make(self, unit: Sequence[Experiment]) -> Sequence[Experiment]:
        """The unit; nothing where another sweep has made it since this one looked."""
        if all(self._store.written(experiment.cell) == self._seen[experiment.cell.key] for experiment in unit):
            return unit
        runs = {experiment.cell.key: self._store.find(experiment).run for experiment in unit}
        found = {key: run for key, run in runs.items() if run is not None}
        if len(found) < len(unit) or broken(unit, found) is not None:
            return unit
        for experiment in unit:
            self._on_reused(experiment, found[experiment.cell.key])
        return ()


def locked(path: Path, *, wait: bool) -> ExitStack | None:
    """What unlocks a file, which stays where it is. None where another has it; ``wait`` for that to give it up."""
    from filelock import FileLock, Timeout

    lock = FileLock(path, mode=0o666, thread_local=False)
    stack = ExitStack()
    try:
        if not path.parent.is_dir():
            path.parent.mkdir(parents=True, exist_ok=True)
            # Whoever may write to the folder of the runs may lock in it.
            keep_mode(path.parent.parent, path.parent)
        if path.exists() and not path.is_file():
            raise OSError(errno.EINVAL, "it is no plain file")
        lock.acquire(timeout=-1 if wait else 0)
    except Timeout:
        return None
    except (OSError, NotImplementedError) as error:
        said = getattr(error, "strerror", None) or str(error)
        if not isinstance(error, OSError) or error.errno in _HAS_NO_LOCKS:
            logger.warning("the file system of %s has no locks (%s): run one sweep at a time in it", path.parent, said)
            return stack
        why = "it is a symbolic link" if error.errno == errno.ELOOP else said
        raise RunError(
            f"{path.name} cannot be locked in {path.parent} ({why}): remove it, or give another --result-dir"
        ) from error
    stack.callback(lock.release)
    return stack
