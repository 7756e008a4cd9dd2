"""store"""

import gzip
import json
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args, get_type_hints
from unittest.mock import Mock

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.driven import drive
from support.fake_system import deployed, fake_cell
from support.refusals import refuses
from support.stored_runs import CELL, EXPERIMENT, lines, make_provenance, make_record, parts, whole_record
from support.tables import data_beside

import repro.runs.store
from engines.cluster.record import RoundRow, TaskRow, TransferRow, WorkerRow, rows_of, table_of
from engines.errors import RunError
from engines.laps.cluster import InstanceRow, MoveRow, StepRow
from repro.families.cluster.ampd_record import AR
from repro.families.cluster.laps_record import PREFILL
from repro.families.dllm.record import DLLM
from repro.runs.experiment import Experiment, prepare
from repro.runs.family import Family, plain_table
from repro.runs.record import REQUEST_COLUMNS, SCHEMA_VERSION, Column, RunRecord, empty_table
from repro.runs.store import Damaged, Store, StoredRun, StoreError, encoded, pack, parts_of, read_run

CASES = data_beside(__file__, "cases")


def save(store: Store, record: RunRecord, experiment: Experiment = EXPERIMENT) -> Path:
    return store.put(pack(experiment, record, make_provenance())).file


def test_round_trip(store):
    record = make_record()
    saved = store.put(pack(EXPERIMENT, record, make_provenance()))
    file, run = saved.file, store.load(EXPERIMENT)
    assert file == store.root / f"{CELL.folder_name}.jsonl.gz"
    assert (saved, saved.record, saved.summary) == (run, run.record, run.summary)
    assert whole_record(run) == record
    assert run.summary == DLLM.summarize(record)
    assert run.family is DLLM
    assert (run.num_requests, run.sum_of("gen_length")) == (4, (4, sum(record.requests["gen_length"])))
    assert run.manifest["family"] == "dllm"
    assert run.manifest["code"]["digest"] == EXPERIMENT.code.digest
    assert run.validity.valid
    assert run.manifest["obtained"] == "measured"
    assert {name: run.provenance[name] for name in make_provenance()} == make_provenance()
    assert run.provenance.keys() == make_provenance().keys()
    assert store.find(EXPERIMENT).run is not None
    assert store.find(EXPERIMENT).reason == "done: same cell, finished 2025-01-02T03:04:05Z"
    assert list(store.root.iterdir()) == [file]


def test_its_file_is_lines_of_json_that_any_tool_reads(store):
    path = save(store, make_record())
    lines = [json.loads(line) for line in gzip.decompress(path.read_bytes()).splitlines()]
    names = ["cell", "manifest", "summary", "requests", "steps", "blocks", "provenance", "seal"]
    assert [list(line) for line in lines] == [[name] for name in names]
    assert lines[0]["cell"] == CELL.to_dict()
    assert list(lines[3]["requests"]) == sorted(column.name for column in DLLM.columns["requests"])


def test_nothing_stored(store):
    assert store.find(EXPERIMENT).run is None
    assert store.find(EXPERIMENT).reason == "not stored"
    with pytest.raises(StoreError, match="not stored"):
        store.load(EXPERIMENT)


def test_an_empty_run_is_stored_and_is_invalid(store):
    save(store, drive([], 1.0).with_manifest(obtained="measured"))
    run = store.load(EXPERIMENT)
    assert (
        run.num_requests
        == len(run.record.requests["request_id"])
        == run.summary["num_steps"]
        == len(run.table("steps")["step"])
        == 0
    )
    assert store.find(EXPERIMENT).reason.endswith("; INVALID: there are no requests")


def test_lines_do_not_depend_on_when_or_how_it_ran(tmp_path):
    first, second = Store(tmp_path / "a"), Store(tmp_path / "b")
    one = first.put(pack(EXPERIMENT, make_record(), make_provenance())).file
    two = second.put(pack(EXPERIMENT, make_record(), make_provenance("2026-01-01T00:00:00Z"))).file
    assert lines(one) == lines(two)
    assert one.read_bytes() != two.read_bytes()


def test_a_figure_reuses_another_figures_run(store):
    asked, drawn, another = (
        prepare(replace(CELL, **change)) for change in ({"figure": "fig3"}, {"figure": "fig4"}, {"seed": 1})
    )
    save(store, make_record(), asked)
    assert store.find(drawn).run is not None
    assert store.load(drawn).cell.figure == "fig4"
    assert store.find(another).run is None


