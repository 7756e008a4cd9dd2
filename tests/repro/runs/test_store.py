from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.driven import drive
from support.store_cases import CELL, VOLATILE, contents, make_provenance, make_record

import repro.runs.store
from repro.paths import REPO
from repro.runs.metrics import summarize
from repro.runs.provenance import GitState, Timing, clean_command, collect, git_state
from repro.runs.record import SCHEMA_VERSION
from repro.runs.store import Store, StoreError


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "local")


def test_round_trip(store: Store) -> None:
    record = make_record()
    folder = store.save(CELL, record, provenance=make_provenance())
    assert folder == store.root / CELL.folder_name
    run = store.load(CELL)
    assert run.record == record
    assert run.summary == summarize(record)
    assert run.validity.valid
    assert run.manifest["obtained"] == "simulated"
    assert run.provenance == make_provenance()
    assert store.is_done(CELL)
    assert store.why(CELL) == "done: same cell, finished 2025-01-02T03:04:05Z"
    assert list(store.cells()) == [CELL]
    assert [path.name for path in store.root.iterdir()] == [CELL.folder_name]


def test_nothing_stored(store: Store) -> None:
    assert not store.is_done(CELL)
    assert store.why(CELL) == "no folder"
    assert list(store.cells()) == []
    with pytest.raises(StoreError, match="no folder"):
        store.load(CELL)


def test_an_empty_run_is_stored_and_is_invalid(store: Store) -> None:
    store.save(CELL, drive([], 1.0), provenance=make_provenance())
    run = store.load(CELL)
    assert run.record.num_requests == run.record.num_steps == 0
    assert store.why(CELL).endswith("; INVALID: there are no requests")


def test_bytes_do_not_depend_on_when_or_how_it_ran(tmp_path: Path) -> None:
    first, second = Store(tmp_path / "a"), Store(tmp_path / "b")
    one = first.save(CELL, make_record(), provenance=make_provenance())
    two = second.save(CELL, make_record(), provenance=make_provenance("2026-01-01T00:00:00Z"))
    assert contents(one) == contents(two)
    assert set(contents(one)) == {"cell.json", "requests.parquet", "steps.parquet", "summary.json", "manifest.json"}
    assert (one / VOLATILE).read_bytes() != (two / VOLATILE).read_bytes()


def test_a_figure_reuses_another_figures_run(store: Store) -> None:
    store.save(replace(CELL, figure="fig3"), make_record(), provenance=make_provenance())
    assert store.is_done(replace(CELL, figure="fig4"))
    assert not store.is_done(replace(CELL, seed=1))


def test_saving_again_replaces(store: Store) -> None:
    store.save(CELL, make_record(0.25), provenance=make_provenance())
    folder = store.save(CELL, make_record(2.0), provenance=make_provenance())
    assert store.load(CELL).record == make_record(2.0)
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
    folder = store.save(CELL, make_record(), provenance=make_provenance())
    damage(folder / name)
    assert not store.is_done(CELL)
    assert store.why(CELL).startswith("incomplete: ")
    assert list(store.cells()) == []
    with pytest.raises(StoreError, match="incomplete"):
        store.load(CELL)


@pytest.mark.parametrize("name", FILES[:4])
@pytest.mark.parametrize("damage", [truncate, flip])
def test_one_wrong_bit_in_the_data_is_seen(store: Store, name: str, damage: Callable[[Path], None]) -> None:
    folder = store.save(CELL, make_record(), provenance=make_provenance())
    damage(folder / name)
    assert store.why(CELL) == f"incomplete: {name} is not as it was written"


DEEP = "[" * 100_000


@pytest.mark.parametrize("name", [name for name in FILES if name.endswith(".json")])
def test_json_nested_too_deeply_is_damage(store: Store, name: str) -> None:
    folder = store.save(CELL, make_record(), provenance=make_provenance())
    (folder / name).write_text(DEEP)
    assert store.why(CELL).startswith("incomplete: ")
    assert list(store.cells()) == []


