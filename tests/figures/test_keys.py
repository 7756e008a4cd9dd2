"""Keys of the cells of every figure, and of prepared cells of every family, as ``keys.csv`` holds them: stored runs are found by them.

Keys that are meant to change are stored anew by ``python tests/figures/test_keys.py``.
"""

import hashlib
import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parents[2]), str(Path(__file__).parents[1])]

from support.cells import a_cell

from repro.families.platforms import platform
from repro.files import csv_text
from repro.reports.figures import FIGURES, View, default_reading
from repro.runs.experiment import prepare

STORED = Path(__file__).with_name("keys.csv")
PREPARED = (
    *(("dllm-serve", "burst", where) for where in ("cpu-tiny", "rtx4090", "h200")),
    ("fast-dllm", "burst", "rtx4090"),
    ("sparse-dllm", "osc", "l40s"),
    *(("ampd", "dureader", where) for where in ("h20x32", "h200x32")),
    ("vllm-sim", "gaia", "h20x32"),
    ("ampd-live", "toolbench", "cpu-tiny"),
    *((system, "lmsys-chat-1m", where) for system in ("laps", "on-time") for where in ("h200", "cpu-tiny")),
    *(("block-diffusion", "burst", where) for where in ("cpu-tiny", "h200-sdar-8b", "h20-llada2-mini")),
)
"""System, data set and platform of cells whose whole key is held, with what is behind their numbers."""


MEASURED = dict.fromkeys(("laps/fig1", "laps/fig5", "laps/fig6"), ("cpu-tiny",))
"""Platforms that a figure is measured on where it is asked for."""


def table() -> str:
    """One row for each figure on each of its platforms: how many cells it has, and a digest of their keys in order."""
    rows = []
    for name, entry in FIGURES.items():
        figure = entry.load()
        for where in map(platform, (*figure.platforms, *MEASURED.get(name, ()))):
            view = View(platform=where, reading=default_reading(where), num_runs=min(3, figure.default_num_runs(where)))
            keys = [view.applied(cell).key for cell in figure.cells(view)]
            digest = hashlib.sha256(" ".join(keys).encode()).hexdigest()[:12]
            rows.append((name, where.name, len(keys), digest))
    for system, dataset, name in PREPARED:
        where = platform(name)
        cell = a_cell(system, dataset=dataset, platform=name, executor=where.executor, num_prompts=60)
        rows.append((system, name, 1, prepare(cell).cell.key))
    return csv_text(("figure", "platform", "cells", "keys"), rows)


def test_the_cells_of_every_figure_have_the_keys_that_they_had() -> None:
    assert table() == STORED.read_text()


if __name__ == "__main__":
    STORED.write_text(table())
