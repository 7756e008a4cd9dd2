"""The program's folder: whether it has grown too large, and emptying it. A program may nest folders deeper than paths, recursion
or open files allow, and takes time for each that lies below a long path: everything here goes step by step, by descriptors."""

from __future__ import annotations

import os
from contextlib import suppress

MAX_DEPTH = 200
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW


def is_too_large(folder: str, *, most_bytes: int, most_files: int) -> bool:
    """Whether the files exceed the quota; a tree that is too deep, or closed to us, does."""
    num_bytes = num_files = 0
    pending = [(folder, 0)]
    try:
        while pending:
            path, depth = pending.pop()
            if depth > MAX_DEPTH:
                return True
            with suppress(FileNotFoundError), os.scandir(path) as entries:  # gone since
                for entry in entries:
                    num_files += 1
                    with suppress(FileNotFoundError):
                        num_bytes += entry.stat(follow_symlinks=False).st_size
                    if num_bytes > most_bytes or num_files > most_files:
                        return True
                    if entry.is_dir(follow_symlinks=False):
                        pending.append((entry.path, depth + 1))
    except OSError:
        return True
    return False


def empty(folder: str) -> None:
    """Remove what a program left. It must have ended."""
    os.chmod(folder, 0o700)
    place, way = os.open(folder, _FOLDER), list[str]()
    try:
        while True:
            inner = _remove_files(place)
            if inner is not None:
                os.chmod(inner, 0o700, dir_fd=place)
                nearby = os.open(inner, _FOLDER, dir_fd=place)
                way.append(inner)
            elif way:
                nearby = os.open("..", _FOLDER, dir_fd=place)
                os.rmdir(way.pop(), dir_fd=nearby)
            else:
                return
            os.close(place)
            place = nearby
    finally:
        os.close(place)


def _remove_files(place: int) -> str | None:
    """Remove the files of a folder, until a folder is met; its name."""
    with os.scandir(place) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                return entry.name
            os.unlink(entry.name, dir_fd=place)
    return None