@pytest.mark.parametrize(
    ("name", "change", "says"),
    [
        ("manifest.json", {"facts": None}, "a file cannot be read (TypeError"),
        ("manifest.json", {"facts": {}}, "a file cannot be read (KeyError: 'obtained')"),
        ("manifest.json", {"facts": {"obtained": "guessed"}}, "manifest.json does not say how the run was obtained"),
        ("provenance.json", {"finished_utc": None}, "provenance.json does not say when the run finished"),
    ],
)
def test_a_file_that_lacks_what_loading_needs(store: Store, name: str, change: dict[str, object], says: str) -> None:
    path = store.save(CELL, make_record(), provenance=make_provenance()) / name
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    assert store.why(CELL).startswith(f"incomplete: {says}")
    with pytest.raises(StoreError, match="incomplete"):
        store.load(CELL)


@pytest.mark.parametrize(("name", "key"), [("manifest.json", "facts"), ("provenance.json", "finished_utc")])
def test_a_file_without_a_key(store: Store, name: str, key: str) -> None:
    path = store.save(CELL, make_record(), provenance=make_provenance()) / name
    values = json.loads(path.read_text())
    del values[key]
    path.write_text(json.dumps(values))
    assert store.why(CELL) == f"incomplete: a file cannot be read (KeyError: '{key}')"


def test_a_root_that_cannot_be_looked_at_holds_no_run(tmp_path: Path) -> None:
    assert Store(tmp_path / ("x" * 300)).why(CELL).startswith("incomplete: a file cannot be read (OSError: ")


def test_an_empty_folder_is_not_a_run(store: Store) -> None:
    store.folder(CELL).mkdir(parents=True)
    assert store.why(CELL) == "incomplete: manifest.json is missing"


