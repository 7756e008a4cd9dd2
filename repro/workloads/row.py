"""One row of a prompt or trace file, and the error that names a bad one."""

from __future__ import annotations

import gzip
import io
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from engines.errors import UserError

UNREADABLE = (UnicodeDecodeError, EOFError, OSError, zlib.error)
"""What reading a file that is not text, or a damaged .gz, raises."""

_SHOWN = 60
_ENCODING = "utf-8-sig"
"""UTF-8, with or without the mark that some editors put in front."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptRow:
    """Exactly one of ``prompt`` and ``prompt_len`` is set (by the parsers).

    ``gen_length`` is what the request asks for; ``response_len`` what the traced service answered,
    which is not the same thing and never sets a request's length.
    """

    prompt: str | None = None
    prompt_len: int | None = None
    arrival_s: float | None = None
    gen_length: int | None = None
    response_len: int | None = None


def bad_line(path: Path, line: int, field: str, value: object, fix: str) -> UserError:
    # Python writes no number of thousands of digits, and none is worth reading.
    is_long = isinstance(value, int) and not -(10**60) < value < 10**60
    shown = "a number of more than 60 digits" if is_long else repr(value)
    if len(shown) > _SHOWN:
        shown = shown[: _SHOWN - 3] + "..."
    return UserError(f"{path.name} line {line}: field {field!r} is {shown}: {fix}")


def open_text(path: Path) -> TextIO:
    """A text file, unpacked if it ends in .gz. A file that is not there is the caller's mistake."""
    if not path.is_file():
        problem = "is a directory: give a file" if path.is_dir() else "does not exist: check the path"
        raise UserError(f"file {str(path)!r} {problem}")
    try:
        if path.suffix == ".gz":
            return io.TextIOWrapper(gzip.open(path, "rb"), encoding=_ENCODING, newline="")
        return path.open(encoding=_ENCODING, newline="")
    except OSError as error:
        raise UserError(f"file {str(path)!r} cannot be read ({error.strerror}): change its permissions") from error
