"""Data files that a user names: whether one can be read at all is settled before any work starts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from engines.errors import UserError

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
