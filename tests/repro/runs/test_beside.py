"""Runs of one cell by several versions of the code, side by side in a folder."""

from dataclasses import replace
from functools import cached_property
from pathlib import Path

import pytest
from support.fake_system import FakeDeployment, fake_cell
from support.stored_runs import make_provenance, make_record

from repro.runs.code import Code
from repro.runs.experiment import Experiment, prepare
from repro.runs.store import Store, StoreError, pack
from repro.runs.sweep import Sweep
from repro.workbench.folder import folder_of

OWN = prepare(fake_cell(rate=1.0, num_prompts=4, executor="real"))


class Later(Experiment):
    """Of the same cell, by code with another module in it."""

    @cached_property
    def code(self) -> Code:  # type: ignore[override]
        return Code(digest="0123456789ab", modules={**OWN.code.modules, "support.later": "ba9876543210"})


LATER = Later(cell=OWN.cell, deployment=OWN.deployment, workload=OWN.workload)


def put(store: Store, experiment: Experiment, service_s: float = 0.75, finished: str = "2025-01-02T03:04:05Z") -> Path:
    return store.put(pack(experiment, make_record(service_s), make_provenance(finished))).file


@pytest.fixture
def beside(tmp_path: Path) -> Store:
    return Store(tmp_path, beside_other_code=True)


def test_the_first_has_the_cells_file_and_the_other_one_beside_it(beside, tmp_path):
    first, second = put(beside, OWN, 0.75), put(beside, LATER, 0.5)
    name = OWN.cell.folder_name
    assert [file.name for file in (first, second)] == [f"{name}.jsonl.gz", f"{name}.0123456789ab.jsonl.gz"]
    for experiment, file in ((OWN, first), (LATER, second)):
        found = beside.load(experiment)
        assert (found.file, found.code_digest, found.other_code) == (file, experiment.code.digest, ())
    # Who asks for nothing sees what there was: the cell's own file.
    assert Store(tmp_path).load(OWN).file == first
    with pytest.raises(StoreError, match=r"code changed: support\.later"):
        Store(tmp_path).load(LATER)
    assert [run.code_digest for run in folder_of(tmp_path).runs] == [LATER.code.digest, OWN.code.digest]


def test_the_same_code_replaces_its_own(beside, tmp_path):
    for experiment in (OWN, LATER, LATER, OWN):
        put(beside, experiment)
    assert len(list(tmp_path.iterdir())) == 2


def test_without_being_asked_other_code_is_replaced(tmp_path):
    store = Store(tmp_path)
    assert put(store, OWN) == put(store, LATER)
    assert store.load(LATER).code_digest == LATER.code.digest


@pytest.mark.parametrize("content", [b"", b"not gzip"])
def test_a_file_that_holds_no_run_is_replaced(beside, content):
    beside.file(OWN.cell).write_bytes(content)
    assert put(beside, LATER) == beside.file(OWN.cell)


def test_a_run_that_is_missing_is_still_missing(beside):
    put(beside, OWN)
    assert beside.find(LATER).reason == "code changed: support.later"
    assert Sweep([LATER], beside).missing == [LATER.cell]
    put(beside, LATER)
    assert Sweep([LATER], beside).missing == []


def test_what_others_store_meanwhile_is_seen(beside):
    assert beside.written(OWN.cell) is None
    put(beside, OWN)
    before = beside.written(OWN.cell)
    put(beside, LATER)
    assert before is not None
    assert beside.written(OWN.cell) not in (None, before)


def test_a_sweep_makes_it_beside(beside, tmp_path):
    cell = replace(fake_cell(rate=1.0, num_prompts=4), figure=None)
    own = prepare(cell)
    assert isinstance(own.deployment, FakeDeployment)
    later = Later(cell=own.cell, deployment=own.deployment, workload=own.workload)
    for experiment in (own, later):
        Sweep([experiment], beside).run(jobs=1)
    assert {run.code_digest for run in folder_of(tmp_path).runs} == {own.code.digest, later.code.digest}
