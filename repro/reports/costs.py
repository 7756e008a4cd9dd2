"""What the command of a figure takes, measured once: by the command that made all of its runs."""

from __future__ import annotations

import json
import os
from pathlib import Path

from repro.files import replace_text
from repro.reports.figures import FigureEntry, View

FOLDER = "costs"


def processor_s() -> float:
    """Processor seconds of this process and of those that it has waited for."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def write_cost(root: Path, entry: FigureEntry, view: View, seconds: float) -> None:
    """``root`` holds the runs."""
    replace_text(_path(root, entry, view), json.dumps({"processor_s": round(seconds, 2)}) + "\n")


def read_cost(root: Path, entry: FigureEntry, view: View) -> float | None:
    try:
        return float(json.loads(_path(root, entry, view).read_text(encoding="utf-8"))["processor_s"])
    except (OSError, ValueError, LookupError, TypeError):
        return None


def _path(root: Path, entry: FigureEntry, view: View) -> Path:
    return root / FOLDER / f"{entry.module}-{view.stem}-{view.num_runs}.json"