def test_saving_again_replaces(store):
    save(store, make_record(0.25))
    file = save(store, make_record(2.0))
    assert whole_record(store.load(EXPERIMENT)) == make_record(2.0)
    assert list(store.root.iterdir()) == [file]


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: path.write_bytes(gzip.compress(gzip.decompress(path.read_bytes()))),
        lambda path: path.write_bytes(b""),
        lambda path: path.write_bytes(path.read_bytes() + b"\0"),
        lambda path: path.write_bytes(gzip.decompress(path.read_bytes())),
        lambda path: path.write_text("[" * 100_000),
    ],
)
def test_a_damaged_file_is_not_trusted(store, damage):
    damage(save(store, make_record()))
    assert store.find(EXPERIMENT).reason == "incomplete: it is not as it was written"
    with pytest.raises(StoreError, match="incomplete"):
        store.load(EXPERIMENT)


@pytest.mark.parametrize("change", [Path.mkdir, os.mkfifo, lambda path: path.symlink_to("elsewhere")])
def test_what_is_no_plain_file_is_no_run(store, change):
    path = save(store, make_record())
    path.rename(path.with_name("elsewhere"))
    change(path)
    assert store.find(EXPERIMENT).reason == "incomplete: it is no plain file"


def test_a_folder_in_the_place_of_a_run_is_said(store):
    path = save(store, make_record())
    path.unlink()
    path.mkdir()
    with pytest.raises(
        RunError, match=r"\.jsonl\.gz could not be stored in .*: make room, or give another --result-dir"
    ):
        save(store, make_record())


@pytest.mark.parametrize("name", ["manifest", "provenance"])
@pytest.mark.parametrize("key", ["schema_version", "key", "machine", "validity", "code", "finished_utc", "facts"])
def test_a_part_without_a_key(store, name, key):
    """As another version may have written and sealed it."""
    path = save(store, make_record())
    whole = parts(path)
    if whole[name].pop(key, path) is path:
        return
    path.write_bytes(encoded(whole))
    found = store.find(EXPERIMENT)
    # A run that other code takes as its own says nothing of what it does not need.
    assert found.reason.startswith(("incomplete: ", "another machine: ")) or key == "facts"


@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_whatever_becomes_of_its_bytes_a_run_is_as_it_was_or_none(store, data):
    path = store.file(CELL) if store.file(CELL).exists() else save(store, make_record())
    whole = path.read_bytes()
    start = data.draw(st.integers(0, len(whole)))
    end = data.draw(st.integers(start, min(len(whole), start + 8)))
    broken = whole[:start] + data.draw(st.binary(max_size=8)) + whole[end:]
    path.write_bytes(broken)
    try:
        assert (store.find(EXPERIMENT).run is not None) == (broken == whole)
    finally:
        path.write_bytes(whole)


def test_every_byte_counts(store):
    path = save(store, drive([0.0], 1.0))
    whole = path.read_bytes()
    for place in range(len(whole)):
        for bit in (1, 128):
            with pytest.raises(Damaged):
                parts_of(whole[:place] + bytes([whole[place] ^ bit]) + whole[place + 1 :])
    path.write_bytes(whole[:-1])
    assert store.find(EXPERIMENT).reason == "incomplete: it is not as it was written"


def test_a_provenance_with_keys_that_json_turns_into_text_can_be_read(store):
    store.put(pack(EXPERIMENT, make_record(), {**make_provenance(), "dataset": {10: "a", 9: ("b",)}}))
    assert store.load(EXPERIMENT).provenance["dataset"] == {"10": "a", "9": ["b"]}


def test_a_root_that_cannot_be_looked_at_holds_no_run(tmp_path):
    assert Store(tmp_path / ("x" * 300)).find(EXPERIMENT).reason.startswith("incomplete: it cannot be read (OSError: ")


SCHEMA_8 = Path(__file__).with_name("schema8")


@pytest.mark.parametrize(
    ("name", "obtained", "e2el_s"), data_beside(__file__, "store")["runs_that_are_stored_today_stay_readable"]
)
def test_runs_that_are_stored_today_stay_readable(name, obtained, e2el_s):
    """Files of the first commit of schema 8 whose provenance names inputs and whose code is listed by modules."""
    (file,) = SCHEMA_8.glob(f"*_{name}.jsonl.gz")
    run = read_run(file)
    assert (run.manifest["obtained"], run.validity.valid, run.cell.key) == (obtained, True, name[-12:])
    assert run.summary["e2el_s"]["mean"] == e2el_s
    if obtained == "measured":
        assert len(run.table("requests")["request_id"]) == run.num_requests == 2
    state = Store(SCHEMA_8, accept_other_code=True, accept_other_machine=True).find(prepare(run.cell.without("basis")))
    assert state.run is not None
    assert "other code" in state.reason


