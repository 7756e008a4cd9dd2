"""A folder of runs as it is, and a run as a row of a tidy table."""

import math
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest
from support.fake_system import fake_cell

import repro
from engines.errors import UserError
from repro.runs.experiment import prepare
from repro.runs.store import Store, StoredRun
from repro.runs.sweep import Sweep
from repro.workbench.folder import folder_of, numbers_of
from repro.workbench.frame import frame_of, write_frame


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
