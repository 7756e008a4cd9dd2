from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.driven import drive
from support.store_cases import CELL, EXPERIMENT, VOLATILE, contents, make_provenance, make_record, whole_record

import repro.runs.store
from repro.runs.experiment import Experiment, prepare
from repro.runs.family import Family
from repro.runs.record import SCHEMA_VERSION, RunRecord
from repro.runs.store import Store, StoredRun, StoreError
from repro.systems.dllm.family import DLLM


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "local")


def save(store: Store, record: RunRecord, experiment: Experiment = EXPERIMENT) -> Path:
    return store.save(experiment, record, provenance=make_provenance()).folder


def test_round_trip(store: Store) -> None:
    record = make_record()
    folder = save(store, record)
    assert folder == store.root / CELL.folder_name
    run = store.load(EXPERIMENT)
    assert whole_record(run) == record
    assert run.summary == DLLM.summarize(record)
    assert run.family is DLLM
    assert run.manifest["family"] == "dllm"
    assert run.manifest["code"]["digest"] == EXPERIMENT.code.digest
    assert run.validity.valid
    assert run.manifest["obtained"] == "simulated"
    assert {name: run.provenance[name] for name in make_provenance()} == make_provenance()
    assert run.provenance.keys() - make_provenance().keys() == {"inputs", "manifest", "seal"}
    assert store.find(EXPERIMENT).is_done
    assert store.find(EXPERIMENT).reason == "done: same cell, finished 2025-01-02T03:04:05Z"
    assert [path.name for path in store.root.iterdir()] == [CELL.folder_name]


def test_nothing_stored(store: Store) -> None:
    assert not store.find(EXPERIMENT).is_done
    assert store.find(EXPERIMENT).reason == "no folder"
    with pytest.raises(StoreError, match="no folder"):
        store.load(EXPERIMENT)


def test_an_empty_run_is_stored_and_is_invalid(store: Store) -> None:
    save(store, drive([], 1.0))
    run = store.load(EXPERIMENT)
    assert run.record.num_requests == run.summary["num_steps"] == len(run.table("steps")["step"]) == 0
    assert store.find(EXPERIMENT).reason.endswith("; INVALID: there are no requests")


def test_bytes_do_not_depend_on_when_or_how_it_ran(tmp_path: Path) -> None:
    first, second = Store(tmp_path / "a"), Store(tmp_path / "b")
    one = first.save(EXPERIMENT, make_record(), provenance=make_provenance()).folder
    two = second.save(EXPERIMENT, make_record(), provenance=make_provenance("2026-01-01T00:00:00Z")).folder
    assert contents(one) == contents(two)
    assert set(contents(one)) == {"cell.json", "requests.parquet", "steps.parquet", "summary.json", "manifest.json"}
    assert (one / VOLATILE).read_bytes() != (two / VOLATILE).read_bytes()


def test_a_figure_reuses_another_figures_run(store: Store) -> None:
    asked, drawn, another = (
        prepare(replace(CELL, **change)) for change in ({"figure": "fig3"}, {"figure": "fig4"}, {"seed": 1})
    )
    save(store, make_record(), asked)
    assert store.find(drawn).is_done
    assert store.load(drawn).cell.figure == "fig4"
    assert not store.find(another).is_done


def test_saving_again_replaces(store: Store) -> None:
    save(store, make_record(0.25))
    folder = save(store, make_record(2.0))
    assert whole_record(store.load(EXPERIMENT)) == make_record(2.0)
    assert list(store.root.iterdir()) == [folder]


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


FILES = ("cell.json", "requests.parquet", "steps.parquet", "summary.json", "manifest.json", "provenance.json")


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize(
    "damage", [Path.unlink, lambda path: path.write_bytes(b""), lambda path: path.write_text("[]\n")]
)
def test_a_damaged_folder_is_not_trusted(store: Store, name: str, damage: Callable[[Path], None]) -> None:
    folder = save(store, make_record())
    damage(folder / name)
    assert not store.find(EXPERIMENT).is_done
    assert store.find(EXPERIMENT).reason.startswith("incomplete: ")
    with pytest.raises(StoreError, match="incomplete"):
        store.load(EXPERIMENT)


def reformat(path: Path) -> None:
    path.write_text(json.dumps(json.loads(path.read_text())))


def twice(path: Path) -> None:
    """Its first key is given before, with another value: a reader that takes the last one sees nothing."""
    text = path.read_text()
    path.write_text(text.replace("{", f'{{"{next(iter(json.loads(text)))}": 1,', 1))


@pytest.mark.parametrize("name", FILES[:4])
@pytest.mark.parametrize("damage", [truncate, flip])
def test_one_wrong_bit_in_the_data_is_seen(store: Store, name: str, damage: Callable[[Path], None]) -> None:
    folder = save(store, make_record())
    damage(folder / name)
    assert store.find(EXPERIMENT).reason == f"incomplete: {name} is not as it was written"


DEEP = "[" * 100_000