def test_a_new_schema_asks_for_a_new_run(store, monkeypatch):
    save(store, make_record())
    monkeypatch.setattr(repro.runs.store, "SCHEMA_VERSION", SCHEMA_VERSION + 1)
    assert store.find(EXPERIMENT).run is None
    assert store.find(EXPERIMENT).reason == f"schema {SCHEMA_VERSION} -> {SCHEMA_VERSION + 1}"


def test_a_run_moved_under_another_name_is_not_that_cell(store):
    other = prepare(replace(CELL, seed=1))
    save(store, make_record()).rename(store.file(other.cell))
    assert store.find(other).reason == f"another cell: the file holds {CELL.key}, not {other.cell.key}"


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_values_that_are_not_finite_are_refused_and_leave_nothing(store, value):
    record = make_record()
    num_steps = len(record.tables["steps"]["step"])
    with pytest.raises(ValueError, match="forward_s"):
        save(store, record.with_columns("steps", forward_s=[value] * num_steps))
    with pytest.raises(ValueError, match="JSON compliant"):
        save(store, record.with_manifest(note=value))
    assert not store.root.exists()


def test_a_record_must_say_how_it_was_obtained(store):
    with pytest.raises(ValueError, match="obtained"):
        save(store, replace(make_record(), manifest={}))
    with refuses("obtained='guessed'", ValueError):
        make_record().with_manifest(obtained="guessed")


def test_tables_are_checked_before_anything_is_kept(store):
    record = make_record()
    with pytest.raises(ValueError, match="'extra' is unknown"):
        save(store, record.with_columns("requests", extra=[0] * 4))
    assert not store.root.exists()


