"""The Python interface: the same runs as the command line's."""

from enum import IntEnum
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.cells import a_cell
from support.refusals import refuses

import repro
from engines.errors import UserError
from repro import api
from repro.runs.cell import Cell
from repro.runs.store import StoreError


def test_a_run_is_made_once_and_found_again(tmp_path):
    first = repro.run("dllm-serve", "burst", platform="l40s", rate=1.0, num_prompts=4, result_dir=tmp_path)
    assert first.validity.valid
    assert first.obtained == "composed"
    again = repro.run("dllm-serve", "burst", platform="l40s", rate=1.0, num_prompts=4, result_dir=tmp_path)
    assert again.file == first.file
    assert again.provenance == first.provenance
    assert repro.load(first.cell, result_dir=str(tmp_path)).summary == first.summary
    with refuses("table='rows'"):
        first.table("rows")


def test_a_sweep_keeps_the_order_of_its_cells(tmp_path):
    cells = [
        a_cell(system, platform="rtx4090", executor="roofline", rate=0.5, num_prompts=2)
        for system in ("sparse-dllm", "dllm-serve")
    ]
    assert [run.cell.system for run in repro.sweep(cells, result_dir=tmp_path, jobs=1)] == ["sparse-dllm", "dllm-serve"]


def test_two_sides_are_compared_by_the_same_call_as_the_command_line():
    assert repro.compare is api.compare
    assert {*repro.__all__} == {"compare", "load", "run", "sweep"}


def test_what_is_not_stored_is_not_loaded(tmp_path):
    cell = a_cell(dataset="burst", platform="l40s", executor="roofline", rate=1.0, num_prompts=2)
    with pytest.raises(StoreError, match="not stored"):
        repro.load(cell, result_dir=tmp_path)
    assert not any(tmp_path.iterdir())


def test_a_name_that_is_unknown_is_refused(tmp_path):
    with refuses("system='fastest'"):
        repro.run("fastest", "burst", result_dir=tmp_path)
    with pytest.raises(AttributeError, match="no attribute 'simulate'"):
        _ = repro.simulate


KNOWN: dict[str, Any] = {"system": "dllm-serve", "dataset": "osc", "platform": "rtx4090", "rate": 0.5, "num_prompts": 2}
CELL = a_cell(platform="rtx4090", executor="roofline", rate=0.5, num_prompts=2)
NO_VALUES = (object(), [], {}, b"x", 10**400, 10**5000, float("nan"), "", "\0", (1,), np.array([1, 2]), Cell, -1)
NUMBERS = {"rate": np.float64(0.5), "seed": np.int64(0), "num_prompts": np.int64(2), "length_scale": np.float32(1)}


@pytest.mark.parametrize("name", [*KNOWN, "executor", "seed", "force", "gen_length", "temperature", "result_dir"])
def test_arguments_of_another_kind_are_refused(name, tmp_path, monkeypatch):
    """One kind of error for all of them, and nothing is written."""
    monkeypatch.chdir(tmp_path)
    for value in (*NO_VALUES, *([] if name in ("rate", "executor") else [None]), *([] if name == "force" else [True])):
        with pytest.raises(UserError):
            repro.run(**{"result_dir": tmp_path / "runs", **KNOWN, name: value})
    assert not any(tmp_path.iterdir())


class Name(str):
    def __str__(self) -> str:
        return "another"


class Number(IntEnum):
    TWO = 2

    def __repr__(self) -> str:
        return "another"


def test_kinds_of_text_and_integer_are_what_they_hold(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    own = repro.run(**KNOWN, result_dir=tmp_path)
    given = {**KNOWN, "system": Name("dllm-serve"), "dataset": Name("osc"), "num_prompts": Number.TWO}
    same = repro.run(**given, result_dir=Name(tmp_path))
    assert same.file == own.file
    assert {type(value) for value in same.cell.to_dict().values()} <= {str, float, int, dict, type(None)}
    assert {type(value) for value in same.cell.knob_values.values()} <= {str, float, int}


OWN_DATA = {
    "dllm-serve": ("osc", "rtx4090", '{"prompt": "%s"}', {"num_prompts": 2}),
    "ampd": ("gaia", "h20x32", '{"rounds": [[%d, 5]]}', {"num_prompts": 2, "rate": 1.0}),
    "laps": ("sharegpt", "h200", '{"rounds": [[%d, 5]]}', {"num_prompts": 2, "rate": 1.0}),
}


@pytest.mark.parametrize("system", OWN_DATA)
def test_a_data_file_is_read_anew_by_every_call(system, tmp_path):
    """In one process: a notebook, say."""
    dataset, platform, line, knobs = OWN_DATA[system]
    file = tmp_path / "data.jsonl"
    lengths = []
    for num in (10, 200):
        file.write_text(line % ("x" * 4 * num if "prompt" in line else num))
        run = repro.run(system, dataset, platform=platform, dataset_path=file, result_dir=tmp_path / "runs", **knobs)
        lengths.append(run.record.requests["prompt_len"])
    assert lengths == [[10, 10], [200, 200]]
    file.write_text("nothing\n")
    with pytest.raises(UserError, match=r"^data\.jsonl"):
        repro.load(run.cell, result_dir=tmp_path / "runs")


@pytest.mark.parametrize("name", ["cells", "jobs", "pool", "address", "force", "result_dir"])
def test_what_is_no_sweep_is_refused(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for value in (*NO_VALUES, *([] if name in ("jobs", "address") else [None])):
        if name == "cells" and isinstance(value, list | dict):
            continue  # no cells
        with pytest.raises(UserError):
            repro.sweep(**{"cells": [CELL], "result_dir": tmp_path / "runs", name: value})
        with pytest.raises(UserError):
            repro.load(value, result_dir=tmp_path / "runs")
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: repro.sweep(CELL), r"cells is one Cell and must be a list of them: write \[cell\]"),
        (lambda: repro.sweep([CELL], jobs="2"), "jobs='2' must be a whole number"),
        (lambda: repro.sweep([CELL], jobs=True), "jobs=True must be a whole number"),
        (lambda: repro.run("llada", "osc", result_dir="\ud800"), "result_dir='\\\\ud800' is no path of a folder"),
        (lambda: Cell.from_dict(None), "cell=None must be a mapping"),
        (lambda: repro.load(None), "cell=None must be a repro.runs.cell.Cell"),
        (lambda: repro.run("llada", "osc", platform=None), "platform=None must be a name"),
        (lambda: repro.run("llada", "osc", rate=10**400), "rate=inf must be a finite number"),
        (lambda: repro.run("llada", "osc", result_dir=""), "result_dir='' is no path of a folder"),
    ],
)
def test_a_sentence_names_the_argument(call, says):
    with pytest.raises(UserError, match=f"^{says}"):
        call()


def test_numbers_of_numpy_are_numbers(tmp_path):
    """The same run as with Python's own."""
    own = repro.run(**{**KNOWN, "length_scale": 1.0}, result_dir=tmp_path)
    assert repro.run(**{**KNOWN, **NUMBERS}, result_dir=tmp_path).file == own.file
    assert Cell(**{**CELL.to_dict(), "knobs": (("dataset_path", Path("a")),)}).knob_values == {"dataset_path": "a"}
