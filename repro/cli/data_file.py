"""Data files that a user names: whether one can be read at all is settled before any work starts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from engines.errors import UserError
from repro.workloads.row import UNREADABLE, bad_line, open_text

MOST_TOKENS = 2**31 - 1
"""Of a round; as of a request in a trace of prompts."""
MOST_SECONDS = 1e9
"""Of a time in a trace, thirty years."""
_MALFORMED = (AttributeError, EOFError, LookupError, OverflowError, RecursionError, TypeError, ValueError)
"""What reading a file of another shape than expected raises."""


@contextmanager
def readable(option: str, path: Path | None) -> Iterator[None]:
    """The body reads the file, if there is one: what its content makes fail is refused with the file's name."""
    if path is None:
        yield
        return
    check_regular(option, path)
    try:
        yield
    except UserError:
        raise
    except _MALFORMED as error:
        raise UserError(
            f"{option}={str(path)!r} has not the format that its name or its card says ({type(error).__name__}: {error}): "
            f"check that it is the whole file, and of that kind"
        ) from error


def check_regular(option: str, path: Path) -> None:
    """Refuse what never ends, or waits for a writer: devices, pipes, sockets. What is not there is the reader's to say."""
    try:
        is_special = path.exists() and not path.is_file() and not path.is_dir()
    except OSError as error:
        raise UserError(f"{option}={str(path)!r} cannot be read ({error.strerror}): check the path") from error
    if is_special:
        raise UserError(f"{option}={str(path)!r} is a device or a pipe: write what it holds into a file, and give that")


def check_sessions(option: str, path: Path, trace: str) -> None:
    """Refuse the numbers in a JSONL of sessions that no session has: beyond their bounds, or not finite."""
    from repro.workloads.sessions import load_session_card

    check_regular(option, path)
    if path.name in {Path(entry.path).name for entry in load_session_card(trace).local}:
        return  # a published file, whose other fields are nobody's business
    try:
        with open_text(path) as file:
            for number, text in enumerate(file, start=1):
                _check_line(path, number, text)
    except UNREADABLE:
        return  # the reader says it


def _check_line(path: Path, number: int, text: str) -> None:
    def whole(digits: str) -> int:
        # Python reads no number of thousands of digits.
        value = int(digits) if len(digits) < 60 else 10**60
        if abs(value) > MOST_TOKENS:
            raise bad_line(path, number, "rounds", value, f"expected numbers of at most {MOST_TOKENS}")
        return value

    def real(digits: str) -> float:
        value = float(digits)
        if not abs(value) <= MOST_SECONDS:
            raise bad_line(path, number, "rounds", value, f"expected finite numbers of at most {MOST_SECONDS:g}")
        return value

    try:
        json.loads(text, parse_int=whole, parse_float=real, parse_constant=real)
    except RecursionError as error:
        raise UserError(f"{path.name} line {number} is nested too deeply to be read: flatten it") from error
    except json.JSONDecodeError:
        return  # the reader says it
