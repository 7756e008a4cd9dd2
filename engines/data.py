"""Opens the files that a user names: regular files alone, of a size that can be read, and every failure is one sentence.

JSON that people and servers write: a key that is given twice is refused, as nobody can tell which value was meant.
"""

from __future__ import annotations

import errno
import io
import json
import os
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from engines.errors import UserError, require

_LONGEST_KEY = 60


class RepeatedKeyError(json.JSONDecodeError):
    """``msg`` names the key; where in the text it stands is not known."""

    def __str__(self) -> str:
        return self.msg


def unique(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """For ``object_pairs_hook``."""
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            shown = key if len(key) <= _LONGEST_KEY else f"{key[: _LONGEST_KEY - 3]}..."
            raise RepeatedKeyError(f"the key {shown!r} is given twice", "", 0)
        found[key] = value
    return found


DECODER = json.JSONDecoder(object_pairs_hook=unique)


def json_object(name: str, text: str, *, example: str) -> dict[str, Any]:
    """The object that a setting's text is; refused by the setting's name where it is none."""
    try:
        found = json.loads(text, object_pairs_hook=unique)
        json.dumps(found, allow_nan=False)
    except RepeatedKeyError as error:
        raise UserError(f"{name}={text!r}: {error}: keep one") from None
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise UserError(f"{name}={text!r} is no JSON object: write it like '{example}'")
    return found


MOST_BYTES = 64 << 30
"""The most that a file has which is read piece by piece."""
MOST_HELD_BYTES = 256 << 20
"""The most that a file has which is held in memory as a whole."""


def open_file(name: str, path: Path, *, most: int = MOST_BYTES) -> io.BufferedReader:
    """Opens a file to read its bytes. ``name`` is what the user named it by, an option or a kind of file.

    Raises UserError for what is absent, a folder, a device, a pipe or a socket, larger than ``most`` bytes, or unreadable.
    """
    said = _said(name, path)
    try:
        # What is no file is refused before it is opened, as that may wait for a writer, or take what a reader waits for.
        _check(os.stat(path), said, most)
        number = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except UserError:
        raise
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG):
            why = "" if error.errno == errno.ENOENT else f" ({error.strerror})"
            raise UserError(f"{said} does not exist{why}: check the path") from None
        raise UserError(f"{said} cannot be read ({error.strerror}): check the path and its permissions") from error
    except ValueError as error:
        raise UserError(f"{said} is no path ({error}): check it") from None
    try:
        _check(os.fstat(number), said, most)
    except BaseException:
        os.close(number)
        raise
    return os.fdopen(number, "rb")


def _check(status: os.stat_result, said: str, most: int) -> None:
    require(not stat.S_ISDIR(status.st_mode), f"{said} is a directory: give a file")
    require(
        stat.S_ISREG(status.st_mode), f"{said} is a device or a pipe: write what it holds into a file, and give that"
    )
    require(
        status.st_size <= most,
        f"{said} has {status.st_size:,} bytes, and {most:,} are the most that are read: give a smaller file",
    )


def read_bytes(name: str, path: Path, *, most: int = MOST_HELD_BYTES) -> bytes:
    """Reads a whole file, as ``open_file`` opens it."""
    with open_file(name, path, most=most) as file:
        try:
            return file.read()
        except OSError as error:
            raise UserError(f"{_said(name, path)} cannot be read ({error.strerror}): get the file again") from error


def read_text(name: str, path: Path, *, most: int = MOST_HELD_BYTES) -> str:
    """Reads a file of UTF-8 text, with or without the mark that some editors put in front. Line ends are as in any text file."""
    content = read_bytes(name, path, most=most)
    try:
        return io.TextIOWrapper(io.BytesIO(content), encoding="utf-8-sig").read()
    except UnicodeDecodeError as error:
        raise UserError(f"{_said(name, path)} is not UTF-8 text ({error.reason}): convert it") from error


def _said(name: str, path: Path) -> str:
    return f"file {str(path)!r}" if name == "file" else f"{name}={str(path)!r}"
