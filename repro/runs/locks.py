"""Locks of cells between processes: each ends with the process that holds it, however that ends."""

from __future__ import annotations

import errno
import logging
import os
import stat
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from engines.errors import RunError
from repro.runs.cell import Cell

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

logger = logging.getLogger(__name__)

_TAKEN = (errno.EACCES, errno.EAGAIN)
_HAS_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)


class CellLocks:
    """Those of the runs in ``root``: a hidden file a cell, which lies there, so that all who share the folder meet, and is
    gone when the lock is."""

    def __init__(self, root: Path) -> None:
        self._root = root

    @contextmanager
    def held(self, cells: Iterable[Cell], *, wait: bool) -> Iterator[bool]:
        """Whether all the cells are locked here, in the body; ``wait`` for others to give them up. In order, so that two that
        wait do not wait for each other. Those of a try that fails are given up at once."""
        with ExitStack() as taken:
            if fcntl is not None and not all(
                self._take(name, taken, wait=wait) for name in sorted({cell.folder_name for cell in cells})
            ):
                taken.close()
                yield False
            else:
                yield True

    def _take(self, name: str, taken: ExitStack, *, wait: bool) -> bool:
        path = self._root / f".{name}.lock"
        try:
            while True:
                with ExitStack() as own:
                    own.callback(os.close, file := _opened(path))
                    if not _locked(file, path, wait=wait):
                        return False
                    if _is_still(path, file):
                        # Before it is closed: whoever waits for it sees that it is gone, and makes another.
                        own.callback(_remove, path)
                        taken.enter_context(own.pop_all())
                        return True
        except OSError as error:
            why = "it is a symbolic link" if error.errno == errno.ELOOP else error.strerror
            raise RunError(
                f"{path.name} cannot be locked in {self._root} ({why}): remove it, or give another --result-dir"
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


def _locked(file: int, path: Path, *, wait: bool) -> bool:
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
