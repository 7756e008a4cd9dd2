"""What figures show of made-up runs, as ``shown.csv`` holds its digests: no number, word or look changes by the way.

What is meant to change is stored anew by ``python tests/figures/test_shown.py``, which with the name of a folder writes there all that is
shown, to be compared with what another commit writes.
"""

import csv
import hashlib
import re
import sys
from collections.abc import Sequence
from copy import copy
from functools import cache, lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import pytest

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2])]

from support.figure_runs import figure_runs
from support.stored_runs import FAILED

from paper_figures.common import figure as common
from repro.families.platforms import platform
from repro.reports.figures import FIGURES, View, default_reading, pictures
from repro.runs.store import StoredRun

STORED = Path(__file__).with_name("shown.csv")
COMPARED = [f"dllm-serve/{name}" for name in ("fig3", "fig4", "fig5", "fig7", "fig8", "table4")]
"""Figures that are drawn in every reading of the baselines, and at the accuracy of no cache."""
NUMBER = re.compile(r"-?\d+\.\d+(e-?\d+)?")


def whole(runs: Sequence[StoredRun]) -> Sequence[StoredRun]:
    return runs


def broken(runs: Sequence[StoredRun]) -> Sequence[StoredRun]:
    """Of eleven runs one is missing and one is invalid."""
    kept = [(at, run) for at, run in enumerate(runs) if at % 11 != 5]
    return [invalid(run) if at % 11 == 8 else run for at, run in kept]


def invalid(run: StoredRun) -> StoredRun:
    other = copy(run)
    vars(other)["validity"] = FAILED
    return other


WAYS = {"whole": whole, "broken": broken}
SHOWN = [
    *(
        (name, where, "", "usual", way)
        for name, each in FIGURES.items()
        for where in each.load().platforms
        for way in WAYS
    ),
    *(
        (name, where, reading, "usual", "whole")
        for name in COMPARED
        for where in ("rtx4090", "l40s")
        for reading in ("efficient", "policy")
    ),
    *((name, where, "", "dense", "whole") for name in (*COMPARED, "dllm-serve/tuned") for where in ("rtx4090", "l40s")),
    *((f"laps/{name}", "cpu-tiny", "", "usual", "whole") for name in ("fig1", "fig3", "fig5", "fig6")),
]
"""Figure, platform, reading, accuracy, and what becomes of the runs. The platform's own reading is the empty one."""


@lru_cache(maxsize=1)
def made_up(name: str, where: str, reading: str, accuracy: str) -> tuple[View, Sequence[StoredRun]]:
    """Both ways follow each other."""
    here = platform(where)
    view = View(platform=here, reading=reading or default_reading(here), accuracy=accuracy, num_runs=2)
    return view, figure_runs(FIGURES[name].load(), view)


def shown(name: str, where: str, reading: str, accuracy: str, way: str) -> str:
    view, whole_runs = made_up(name, where, reading, accuracy)
    figure, runs = FIGURES[name].load(), WAYS[way](whole_runs)
    with TemporaryDirectory() as folder, pictures("none"), drawn() as asked:
        rendered = figure.render(runs, view, Path(folder))
        files = [f"{path.name}\n{path.read_text(encoding='utf-8')}" for path in rendered.files]
    panels = [str(panel) for call in asked.call_args_list for panel in call.args[0].panels]
    rows = ["; ".join(row) for row in (rendered.columns, *rendered.rows)]
    return NUMBER.sub(in_short, "\n".join([*files, *panels, *rows, *rendered.notes]))


def in_short(number: re.Match[str]) -> str:
    """Without the last digits, in which processors differ."""
    value = float(number[0])
    return f"{value if abs(value) > 1e-9 else 0.0:.5g}"


def drawn() -> Any:
    """Notes the pictures that are drawn inside the block."""
    return patch.object(common, "drawn_panels", wraps=common.drawn_panels)


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]


@cache
def stored() -> dict[tuple[str, ...], str]:
    with STORED.open(encoding="utf-8", newline="") as file:
        return {tuple(row[:-1]): row[-1] for row in csv.reader(file)}


@pytest.mark.parametrize("view", SHOWN, ids=" ".join)
def test_what_is_shown_changes_only_where_it_is_stored_anew(view):
    assert digest(shown(*view)) == stored()[view]


if __name__ == "__main__":
    found = {view: shown(*view) for view in SHOWN}
    if len(sys.argv) > 1:
        for view, text in found.items():
            Path(sys.argv[1], f"{' '.join(view).replace('/', '-')}.txt").write_text(text, encoding="utf-8")
    else:
        with STORED.open("w", encoding="utf-8", newline="") as file:
            csv.writer(file, lineterminator="\n").writerows((*view, digest(text)) for view, text in found.items())
