"""The folder of a user's own data files, and what is in one."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from engines.errors import UserError

DATA_DIR_VARIABLE = "REPRO_DATA_DIR"


def find_data_dir(data_dir: Path | None) -> Path | None:
    """The given directory, else the one the environment names, else None."""
    named = str(data_dir) if data_dir is not None else os.environ.get(DATA_DIR_VARIABLE)
    if not named:
        return None
    if not Path(named).is_dir():
        origin = "data_dir" if data_dir is not None else DATA_DIR_VARIABLE
        raise UserError(f"{origin}={named!r} is not a directory: correct or unset it")
    return Path(named)


def file_digest(path: Path) -> str:
    with path.open("rb") as file:
        return "sha256:" + hashlib.file_digest(file, "sha256").hexdigest()
