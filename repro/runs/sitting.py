"""Measured runs are organised by sittings, units and locks. The runs of a sitting share a machine, a few minutes and an id. A unit is made
in one sitting. A lock keeps a unit from other sweeps, and ends with the process that holds it.

If two systems were measured half an hour apart, changes of the machine would blur the comparison. So a repeat of a comparison, the unit,
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
"""Calibration loops before the first run: libraries start up, and the sitting learns how fast the machine can be."""
FRESH_S = 0.5
"""If a loop after a run found the machine quiet, it also serves the next run, if that begins within so many seconds."""

_LOOP_SIZE, _LOOP_REPEATS = 192, 64
_LOOPS, _REST_S = 5, 0.05

T = TypeVar("T")


@dataclass(kw_only=True)
class Sitting:
    """Measures runs on one machine. ``loop`` times a fixed piece of work; ``cpu`` and ``wall`` are the process's clocks."""

    id: str = field(default_factory=lambda: uuid4().hex[:12])
    loop: Callable[[], float] | None = None
    cpu: Callable[[], float] = time.process_time
    wall: Callable[[], float] = time.perf_counter
    best_s: float = float("inf")
    _last: tuple[float, float] = field(default=(float("-inf"), float("inf")), init=False)
    """When the last loop ended, and how long it took."""

    def measure(self, run: Callable[[], T]) -> tuple[T, Load]:
        if self.best_s == float("inf"):
            for _ in range(WARM_UP):
                self._loop()
        ended_s, before_s = self._last
        if time.monotonic() - ended_s > FRESH_S or before_s > MAX_SLOWDOWN * self.best_s:
            before_s = self._loop()
        cpu_s, wall_s = self.cpu(), self.wall()
        result = run()
        cpu_s, wall_s = self.cpu() - cpu_s, self.wall() - wall_s
        after_s = self._loop()
        load = Load(cpu_s=cpu_s, wall_s=wall_s, loop_before_s=before_s, loop_after_s=after_s, best_loop_s=self.best_s)
        return result, load

    def _loop(self) -> float:
        loop_s = (self.loop or calibration_loop)()
        self.best_s = min(self.best_s, loop_s)
        self._last = time.monotonic(), loop_s
        return loop_s


def calibration_loop() -> float:
    """Seconds of a fixed number of matrix products on all cores, about 10 ms. We take the least of a few loops, so a moment's disturbance
    does not count. We first sleep until the threads of the last run, which spin for a while, come to rest."""
    time.sleep(_REST_S)
    return min(_products_s() for _ in range(_LOOPS))


def _products_s() -> float:
    left, right, out = _matrices()
    start_s = time.perf_counter()
    for _ in range(_LOOP_REPEATS):
        np.matmul(left, right, out=out)
    return time.perf_counter() - start_s


@cache
def _matrices() -> tuple[npt.NDArray[np.float64], ...]:
    generator = np.random.default_rng(0)
    shape = (_LOOP_SIZE, _LOOP_SIZE)
    return generator.random(shape), generator.random(shape), np.empty(shape)


# -- units --------------------------------------------------------------------------------------------------

Unit = Hashable


def unit_of(experiment: Experiment) -> tuple[str, str, str, int] | None:
    """The unit of a run; None for a run that is simulated or is in no comparison."""
    cell = experiment.cell
    if not experiment.is_measured or cell.comparison is None:
        return None
    return (cell.comparison, cell.platform, cell.executor, cell.seed)


def name_of(unit: Sequence[Experiment]) -> str:
    """A file name for a unit, the same whichever of its cells are given. A run without a unit has its own name."""
    if (key := unit_of(unit[0])) is None:
        return unit[0].cell.folder_name
    return file_name("_".join(map(str, key)))


def runs_by_unit(experiments: Iterable[Experiment]) -> dict[Unit, list[Experiment]]:
    by_unit: dict[Unit, list[Experiment]] = {}
    for experiment in experiments:
        if (unit := unit_of(experiment)) is not None:
            by_unit.setdefault(unit, []).append(experiment)
    return by_unit


def why_incomplete(unit: Sequence[Experiment], stored: Mapping[str, StoredRun]) -> str | None:
    """Why the whole unit must be made again; None if it is complete, or if no part of it is stored."""
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
    """Orders runs by unit. Within a unit, the systems take turns at each load, and each repeat begins with another system."""
    order = {unit: index for index, unit in enumerate(dict.fromkeys(map(unit_of, experiments)))}
    loads: dict[Hashable, int] = {}
    for experiment in experiments:
        loads.setdefault(_load_of(experiment), len(loads))
    grouped: dict[tuple[int, int], list[Experiment]] = {}
    for experiment in experiments:
        unit = unit_of(experiment)
        load = -1 if unit is None else loads[_load_of(experiment)]
        grouped.setdefault((order[unit], load), []).append(experiment)
    result: list[Experiment] = []
    for (_, load), runs in sorted(grouped.items()):
        start = 0 if load < 0 else runs[0].cell.seed % len(runs)
        result += [*runs[start:], *runs[:start]]
    return result


