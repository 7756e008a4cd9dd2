"""Grids, sides and folders that nobody means: an answer, or one line, and nothing is run."""

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from support.command import refused, repro
from support.hostile import HOSTILE

import repro as toolkit
from engines.errors import UserError
from repro.workbench.grid import Grid

FIELDS = ("system", "dataset", "platform", "executor", "rate", "seed", "knobs", "sytem")
VALUES: tuple[Any, ...] = (
    *HOSTILE,
    *(None, True, -1, 10**30, 1e400),
    *([], [[]], [None, None], {}, {"a": [1]}, {"": 1}, [1, "x", {}]),
)
NO_GRIDS = (
    b"",
    b"\xff\xfe",
    b"a: &a [*a]",
    b"? [1]\n: 2",
    b"- " * 3000,
    b"2025-13-45",
    b"x: !!python/object:os.system 1",
)


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    grid = {"platform": "l40s", "dataset": "livebench", "rate": 1, "knobs": {"num_prompts": 1}}
    toolkit.sweep(grid, repeats=2, result_dir=tmp_path / "runs", jobs=1)
    return tmp_path / "runs"


@pytest.mark.parametrize("field", FIELDS)
def test_a_hostile_grid(field, tmp_path):
    file = tmp_path / "grid.yaml"
    for value in VALUES:
        grid = {"platform": "l40s", "knobs": {"num_prompts": 1}, field: value}
        file.write_text(json.dumps(grid))
        result = repro("sweep", file, "--dry-run", "--result-dir", tmp_path / "runs")
        if result.code != 0:
            refused(result)
        for given in (grid, {**grid, field: [value, value]}):
            with suppress(UserError):
                Grid.from_dict(given).cells()
    assert list(tmp_path.iterdir()) == [file]


def test_what_is_no_grid(tmp_path):
    file = tmp_path / "grid.yaml"
    for content in NO_GRIDS:
        file.write_bytes(content)
        refused(repro("sweep", file, "--result-dir", tmp_path / "runs"))
    for value in HOSTILE:
        if "\0" not in value and value not in ("--", ""):
            refused(repro("sweep", "--result-dir", tmp_path / "runs", "--", value))
    refused(repro("sweep", tmp_path))


def test_hostile_sides(runs, monkeypatch):
    monkeypatch.chdir(runs.parent)
    for value in HOSTILE:
        for text in (
            value,
            f"@{value}",
            f"dllm-serve@{value}=1",
            f"dllm-serve@seed={value}",
            f"runs@{value}",
            f"{value}@seed=0",
        ):
            for sides in ((text, "dllm-serve"), ("dllm-serve", text)):
                result = repro("compare", "--result-dir", runs, "--", *sides)
                if result.code != 0:
                    refused(result)
    for value in HOSTILE:
        result = repro("compare", "@seed=0", "@seed=1", "--result-dir", runs, "--metric", value)
        refused(result)


def test_hostile_folders(runs, monkeypatch):
    monkeypatch.chdir(runs.parent)
    for value in HOSTILE:
        refused(repro("export", "--", value))
    for content in (b"", b"\x1f\x8b", b"x" * 1000):
        (runs / "a.jsonl.gz").write_bytes(content)
        result = repro("export", runs)
        assert (result.code, len(result.out.splitlines()), "left out of" in result.err) == (0, 3, True)
