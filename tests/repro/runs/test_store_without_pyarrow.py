"""Runs stored where pyarrow is missing, read where it is there, and the other way round."""

from __future__ import annotations

import gzip
import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from support.store_cases import EXPERIMENT, contents, make_provenance, make_record, whole_record

from repro.runs.record import RunRecord
from repro.runs.store import Store
from repro.systems.dllm.family import DLLM

Hide = Callable[[], None]


@pytest.fixture
def hide(monkeypatch: pytest.MonkeyPatch) -> Hide:
    def hidden() -> None:
        for name in [name for name in sys.modules if name == "pyarrow" or name.startswith("pyarrow.")]:
            monkeypatch.delitem(sys.modules, name)
        monkeypatch.setitem(sys.modules, "pyarrow", None)

    return hidden


def save(store: Store, record: RunRecord | None = None, finished: str = "2025-01-02T03:04:05Z") -> Path:
    return store.save(EXPERIMENT, record or make_record(), provenance=make_provenance(finished)).folder


def test_a_run_of_a_machine_without_pyarrow_is_the_same_run(
    tmp_path: Path, hide: Hide, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual, bare = Store(tmp_path / "usual"), Store(tmp_path / "bare")
    folder = save(usual)
    with monkeypatch.context() as patched:
        patched.setitem(sys.modules, "pyarrow", None)
        other = save(bare)
        assert whole_record(bare.load(EXPERIMENT)) == make_record()
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
    assert bare.find(EXPERIMENT).is_done
    whole, here = bare.load(EXPERIMENT), usual.load(EXPERIMENT)
    assert whole_record(whole) == whole_record(here)
    assert (whole.record, whole.summary, whole.validity) == (here.record, here.summary, here.validity)


def test_its_bytes_do_not_depend_on_when_it_ran(tmp_path: Path, hide: Hide) -> None:
    hide()
    one = save(Store(tmp_path / "a"))
    two = save(Store(tmp_path / "b"), finished="2026-01-01T00:00:00Z")
    assert contents(one) == contents(two)


def test_tables_are_lists_by_column(tmp_path: Path, hide: Hide) -> None:
    hide()
    folder = save(Store(tmp_path))
    for name, columns in DLLM.columns.items():
        table = json.loads(gzip.decompress((folder / f"{name}.json.gz").read_bytes()))
        assert list(table) == [column.name for column in columns]


@pytest.mark.parametrize("name", ["requests.json.gz", "steps.json.gz"])
def test_damage_is_seen(tmp_path: Path, hide: Hide, name: str) -> None:
    hide()
    store = Store(tmp_path)
    path = save(store) / name
    kept = path.read_bytes()
    path.write_bytes(kept[:-1])
    assert store.find(EXPERIMENT).reason == f"incomplete: {name} is not as it was written"
    path.unlink()
    assert store.find(EXPERIMENT).reason.startswith("incomplete: ")


def test_values_that_are_not_finite_are_refused(tmp_path: Path, hide: Hide) -> None:
    hide()
    record = make_record()
    record.tables["steps"]["duration_s"][0] = float("nan")
    with pytest.raises(ValueError, match="table steps: column 'duration_s' holds a value that is not finite"):
        Store(tmp_path / "runs").save(EXPERIMENT, record, provenance=make_provenance())
    assert not (tmp_path / "runs").exists()


def test_parquet_needs_pyarrow_to_be_read_not_to_be_trusted(tmp_path: Path, hide: Hide) -> None:
    store = Store(tmp_path)
    save(store)
    hide()
    assert store.find(EXPERIMENT).is_done
    with pytest.raises(OSError, match=r"requests\.parquet cannot be read without pyarrow: pip install pyarrow"):
        store.load(EXPERIMENT).record  # noqa: B018


def test_saving_again_with_the_other_format_leaves_one(tmp_path: Path, hide: Hide) -> None:
    store = Store(tmp_path)
    save(store, make_record(0.25))
    hide()
    folder = save(store, make_record(2.0))
    assert not list(folder.glob("*.parquet"))
    assert whole_record(store.load(EXPERIMENT)) == make_record(2.0)
