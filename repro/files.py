"""Files that are whole or absent, and folders a user names, checked before any work starts."""

from __future__ import annotations

import os
from pathlib import Path
from tempfile import TemporaryFile

from engines.errors import UserError


def replace_text(path: Path, text: str) -> Path:
    """Written under another name, then renamed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.partial-{os.getpid()}")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)
    return path


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