@pytest.mark.parametrize("where", [(Family, "summarize"), (Path, "write_bytes"), (Path, "replace")])
def test_an_interrupt_while_writing_leaves_the_old_run(store, monkeypatch, where):
    file = save(store, make_record(0.25))
    with monkeypatch.context() as patched:
        patched.setattr(*where, Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            save(store, make_record(2.0))
    assert list(store.root.iterdir()) == [file]
    assert whole_record(store.load(EXPERIMENT)) == make_record(0.25)


def test_what_a_killed_process_left_half_written_is_no_run(store):
    file = save(store, make_record(0.25))
    dead, alive = (store.root / f".{file.name}.partial-{pid}" for pid in (2, 3))
    file.rename(dead)
    alive.write_bytes(b"")
    an_hour_ago = time.time() - 3601
    os.utime(dead, (an_hour_ago, an_hour_ago))
    assert store.find(EXPERIMENT).reason == "not stored"
    store.clear_leftovers()
    save(store, make_record(2.0))
    assert sorted(store.root.iterdir()) == [alive, file]
    assert whole_record(store.load(EXPERIMENT)) == make_record(2.0)


# -- what is read, and when -------------------------------------------------------------------------------


def test_what_is_read_is_what_was_found_to_be_whole(store):
    file = save(store, make_record())
    run = store.load(EXPERIMENT)
    file.unlink()
    assert run.obtained == "measured"
    assert run.summary is run.summary
    assert run.record is run.record
    assert whole_record(run) == make_record()


def test_a_file_is_unpacked_once_for_its_lookup_and_its_numbers(store, monkeypatch):
    file = save(store, make_record())
    unpacked = []
    parts_of = repro.runs.store.parts_of
    monkeypatch.setattr(repro.runs.store, "parts_of", lambda content: unpacked.append(1) or parts_of(content))
    looked_up, read = store.load(EXPERIMENT), read_run(file)
    assert looked_up.summary == read.summary == parts(file)["summary"]
    assert len(unpacked) == 2


# -- tables of simulated runs -----------------------------------------------------------------------------

SIMULATED = prepare(fake_cell(rate=1.0, num_prompts=4))


def simulated(store: Store, experiment: Experiment = SIMULATED) -> StoredRun:
    store.put(pack(experiment, experiment.run(), make_provenance()))
    return store.load(experiment)


def test_a_simulated_run_keeps_its_numbers_and_makes_its_tables_again(store, monkeypatch):
    run, made = simulated(store), []
    assert list(parts(run.file)) == ["cell", "manifest", "summary", "provenance"]
    once = Experiment.run
    monkeypatch.setattr(Experiment, "run", lambda self: made.append(self.cell) or once(self))
    assert (run.num_requests, run.sum_of("gen_length")[0], run.record.obtained) == (4, 4, "simulated")
    assert made == []
    expected = once(SIMULATED)
    assert run.table("steps") == expected.tables["steps"]
    assert run.record.requests == expected.requests
    assert whole_record(run) == expected
    assert made == [SIMULATED.cell]


def test_tables_of_numbers_that_are_no_longer_made_are_refused(store):
    later = deployed(SIMULATED, after=lambda record: record.with_columns("requests", output_len=[1] * 4))
    run = simulated(store, later)
    with pytest.raises(StoreError, match=r"its numbers were made of other data: make it anew with --force"):
        run.table("steps")
    by_other_code = replace(run, other_code=("engines.errors",))
    with pytest.raises(StoreError, match=r"its numbers were made by other code, engines\.errors: make it anew"):
        by_other_code.record.requests  # noqa: B018


def test_tables_of_a_workload_that_is_gone_are_refused(store):
    run = replace(simulated(store), cell=replace(SIMULATED.cell, seed=2))
    with pytest.raises(StoreError, match="its numbers were made of other data"):
        run.table("steps")


@pytest.mark.parametrize(("facts", "says"), CASES["obtained"])
def test_how_a_run_was_obtained(store, facts, says):
    save(store, make_record().with_manifest(**facts))
    assert store.load(EXPERIMENT).obtained == says


# -- tables as they are stored ----------------------------------------------------------------------------

KINDS: dict[str, st.SearchStrategy[Any]] = {
    "int": st.integers() | st.integers(-(2**63), 2**63 - 1).map(np.int64),
    "float": st.floats(allow_nan=False, allow_infinity=False) | st.floats(-1, 1).map(np.float64) | st.integers(-9, 9),
    "str": st.text(max_size=5),
    "bool": st.booleans() | st.booleans().map(np.bool_),
}


def column(kind: Any) -> list[Column]:
    return [Column(name="c", kind=kind, nullable=True, meaning="")]


@pytest.mark.parametrize("kind", KINDS)
@given(st.data())
def test_values_come_back_as_they_went(kind, data):
    values = data.draw(st.lists(st.none() | KINDS[kind], max_size=20))
    plain = plain_table("t", {"c": values}, column(kind))
    assert json.loads(json.dumps(plain)) == plain == {"c": values}
    of_kind = {"int": int, "float": float, "str": str, "bool": bool}[kind]
    assert {type(value) for value in plain["c"] if value is not None} <= {of_kind}


@pytest.mark.parametrize(
    ("kind", "value"), [("int", 1.5), ("int", "1"), ("bool", 1), ("float", "1"), ("str", 1), ("float", 1j)]
)
def test_a_value_of_another_kind_is_not_stored_as_one_like_it(kind, value):
    with pytest.raises(TypeError, match=f"table t: column 'c' holds a value that is no {kind}"):
        plain_table("t", {"c": [value]}, column(kind))


@pytest.mark.parametrize(
    ("values", "is_finite"), [([1e308, 1e308], True), ([None, 1.0], True), ([1.0, float("inf")], False)]
)
def test_numbers_are_finite(values, is_finite):
    family = Family(name="any", tables={"t": tuple(column("float"))})
    record = RunRecord(tables={"requests": empty_table(REQUEST_COLUMNS), "t": {"c": values}})
    if is_finite:
        family.check_tables(record)
    else:
        with pytest.raises(ValueError, match="table t: column 'c' holds a value that is not finite"):
            family.check_tables(record)


ROWS = (
    *((AR, "rounds", RoundRow), (AR, "tasks", TaskRow), (AR, "transfers", TransferRow), (AR, "workers", WorkerRow)),
    *((PREFILL, "steps", StepRow), (PREFILL, "moves", MoveRow), (PREFILL, "instances", InstanceRow)),
)


@pytest.mark.parametrize(("family", "table", "row"), ROWS, ids=lambda each: getattr(each, "__name__", None))
def test_columns_are_the_fields_of_the_rows_of_a_table(family, table, row):
    """Rounds have gaps besides, which come from the log of tokens."""
    columns = [each for each in family.tables[table] if not each.name.startswith("itl_")]
    hints = get_type_hints(row)
    assert [each.name for each in columns] == list(hints)
    for each in columns:
        hint = hints[each.name]
        kind = next(kind for kind in (*get_args(hint), hint) if kind is not type(None))
        assert each.kind == (kind.__name__ if isinstance(kind, type) else "str")
        assert each.nullable == (type(None) in get_args(hint))
        assert each.meaning


def test_a_table_is_its_rows_turned():
    rows = [WorkerRow(3, "decode", 8, 0), WorkerRow(4, "prefill", 1, 2, num_prefills=7)]
    table = table_of(WorkerRow, rows)
    assert (table["worker_id"], table["num_prefills"], table["kv_peak"]) == ([3, 4], [0, 7], [None, None])
    assert list(rows_of(table, "role", "server")) == [("decode", 0), ("prefill", 2)]
    assert table_of(WorkerRow, []) == empty_table(AR.tables["workers"])