@pytest.mark.parametrize("name", [name for name in FILES if name.endswith(".json")])
def test_json_nested_too_deeply_is_damage(store: Store, name: str) -> None:
    folder = save(store, make_record())
    (folder / name).write_text(DEEP)
    assert store.find(EXPERIMENT).reason.startswith("incomplete: ")


EDITS: list[tuple[str, dict[str, object]]] = [
    ("manifest.json", {"validity": {"valid": True, "reasons": []}}),
    ("manifest.json", {"obtained": "measured"}),
    ("manifest.json", {"facts": {"obtained": "simulated", "calibration": "h200, fitted"}}),
    ("manifest.json", {"facts": None}),
    ("manifest.json", {"machine": None, "note": "another key"}),
    ("manifest.json", {"files": {}}),
    ("manifest.json", {"files": None}),
    ("provenance.json", {"finished_utc": None}),
    ("provenance.json", {"load": None}),
    ("provenance.json", {"manifest": "0" * 64}),
    ("provenance.json", {"seal": "0" * 64}),
    ("cell.json", {"seed": 1}),
    ("summary.json", {"throughput_tok_s": 1e9}),
]


@pytest.mark.parametrize(("name", "change"), EDITS)
def test_an_edited_value_is_seen(store: Store, name: str, change: dict[str, object]) -> None:
    path = save(store, drive([], 1.0)) / name
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}, indent=2, sort_keys=True) + "\n")
    assert store.find(EXPERIMENT).reason.startswith("incomplete: ")
    with pytest.raises(StoreError, match="incomplete"):
        store.load(EXPERIMENT)


@pytest.mark.parametrize("name", [name for name in FILES if name.endswith(".json")])
@pytest.mark.parametrize("damage", [reformat, twice, truncate])
def test_json_that_says_the_same_in_other_words_is_not_as_it_was_written(
    store: Store, name: str, damage: Callable[[Path], None]
) -> None:
    path = save(store, make_record()) / name
    before = json.loads(path.read_text())
    damage(path)
    assert json.loads(path.read_text()) == before
    assert store.find(EXPERIMENT).reason == f"incomplete: {name} is not as it was written"


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("key", ["machine", "facts", "validity", "code", "finished_utc", "manifest", "seal", "seed"])
def test_a_file_without_a_key(store: Store, name: str, key: str) -> None:
    path = save(store, make_record()) / name
    values = json.loads(path.read_text()) if name.endswith(".json") else {}
    if values.pop(key, path) is path:
        return
    path.write_text(json.dumps(values, indent=2, sort_keys=True) + "\n")
    assert store.find(EXPERIMENT).reason.startswith("incomplete: ")


@pytest.mark.parametrize("name", FILES)
def test_a_file_of_another_run_of_the_cell_is_seen(tmp_path: Path, name: str) -> None:
    """Each is whole by itself."""
    one, other = Store(tmp_path / "one"), Store(tmp_path / "other")
    kept, taken = save(one, make_record(0.25)), save(other, make_record(2.0)) / name
    content = taken.read_bytes()
    is_the_same = content == (kept / name).read_bytes()
    (kept / name).write_bytes(content)
    assert one.find(EXPERIMENT).is_done == is_the_same == (name == "cell.json")


@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_whatever_becomes_of_its_bytes_a_run_is_as_it_was_or_none(store: Store, data: st.DataObject) -> None:
    folder = store.folder(CELL) if store.folder(CELL).exists() else save(store, make_record())
    path = folder / data.draw(st.sampled_from(FILES))
    whole = path.read_bytes()
    start = data.draw(st.integers(0, len(whole)))
    end = data.draw(st.integers(start, min(len(whole), start + 8)))
    broken = whole[:start] + data.draw(st.binary(max_size=8)) + whole[end:]
    path.write_bytes(broken)
    try:
        assert store.find(EXPERIMENT).is_done == (broken == whole)
    finally:
        path.write_bytes(whole)


def test_a_provenance_with_keys_that_json_turns_into_text_can_be_read(store: Store) -> None:
    store.save(EXPERIMENT, make_record(), provenance={**make_provenance(), "dataset": {10: "a", 9: ("b",)}})
    assert store.load(EXPERIMENT).provenance["dataset"] == {"10": "a", "9": ["b"]}


def test_a_root_that_cannot_be_looked_at_holds_no_run(tmp_path: Path) -> None:
    assert (
        Store(tmp_path / ("x" * 300)).find(EXPERIMENT).reason.startswith("incomplete: a file cannot be read (OSError: ")
    )


def test_an_empty_folder_is_not_a_run(store: Store) -> None:
    store.folder(CELL).mkdir(parents=True)
    assert store.find(EXPERIMENT).reason == "incomplete: provenance.json is missing"