def group_by_unit(experiments: Iterable[Experiment]) -> list[list[Experiment]]:
    """Groups neighbouring runs of the same unit; a run without a unit is a group of its own."""
    groups: list[list[Experiment]] = []
    for unit, neighbours in groupby(experiments, unit_of):
        runs = list(neighbours)
        groups += [[run] for run in runs] if unit is None else [runs]
    return groups


def _load_of(experiment: Experiment) -> Hashable:
    return (experiment.cell.dataset, experiment.cell.rate)


# -- locks --------------------------------------------------------------------------------------------------

logger = logging.getLogger(__name__)

_HAS_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)

LOCKS = ".locks"
"""The folder of lock files, beside the runs, so that all sweeps that share these runs meet there."""

OnReused = Callable[[Experiment, StoredRun], None]


class UnitLocks:
    """Locks units so that no other sweep makes them at the same time. ``versions`` tells how each cell was stored when the sweep looked.
    ``on_reused`` is called for runs that another sweep has made since."""

    def __init__(self, store: Store, versions: Mapping[str, tuple[int, int] | None], on_reused: OnReused) -> None:
        self._store = store
        self._seen = versions
        self._on_reused = on_reused

    def lock(self, unit: Sequence[Experiment], *, wait: bool = False) -> ExitStack | None:
        """Lock a unit; returns what unlocks it, or None if another sweep has it. ``wait`` waits for that sweep. Do not wait while holding
        units: the other sweep may be waiting for them."""
        return lock_file(self._store.root / LOCKS / f"{name_of(unit)}.lock", wait=wait)

    def one_by_one(self, experiments: Sequence[Experiment]) -> Generator[Experiment]:
        """Yields runs unit by unit. A unit stays locked until the next is requested. Units that other sweeps are making come last."""
        busy = []
        for unit in group_by_unit(experiments):
            if (lock := self.lock(unit)) is None:
                busy.append(unit)
                continue
            with lock:
                yield from self._still_missing(unit)
        if busy:
            logger.warning("waiting for another sweep, which is making %d of the runs", sum(map(len, busy)))
        for unit in busy:
            with self.lock(unit, wait=True) or ExitStack():
                yield from self._still_missing(unit)

    def _still_missing(self, unit: Sequence[Experiment]) -> Sequence[Experiment]:
        """The unit's runs, or none if another sweep has made them since this one looked."""
        if all(self._store.written(experiment.cell) == self._seen[experiment.cell.key] for experiment in unit):
            return unit
        runs = {experiment.cell.key: self._store.find(experiment).run for experiment in unit}
        stored = {key: run for key, run in runs.items() if run is not None}
        if len(stored) < len(unit) or why_incomplete(unit, stored) is not None:
            return unit
        for experiment in unit:
            self._on_reused(experiment, stored[experiment.cell.key])
        return ()


def lock_file(path: Path, *, wait: bool) -> ExitStack | None:
    """Lock a file, which is never removed; returns what unlocks it. Returns None if another process has the lock, unless ``wait``."""
    from filelock import FileLock, Timeout

    lock = FileLock(path, mode=0o666, thread_local=False)
    stack = ExitStack()
    try:
        if not path.parent.is_dir():
            path.parent.mkdir(parents=True, exist_ok=True)
            # Users who may write to the folder of the runs may also lock there.
            keep_mode(path.parent.parent, path.parent)
        if path.exists() and not path.is_file():
            raise OSError(errno.EINVAL, "it is no plain file")
        lock.acquire(timeout=-1 if wait else 0)
    except Timeout:
        return None
    except (OSError, NotImplementedError) as error:
        text = getattr(error, "strerror", None) or str(error)
        if not isinstance(error, OSError) or error.errno in _HAS_NO_LOCKS:
            logger.warning("the file system of %s has no locks (%s): run one sweep at a time in it", path.parent, text)
            return stack
        reason = "it is a symbolic link" if error.errno == errno.ELOOP else text
        raise RunError(
            f"{path.name} cannot be locked in {path.parent} ({reason}): remove it, or give another --result-dir"
        ) from error
    stack.callback(lock.release)
    return stack
