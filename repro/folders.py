"""Folders a user names, checked before any work starts."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryFile

from engines.errors import UserError


def readable_folder(name: str, path: Path) -> Path:
    """May be absent: it holds nothing then."""
    try:
        list(path.iterdir())
    except FileNotFoundError:
        pass
    except OSError as error:
        raise _refusal(name, path, "read", error) from None
    return path


def writable_folder(name: str, path: Path) -> Path:
    """Created where it is absent."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        # Mode bits do not tell: a file system may be read-only, or one like /proc.
        with TemporaryFile(dir=path):
            pass
    except OSError as error:
        raise _refusal(name, path, "written", error) from None
    return path


def _refusal(name: str, path: Path, use: str, error: OSError) -> UserError:
    is_file = isinstance(error, FileExistsError | NotADirectoryError)
    problem = "is not a directory" if is_file else f"cannot be {use} ({error.strerror})"
    return UserError(f"{name}={str(path)!r} {problem}: give a folder that can be {use}")