def test_a_new_schema_asks_for_a_new_run(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    save(store, make_record())
    monkeypatch.setattr(repro.runs.store, "SCHEMA_VERSION", SCHEMA_VERSION + 1)
    assert not store.find(EXPERIMENT).is_done
    assert store.find(EXPERIMENT).reason == f"schema {SCHEMA_VERSION} -> {SCHEMA_VERSION + 1}"


def test_a_run_moved_under_another_name_is_not_that_cell(store: Store) -> None:
    other = prepare(replace(CELL, seed=1))
    save(store, make_record()).rename(store.folder(other.cell))
    assert store.find(other).reason == f"another cell: the folder holds {CELL.key}, not {other.cell.key}"


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_values_that_are_not_finite_are_refused_and_leave_nothing(store: Store, value: float) -> None:
    record = make_record()
    num_steps = len(record.tables["steps"]["step"])
    with pytest.raises(ValueError, match="forward_s"):
        save(store, record.with_columns("steps", forward_s=[value] * num_steps))
    with pytest.raises(ValueError, match="JSON compliant"):
        save(store, record.with_manifest(note=value))
    assert not store.root.exists()


def test_a_record_must_say_how_it_was_obtained(store: Store) -> None:
    with pytest.raises(ValueError, match="obtained"):
        save(store, replace(make_record(), manifest={}))
    with pytest.raises(ValueError, match="obtained='guessed'"):
        make_record().with_manifest(obtained="guessed")


def test_tables_are_checked_before_anything_is_kept(store: Store) -> None:
    record = make_record()
    with pytest.raises(ValueError, match="'extra' is unknown"):
        save(store, record.with_columns("requests", extra=[0] * 4))
    assert not store.root.exists()


def interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def test_an_interrupt_while_writing_leaves_the_old_run(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save(store, make_record(0.25))
    monkeypatch.setattr(Family, "summarize", interrupt)
    with pytest.raises(KeyboardInterrupt):
        save(store, make_record(2.0))
    assert list(store.root.iterdir()) == [folder]
    assert whole_record(store.load(EXPERIMENT)) == make_record(0.25)


def test_an_interrupt_between_the_renames_leaves_the_old_run(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save(store, make_record(0.25))
    rename = Path.rename

    def interrupted(self: Path, target: Path) -> Path:
        if ".partial-" in self.name:
            raise KeyboardInterrupt
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", interrupted)
    with pytest.raises(KeyboardInterrupt):
        save(store, make_record(2.0))
    assert list(store.root.iterdir()) == [folder]
    assert whole_record(store.load(EXPERIMENT)) == make_record(0.25)


def test_what_a_killed_process_left_half_written_is_no_run(store: Store) -> None:
    folder = save(store, make_record(0.25))
    half = store.root / f".{CELL.folder_name}.partial-1"
    folder.rename(half)
    assert store.find(EXPERIMENT).reason == "no folder"
    save(store, make_record(2.0))
    assert sorted(store.root.iterdir()) == [half, folder]
    assert whole_record(store.load(EXPERIMENT)) == make_record(2.0)


# -- what is read, and when -------------------------------------------------------------------------------


def test_a_run_is_read_when_it_is_asked_for(store: Store) -> None:
    folder = save(store, make_record())
    run = store.load(EXPERIMENT)
    requests = run.record.requests
    for path in folder.iterdir():
        path.unlink()
    # The manifest was read to tell whether the run can be trusted, the record just now; nothing else.
    assert run.validity.valid
    assert run.obtained == "simulated"
    assert run.record.requests is requests == make_record().requests
    with pytest.raises(FileNotFoundError, match=r"summary\.json"):
        run.summary  # noqa: B018
    with pytest.raises(FileNotFoundError, match=r"steps\.parquet"):
        run.table("steps")


def test_what_was_read_is_kept(store: Store) -> None:
    folder = save(store, make_record())
    run = store.load(EXPERIMENT)
    summary, record = run.summary, run.record
    for path in folder.iterdir():
        path.unlink()
    assert run.summary is summary
    assert run.record is record


def test_a_record_has_its_requests_and_leaves_other_tables_where_they_are(store: Store) -> None:
    save(store, make_record())
    run = store.load(EXPERIMENT)
    assert run.record.requests == make_record().requests
    assert run.record.tables["steps"] == {column.name: [] for column in DLLM.columns["steps"]}
    assert run.record.manifest == make_record().manifest
    assert run.table("steps") == make_record().tables["steps"]
    assert run.summary["num_steps"] == len(run.table("steps")["step"]) > 0


def test_a_run_that_was_just_saved_is_the_one_that_is_loaded(store: Store) -> None:
    saved = store.save(EXPERIMENT, make_record(), provenance=make_provenance())
    loaded = store.load(EXPERIMENT)
    assert isinstance(saved, StoredRun)
    assert saved == loaded
    assert (saved.record, saved.summary) == (loaded.record, loaded.summary)


@pytest.mark.parametrize(
    ("facts", "says"),
    [
        ({}, "simulated"),
        ({"calibration": "h200, uncalibrated: datasheet peaks"}, "simulated, uncalibrated"),
        ({"obtained": "measured"}, "measured"),
    ],
)
def test_how_a_run_was_obtained(store: Store, facts: dict[str, object], says: str) -> None:
    save(store, make_record().with_manifest(**facts))
    assert store.load(EXPERIMENT).obtained == says
