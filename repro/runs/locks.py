"""Locks of what is measured, between processes: each ends with the process that holds it, however that ends."""

from __future__ import annotations

import errno
import logging
import os
import stat
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

from engines.errors import RunError
from repro.runs.experiment import Experiment
from repro.runs.store import Store, StoredRun
from repro.runs.unit import broken, name_of, together

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

logger = logging.getLogger(__name__)

_TAKEN = (errno.EACCES, errno.EAGAIN)
_HAS_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)

OnReused = Callable[[Experiment, StoredRun], None]


class UnitLocks:
    """Units that a sweep keeps from other sweeps while it makes them. ``seen`` says how each cell was stored when the sweep
    looked; ``on_reused`` hears of runs that another sweep has made since."""

    def __init__(self, store: Store, seen: Mapping[str, tuple[int, int] | None], on_reused: OnReused) -> None:
        self._store = store
        self._seen = seen
        self._on_reused = on_reused
        self._busy: list[Sequence[Experiment]] = []
        """Units that others were making when they were asked for."""

    def take(self, unit: Sequence[Experiment], *, wait: bool = False) -> ExitStack | None:
        """What unlocks the unit; None where it is not to be made: others are at it, or have made it. ``wait`` for those
        others, which must not be done with units in hand: they may be waiting too."""
        lock = locked(self._store.root / f".{name_of(unit)}.lock", wait=wait)
        if lock is None:
            self._busy.append(unit)
            return None
        with lock:
            if runs := self._made_meanwhile(unit):
                for experiment in unit:
                    self._on_reused(experiment, runs[experiment.cell.key])
                return None
            return lock.pop_all()

    def one_by_one(self, experiments: Sequence[Experiment]) -> Generator[Experiment]:
        """Unit by unit, each locked until the next is asked for. Those that others are making come last."""
        for unit in together(experiments):
            if (lock := self.take(unit)) is not None:
                with lock:
                    yield from unit
        for waited, lock in self.waited_for():
            with lock:
                yield from waited

    def waited_for(self) -> Generator[tuple[Sequence[Experiment], ExitStack]]:
        """The busy units once others have let them go, but for those that they have made."""
        busy, self._busy = self._busy, []
        if busy:
            logger.warning("waiting for another sweep, which is making %d of the runs", sum(map(len, busy)))
        for each in busy:
            if (lock := self.take(each, wait=True)) is not None:
                yield each, lock

    def _made_meanwhile(self, unit: Sequence[Experiment]) -> dict[str, StoredRun]:
        """The unit's runs, where another sweep has made them since this one looked."""
        if all(self._store.written(experiment.cell) == self._seen[experiment.cell.key] for experiment in unit):
            return {}
        runs = {experiment.cell.key: self._store.find(experiment).run for experiment in unit}
        found = {key: run for key, run in runs.items() if run is not None}
        return found if len(found) == len(unit) and broken(unit, found) is None else {}


def locked(path: Path, *, wait: bool) -> ExitStack | None:
    """What unlocks a hidden file, which lies with the runs, so that all who share the folder meet, and is gone when the lock
    is. None where another has it; ``wait`` for that to give it up."""
    if fcntl is None:
        return ExitStack()
    try:
        while True:
            with ExitStack() as lock:
                lock.callback(os.close, file := _opened(path))
                if not _is_taken(file, path, wait=wait):
                    return None
                if _is_still(path, file):
                    # Before it is closed: whoever waits for it sees that it is gone, and makes another.
                    lock.callback(_remove, path)
                    return lock.pop_all()
    except OSError as error:
        why = "it is a symbolic link" if error.errno == errno.ELOOP else error.strerror
        raise RunError(
            f"{path.name} cannot be locked in {path.parent} ({why}): remove it, or give another --result-dir"
        ) from error


def _opened(path: Path) -> int:
    """A plain file or OSError: whoever may write to the folder could have put there a link to a file of somebody else's, or a
    pipe that nobody reads."""
    path.parent.mkdir(parents=True, exist_ok=True)
    careful = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        file = os.open(path, os.O_RDWR | os.O_CREAT | careful, 0o666)
    except PermissionError as error:
        try:
            file = os.open(path, os.O_RDONLY | careful)  # another user's
        except OSError:
            raise error from None
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise OSError(errno.EINVAL, "it is no plain file")
    return file


def _is_taken(file: int, path: Path, *, wait: bool) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except OSError as error:
        if error.errno in _TAKEN:
            return False
        if error.errno not in _HAS_NO_LOCKS:
            raise
        logger.warning(
            "the file system of %s has no locks (%s): run one sweep at a time in it", path.parent, error.strerror
        )
    return True


def _is_still(path: Path, file: int) -> bool:
    """Whether the lock is that of the file that others will find: who held it before has removed it."""
    try:
        return os.path.samestat(os.lstat(path), os.fstat(file))
    except FileNotFoundError:
        return False


def _remove(path: Path) -> None:
    with suppress(OSError):
        path.unlink()
