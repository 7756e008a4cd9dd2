"""Runs stored where pyarrow is missing, read where it is there, and the other way round."""

from __future__ import annotations

import gzip
import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from support.store_cases import CELL, contents, make_provenance, make_record

from repro.runs.record import REQUEST_COLUMNS, STEP_COLUMNS
from repro.runs.store import Store, StoreError

Hide = Callable[[], None]


@pytest.fixture
def hide(monkeypatch: pytest.MonkeyPatch) -> Hide:
    def hidden() -> None:
        for name in [name for name in sys.modules if name == "pyarrow" or name.startswith("pyarrow.")]:
            monkeypatch.delitem(sys.modules, name)
        monkeypatch.setitem(sys.modules, "pyarrow", None)

    return hidden


def test_a_run_of_a_machine_without_pyarrow_is_the_same_run(
    tmp_path: Path, hide: Hide, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual, bare = Store(tmp_path / "usual"), Store(tmp_path / "bare")
    folder = usual.save(CELL, make_record(), provenance=make_provenance())
    with monkeypatch.context() as patched:
        patched.setitem(sys.modules, "pyarrow", None)
        other = bare.save(CELL, make_record(), provenance=make_provenance())
        assert bare.load(CELL).record == make_record()
    assert {path.name for path in other.iterdir()} == {
        "cell.json",
        "requests.json.gz",
        "steps.json.gz",
        "summary.json",
        "manifest.json",
        "provenance.json",
    }
    assert (folder / "summary.json").read_bytes() == (other / "summary.json").read_bytes()
    # Read with pyarrow at hand: the folder says which file it has.
    assert bare.is_done(CELL)
    assert list(bare.cells()) == [CELL]
    whole, here = bare.load(CELL), usual.load(CELL)
    assert (whole.record, whole.summary, whole.validity) == (here.record, here.summary, here.validity)
    assert bare.load(CELL, with_steps=False).record.num_steps == 0


def test_its_bytes_do_not_depend_on_when_it_ran(tmp_path: Path, hide: Hide) -> None:
    hide()
    one = Store(tmp_path / "a").save(CELL, make_record(), provenance=make_provenance())
    two = Store(tmp_path / "b").save(CELL, make_record(), provenance=make_provenance("2026-01-01T00:00:00Z"))
    assert contents(one) == contents(two)


def test_tables_are_lists_by_column(tmp_path: Path, hide: Hide) -> None:
    hide()
    folder = Store(tmp_path).save(CELL, make_record(), provenance=make_provenance())
    for name, columns in (("requests", REQUEST_COLUMNS), ("steps", STEP_COLUMNS)):
        table = json.loads(gzip.decompress((folder / f"{name}.json.gz").read_bytes()))
        assert list(table) == [column.name for column in columns]


@pytest.mark.parametrize("name", ["requests.json.gz", "steps.json.gz"])
def test_damage_is_seen(tmp_path: Path, hide: Hide, name: str) -> None:
    hide()
    store = Store(tmp_path)
    path = store.save(CELL, make_record(), provenance=make_provenance()) / name
    kept = path.read_bytes()
    path.write_bytes(kept[:-1])
    assert store.why(CELL) == f"incomplete: {name} is not as it was written"
    path.unlink()
    assert store.why(CELL).startswith("incomplete: ")


def test_values_that_are_not_finite_are_refused(tmp_path: Path, hide: Hide) -> None:
    hide()
    record = make_record()
    record.steps["duration_s"][0] = float("nan")
    with pytest.raises(ValueError, match="table steps: column 'duration_s' holds a value that is not finite"):
        Store(tmp_path)._write(tmp_path, CELL, record, "simulated", {})


def test_parquet_needs_pyarrow_to_be_read_not_to_be_trusted(tmp_path: Path, hide: Hide) -> None:
    store = Store(tmp_path)
    store.save(CELL, make_record(), provenance=make_provenance())
    hide()
    assert store.is_done(CELL)
    with pytest.raises(StoreError, match=r"requests\.parquet cannot be read without pyarrow: pip install pyarrow"):
        store.load(CELL)


def test_saving_again_with_the_other_format_leaves_one(tmp_path: Path, hide: Hide) -> None:
    store = Store(tmp_path)
    store.save(CELL, make_record(0.25), provenance=make_provenance())
    hide()
    folder = store.save(CELL, make_record(2.0), provenance=make_provenance())
    assert not list(folder.glob("*.parquet"))
    assert store.load(CELL).record == make_record(2.0)
