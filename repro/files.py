"""Files that are whole or absent: written under another name, then renamed."""

from __future__ import annotations

import os
from pathlib import Path


def replace_text(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.partial-{os.getpid()}")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)
    return path
