"""Locks of cells between processes of one machine and user: each ends with the process that holds it, however that ends."""

from __future__ import annotations

import errno
import hashlib
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import gettempdir
from typing import IO

from repro.runs.cell import Cell

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]


class CellLocks:
    """Those of the runs in ``root``: one byte a cell of a file that lies not there, as that holds runs and nothing else.

    Several may be held at once. They share an open file: closing any other one of the same file would end them all.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self._file: IO[str] | None = None
        self._num_held = 0

    @contextmanager
    def held(self, cells: Iterable[Cell], *, wait: bool) -> Iterator[bool]:
        """Whether all the cells are this process's, in the body; ``wait`` for others to give them up."""
        if fcntl is None:  # no such locks on this system
            yield True
            return
        file = self._opened()
        taken: list[int] = []
        try:
            yield _lock_all(file, sorted({int(cell.key, 16) for cell in cells}), taken, wait=wait)
        finally:
            self._num_held -= 1
            if self._num_held == 0:
                self._file = None
                file.close()  # and with it every lock
            else:
                for place in taken:
                    fcntl.lockf(file, fcntl.LOCK_UN, 1, place)

    def _opened(self) -> IO[str]:
        if self._file is None:
            name = hashlib.sha256(str(self._root.resolve()).encode()).hexdigest()[:16]
            self._file = Path(gettempdir(), f"repro-{os.getuid()}-{name}.lock").open("a")  # noqa: SIM115 - until the last
        self._num_held += 1
        return self._file


def _lock_all(file: IO[str], places: Iterable[int], taken: list[int], *, wait: bool) -> bool:
    """In order, so that two that wait do not wait for each other. Those of a try that fails are given up at once."""
    try:
        for place in places:
            fcntl.lockf(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB), 1, place)
            taken.append(place)
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.EAGAIN):
            raise
        for place in taken:
            fcntl.lockf(file, fcntl.LOCK_UN, 1, place)
        taken.clear()
        return False
    return True
