"""A folder of runs as it is, and a run as a row of a tidy table."""

import gzip
import math
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest
from support.fake_system import fake_cell
from support.stored_runs import parts

import repro
from engines.errors import UserError
from repro.runs import store
from repro.runs.experiment import prepare
from repro.runs.store import Store, StoredRun, encoded
from repro.runs.sweep import Sweep
from repro.workbench.comparison import folder_of, frame_of, numbers_of, write_frame


@pytest.fixture
def runs(tmp_path: Path) -> list[StoredRun]:
    cells = [
        fake_cell(rate, seed, num_prompts=12, **knobs)
        for rate, knobs in ((0.5, {}), (None, {"service_s": 0.25}))
        for seed in (0, 1)
    ]
    sweep = Sweep(list(map(prepare, cells)), Store(tmp_path))
    sweep.run(jobs=1)
    return sweep.runs


def test_a_row_a_run(runs, tmp_path):
    frame = repro.load(tmp_path).sort_values(["rate", "seed"]).reset_index(drop=True)
    assert len(frame) == 4
    assert list(frame.columns[:9]) == [
        *("run", "system", "dataset", "platform", "executor", "rate", "seed", "num_prompts", "service_s")
    ]
    assert list(frame.columns[9:13]) == ["obtained", "valid", "commit", "code"]
    assert frame["seed"].tolist() == [0, 1, 0, 1]
    assert frame["service_s"].fillna(-1).tolist() == [-1, -1, 0.25, 0.25]
    assert frame["code"].unique().tolist() == [prepare(runs[0].cell.without("basis")).code.digest]
    for run, (_, row) in zip(runs, frame.iterrows(), strict=True):
        assert row["run"] == run.cell.folder_name
        assert (row["obtained"], bool(row["valid"])) == (run.obtained, run.validity.valid)
        for name, value in numbers_of(run).items():
            assert row[name] == value if value is not None else pd.isna(row[name])
        assert row["e2el_s.mean"] == run.summary["e2el_s"]["mean"]
        assert row["num_requests.ok"] == 12
    assert math.isnan(frame["rate"].iloc[-1])
    assert "basis" not in frame


def test_a_knob_named_as_a_metric_has_a_column_of_its_own(runs):
    run = replace(runs[0], cell=replace(runs[0].cell, knobs=(("throughput_tok_s", "mine"), ("seed", 7))))
    frame = frame_of([run])
    assert frame["knob.throughput_tok_s"].tolist() == ["mine"]
    assert frame["throughput_tok_s"].tolist() == [run.summary["throughput_tok_s"]]
    assert (frame["knob.seed"].tolist(), frame["seed"].tolist()) == ([7], [0])


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_what_is_written_is_read_again(kind, runs, tmp_path):
    frame = repro.load(tmp_path).assign(mixed=["a", 1, None, True])
    out = tmp_path / f"runs.{kind}"
    write_frame(frame, kind, out)
    again = pd.read_csv(out) if kind == "csv" else pd.read_parquet(out)
    assert list(again) == list(frame)
    for name in ("run", "seed", "service_s", "throughput_tok_s", "valid"):
        assert again[name].fillna(0).tolist() == frame[name].fillna(0).tolist()
    assert again["mixed"].fillna("-").tolist() == ["a", "1", "-", "True"]
    with pytest.raises(UserError, match="is a folder: give a file in it"):
        write_frame(frame, kind, tmp_path)


def test_what_cannot_be_read_is_left_out_and_said(runs, tmp_path):
    content = bytearray(runs[0].file.read_bytes())
    content[40] ^= 1
    runs[0].file.write_bytes(content)
    (tmp_path / "x.jsonl.gz").write_bytes(b"")
    (tmp_path / ".hidden.jsonl.gz").write_bytes(b"")
    found = folder_of(tmp_path)
    assert len(found.runs) == 3
    assert found.left_out[runs[0].file.name] == "it is not as it was written"
    with pytest.warns(UserWarning, match="left out of .*it is not as it was written.*and 1 more"):
        assert len(repro.load(str(tmp_path))) == 3


def test_a_folder_without_runs_is_refused(tmp_path):
    for where in (tmp_path, tmp_path / "none"):
        with pytest.raises(UserError, match=f"folder='{where}' holds no run: give a folder that runs were made in"):
            repro.load(where)
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="is not a directory"):
        repro.load(tmp_path / "file")


def test_a_copy_is_no_second_run(runs, tmp_path):
    """Whichever of the two comes first by its name, the one that has the run's own counts."""
    for name in ("a copy", "zz"):
        (tmp_path / f"{name}.jsonl.gz").write_bytes(runs[0].file.read_bytes())
    found = folder_of(tmp_path)
    assert [run.file for run in found.runs] == sorted(run.file for run in runs)
    assert {*found.left_out} == {"a copy.jsonl.gz", "zz.jsonl.gz"}
    assert all(runs[0].file.name in why for why in found.left_out.values())


EDITS = {
    "no validity": ("manifest", lambda part: part.pop("validity")),
    "a reason that is none": ("manifest", lambda part: part["validity"].update(reasons=3)),
    "no machine": ("manifest", lambda part: part.pop("machine")),
    "facts that are a list": ("manifest", lambda part: part.update(facts=[])),
    "no git": ("provenance", lambda part: part.pop("git")),
    "no requests": ("manifest", lambda part: part.pop("requests")),
    "code that is text": ("manifest", lambda part: part.update(code="x")),
    "another field of its cell": ("cell", lambda part: part.update(sytem="x")),
    "no system": ("cell", lambda part: part.pop("system")),
    "an empty summary's place": ("summary", None),
    "no cell": ("cell", None),
}


@pytest.mark.parametrize("edit", EDITS)
def test_a_run_that_was_edited_and_sealed_again_is_left_out(edit, runs, tmp_path):
    name, change = EDITS[edit]
    held = parts(runs[0].file)
    if change is None:
        del held[name]
    else:
        change(held[name])
    runs[0].file.write_bytes(encoded(held))
    found = folder_of(tmp_path)
    assert (len(found.runs), [*found.left_out]) == (3, [runs[0].file.name])
    assert len(frame_of(found.runs)) == 3
    assert Store(tmp_path).find(prepare(runs[0].cell.without("basis"))).run is None or name == "cell"


@pytest.mark.parametrize("lines", [b"x", b"{}\n", b"[]\n", b'{"manifest":\n'])
def test_a_file_that_is_sealed_and_no_run_is_left_out(lines, runs, tmp_path):
    runs[0].file.write_bytes((content := gzip.compress(lines)) + store._seal(content))
    assert [*folder_of(tmp_path).left_out] == [runs[0].file.name]
    runs[1].file.write_bytes((cut := content[:-9]) + store._seal(cut))
    assert len(folder_of(tmp_path).left_out) == 2