def test_a_new_schema_asks_for_a_new_run(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    store.save(CELL, make_record(), provenance=make_provenance())
    monkeypatch.setattr(repro.runs.store, "SCHEMA_VERSION", SCHEMA_VERSION + 1)
    assert not store.is_done(CELL)
    assert store.why(CELL) == f"schema {SCHEMA_VERSION} -> {SCHEMA_VERSION + 1}"


def test_a_run_moved_under_another_name_is_not_that_cell(store: Store) -> None:
    other = replace(CELL, seed=1)
    store.save(CELL, make_record(), provenance=make_provenance()).rename(store.folder(other))
    assert store.why(other) == f"another cell: the folder holds {CELL.key}, not {other.key}"
    assert list(store.cells()) == []


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_values_that_are_not_finite_are_refused_and_leave_nothing(store: Store, value: float) -> None:
    record = make_record()
    table = {**record.steps, "forward_s": [value] * record.num_steps}
    with pytest.raises(ValueError, match="forward_s"):
        store.save(CELL, replace(record, steps=table), provenance=make_provenance())
    with pytest.raises(ValueError, match="JSON compliant"):
        store.save(CELL, record.with_manifest(note=value), provenance=make_provenance())
    assert list(store.root.iterdir()) == []


def test_a_record_must_say_how_it_was_obtained(store: Store) -> None:
    with pytest.raises(ValueError, match="obtained"):
        store.save(CELL, replace(make_record(), manifest={}), provenance=make_provenance())
    with pytest.raises(ValueError, match="obtained='guessed'"):
        make_record().with_manifest(obtained="guessed")


def test_record_tables_are_checked() -> None:
    record = make_record()
    with pytest.raises(ValueError, match="'extra' is unknown"):
        replace(record, requests={**record.requests, "extra": [0] * 4})
    with pytest.raises(ValueError, match="'error' is missing"):
        replace(record, requests={k: v for k, v in record.requests.items() if k != "error"})
    with pytest.raises(ValueError, match="differ in length"):
        replace(record, requests={**record.requests, "error": []})
    with pytest.raises(ValueError, match="'arrival_s' holds a null"):
        replace(record, requests={**record.requests, "arrival_s": [None] * 4})


def interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def test_an_interrupt_while_writing_leaves_the_old_run(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = store.save(CELL, make_record(0.25), provenance=make_provenance())
    monkeypatch.setattr(repro.runs.store, "summarize", interrupt)
    with pytest.raises(KeyboardInterrupt):
        store.save(CELL, make_record(2.0), provenance=make_provenance())
    assert list(store.root.iterdir()) == [folder]
    assert store.load(CELL).record == make_record(0.25)


def test_an_interrupt_between_the_renames_leaves_the_old_run(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = store.save(CELL, make_record(0.25), provenance=make_provenance())
    rename = Path.rename

    def interrupted(self: Path, target: Path) -> Path:
        if ".partial-" in self.name:
            raise KeyboardInterrupt
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", interrupted)
    with pytest.raises(KeyboardInterrupt):
        store.save(CELL, make_record(2.0), provenance=make_provenance())
    assert list(store.root.iterdir()) == [folder]
    assert store.load(CELL).record == make_record(0.25)


def test_leftovers_of_killed_processes(store: Store) -> None:
    folder = store.save(CELL, make_record(), provenance=make_provenance())
    (store.root / f".{CELL.folder_name}.partial-1").mkdir()
    assert list(store.cells()) == [CELL]
    assert store.remove_leftovers() == 1
    assert list(store.root.iterdir()) == [folder]


# -- provenance -------------------------------------------------------------------------------------------


def test_secrets_and_machine_paths_leave_the_command() -> None:
    home = Path.home()
    argv = [
        "/usr/local/bin/repro",
        "bench",
        "--api-key",
        "abc123",
        "--hf-token=xyz",
        "--seed",
        "7",
        "--header",
        "Authorization: Bearer s3cr3t",
        "hf_abcdefgh1234",
        "--max-num-batched-tokens",
        "16384",
        "--base-url",
        "http://alice:pw@host:8000/v1",
        f"--result-dir={REPO}/results/local",
        f"{home}/models/llada",
        "/data/alice/trace.csv",
        "relative/path.yaml",
        f"../..{home}/x",
    ]
    assert clean_command(argv) == [
        "repro",
        "bench",
        "--api-key",
        "***",
        "--hf-token=***",
        "--seed",
        "7",
        "--header",
        "Authorization: ***",
        "***",
        "--max-num-batched-tokens",
        "16384",
        "--base-url",
        "http://***@host:8000/v1",
        "--result-dir=results/local",
        "~/models/llada",
        ".../trace.csv",
        "relative/path.yaml",
        "../..~/x",
    ]


def test_a_secret_flag_without_a_value_does_not_eat_the_next_flag() -> None:
    assert clean_command(["repro", "--token", "--seed", "1"]) == ["repro", "--token", "--seed", "1"]


@given(st.lists(st.text(max_size=30), max_size=6))
def test_any_command_is_accepted(argv: list[str]) -> None:
    assert len(clean_command(argv)) == len(argv)


def test_provenance_names_no_machine_path_and_is_json() -> None:
    provenance = make_provenance()
    text = json.dumps(provenance, allow_nan=False)
    assert str(REPO) not in text
    assert str(Path.home()) + "/" not in text
    assert provenance["obtained"] == "simulated"
    assert provenance["calibration"] is None
    timing = Timing(started_utc="a", finished_utc="b", elapsed_s=0.0)
    assert "calibration" not in collect(obtained="measured", timing=timing, argv=[])


def test_provenance_sees_a_gpu_only_where_torch_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    assert make_provenance()["gpu"] is None
    assert "torch" not in sys.modules


def test_git_state_of_a_folder_inside_another_checkout_is_unknown(tmp_path: Path) -> None:
    assert git_state(tmp_path) == GitState(commit=None, dirty=None)
    assert git_state(REPO / "repro") == GitState(commit=None, dirty=None)


def test_a_run_can_be_loaded_without_its_steps(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.save(CELL, make_record(), provenance=make_provenance())
    whole, light = store.load(CELL), store.load(CELL, with_steps=False)
    assert whole.record.num_steps > 0 == light.record.num_steps
    assert (light.record.requests, light.summary, light.validity) == (
        whole.record.requests,
        whole.summary,
        whole.validity,
    )
