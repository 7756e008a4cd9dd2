"""A file of any source read as one table, and what of it is served when."""

import bz2
import csv
import gc
import gzip
import json
import lzma
import sys
import zipfile
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.tables import data_beside

from engines.dllm.config import GenerationConfig
from engines.errors import UserError
from repro.files import csv_text
from repro.workloads import table as table_module
from repro.workloads.draws import ArrivalConfig
from repro.workloads.knobs import TraceKnobs, named_after
from repro.workloads.rounds import PlainSessions, TraceFile
from repro.workloads.served import take_from, trace_source
from repro.workloads.table import read_trace
from repro.workloads.workload import generation_of_length, traced_workload

REFUSED = data_beside(__file__, "refused")

TRACE = ArrivalConfig(kind="trace")
ROWS = [(3.0, 374, 44), (4.25, 396, 109), (4.25, 879, 55), (10.0, 91, 16)]
"""Seconds, tokens of the prompt and of the answer; two come at once."""
MINE = "arrival_s=when,prompt_len=in,gen_length=out"


def write(path: Path, text: str) -> TraceFile:
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return TraceFile(where=str(path))


def json_lines(*names: str, rows: list[tuple] = ROWS) -> str:
    return "".join(json.dumps(dict(zip(names, row, strict=True))) + "\n" for row in rows)


def told(file: TraceFile) -> list[tuple]:
    sessions = (
        read_trace.__wrapped__(file).sessions if hasattr(read_trace, "__wrapped__") else read_trace(file).sessions
    )
    assert all(len(each.rounds) == 1 for each in sessions)
    return [(each.arrival_s, each.rounds[0].prefill_tokens, each.rounds[0].decode_tokens) for each in sessions]


def refusal(file: TraceFile) -> str:
    with pytest.raises(UserError) as caught:
        read_trace(file)
    return str(caught.value)


# ---- one table, whatever the form -------------------------------------------------------------------------


def test_the_same_rows_in_every_form(tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet")
    import pyarrow

    names = ("when", "in", "out")
    lines = json_lines(*names)
    forms = {
        "a.csv": csv_text(("when", "in", "out"), ROWS),
        "a.csv.gz": csv_text(("when", "in", "out"), ROWS),
        "a.jsonl": lines,
        "a.jsonl.gz": lines,
        "a.json": f"[{','.join(lines.splitlines())}]",
    }
    for name, text in forms.items():
        assert told(TraceFile(where=write(tmp_path / name, text).where, columns=MINE)) == ROWS, name
    columns = dict(zip(names, map(list, zip(*ROWS, strict=True)), strict=True))
    parquet.write_table(pyarrow.table(columns), tmp_path / "a.parquet")
    assert told(TraceFile(where=str(tmp_path / "a.parquet"), columns=MINE)) == ROWS
    for name in ("a.csv.gz", "a.jsonl.gz", "a.parquet"):
        copy = tmp_path / f"{name}.bin"
        copy.write_bytes((tmp_path / name).read_bytes())
        assert told(TraceFile(where=str(copy), columns=MINE)) == ROWS, name
    moments = [datetime(2024, 5, 10, tzinfo=UTC) + timedelta(seconds=row[0]) for row in ROWS]
    parquet.write_table(pyarrow.table({**columns, "when": moments}), tmp_path / "b.parquet")
    found = told(TraceFile(where=str(tmp_path / "b.parquet"), columns=MINE))
    assert [row[0] - found[0][0] for row in found] == [row[0] - 3.0 for row in ROWS]


@pytest.mark.parametrize("kind", ["zip", "bzip2", "xz", "zstd"])
def test_other_packings_than_gzip_are_named(kind, tmp_path):
    path, text = tmp_path / "a.csv", csv_text(("when", "in", "out"), ROWS).encode()
    if kind == "zip":
        with zipfile.ZipFile(path, "w") as file:
            file.writestr("a.csv", text)
    elif kind == "zstd":  # Python 3.11 cannot write it.
        path.write_bytes(b"\x28\xb5\x2f\xfd" + text)
    else:
        path.write_bytes((bz2 if kind == "bzip2" else lzma).compress(text))
    with pytest.raises(UserError, match=f"a.csv is packed by {kind}, which is not read here: unpack it"):
        told(TraceFile(where=str(path), columns=MINE))


NUMBERS = st.lists(
    st.tuples(st.integers(0, 10**6), st.integers(1, 10**5), st.integers(1, 10**5)), min_size=1, max_size=8
)


@given(
    rows=NUMBERS,
    order=st.permutations(range(3)),
    extra=st.booleans(),
    names=st.permutations(["t", "a b", "gen_length"]),
)
def test_columns_may_have_any_name_and_any_place(rows, order, extra, names, tmp_path_factory):
    header = [names[place] for place in order] + ["other"] * extra
    lines = [[row[place] for place in order] + ["x"] * extra for row in rows]
    path = tmp_path_factory.getbasetemp() / "any.csv"
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([header, *lines])
    said = dict(zip(("arrival_s", "prompt_len", "gen_length"), names, strict=True))
    columns = ", ".join(f"{name} = {column}" for name, column in said.items())
    assert told(TraceFile(where=str(path), columns=columns)) == rows


def test_failed_calls_are_left_out_and_said(tmp_path):
    file = write(tmp_path / "f.csv", csv_text(("prompt_len", "gen_length"), [(5, 5), (0, 5), (5, 0)]))
    assert read_trace(file).num_dropped == 2
    assert "2 rows without a prompt or an answer left out" in take_from(file, None, 0).description


def test_a_run_is_named_after_its_file():
    assert [*map(named_after, ("mine.jsonl", "/a/conversation_trace.jsonl.gz", "x.y.csv", ".hidden"))] == [
        "mine",
        "conversation_trace",
        "x.y",
        ".hidden",
    ]


HEAD = "arrival_s,prompt_len,gen_length\n"


@pytest.mark.parametrize(("text", "says"), REFUSED["tables"])
def test_what_cannot_be_read_is_said_with_its_line(text, says, tmp_path):
    assert says in refusal(write(tmp_path / ("t.jsonl" if text.startswith("{") else "t.csv"), text))


@pytest.mark.parametrize(("columns", "says"), REFUSED["columns"])
def test_columns_that_cannot_be_are_refused(columns, says, tmp_path):
    path = write(tmp_path / "t.csv", csv_text(("when", "in", "out"), ROWS)).where
    assert says in refusal(TraceFile(where=path, columns=columns))


@pytest.mark.parametrize(("dataset", "knobs", "says"), REFUSED["places_of_a_data_set"])
def test_a_file_takes_the_place_of_a_data_set(dataset, knobs, says):
    with pytest.raises(UserError, match=says):
        trace_source(dataset, TraceKnobs(**knobs), knobs)


# ---- what is served when -----------------------------------------------------------------------------------


@pytest.fixture
def mine(tmp_path):
    path = write(tmp_path / "mine.csv", csv_text(("when", "in", "out"), ROWS)).where
    return TraceFile(where=path, columns=MINE)


def test_times_are_the_file_s_and_two_is_twice_as_fast(mine):
    assert take_from(mine, TRACE, 7).arrival_s == (0, 1.25, 1.25, 7)
    assert take_from(mine, ArrivalConfig(kind="trace", time_scale=1.0), 7).arrival_s == (0, 1.25, 1.25, 7)
    assert take_from(mine, ArrivalConfig(kind="trace", time_scale=2.0), 7).arrival_s == (0, 0.625, 0.625, 3.5)
    assert take_from(mine, ArrivalConfig(kind="trace", rate=1.0), 7).arrival_s[-1] == pytest.approx(3)
    assert [each.rounds[0][:2] for each in take_from(mine, TRACE, 3, num=2).sessions] == [(374, 44), (396, 109)]


def test_other_arrivals_have_the_file_s_lengths_in_any_order(mine):
    poisson = ArrivalConfig(kind="poisson", rate=2.0)
    orders = {tuple(each.rounds[0][:2] for each in take_from(mine, poisson, seed).sessions) for seed in range(9)}
    assert {tuple(sorted(order)) for order in orders} == {tuple(sorted(row[1:] for row in ROWS))}
    assert len(orders) > 1
    assert "times of the file not used" in take_from(mine, poisson, 0).description
    assert "2 of 6 rows repeat one of the file's 4" in take_from(mine, poisson, 0, num=6).description


def test_a_trace_comes_once_and_sorted(mine, tmp_path):
    with pytest.raises(UserError, match=r"num_prompts=5 is more than the 4 of mine.csv, which come once"):
        take_from(mine, TRACE, 0, num=5)
    back = TraceFile(where=write(tmp_path / "b.csv", csv_text(("when", "in", "out"), ROWS[::-1])).where, columns=MINE)
    with pytest.raises(
        UserError, match=r"b.csv line 3: field 'when' is 4.25: earlier than 10.0 before it: sort the file"
    ):
        take_from(back, TRACE, 0)
    assert len(take_from(back, ArrivalConfig(kind="burst"), 0).sessions) == 4
    plain = write(tmp_path / "p.csv", csv_text(("prompt_len", "gen_length"), [(5, 5)]))
    with pytest.raises(UserError, match=r"p.csv has no column of times among prompt_len, gen_length"):
        take_from(plain, TRACE, 0)


@pytest.mark.parametrize("options", [{"kind": "burst"}, {"kind": "trace", "rate": 1.0}])
def test_a_time_scale_is_of_a_trace_alone(options):
    with pytest.raises(UserError, match="time_scale=2"):
        ArrivalConfig(**options, time_scale=2.0)


BASE = GenerationConfig(gen_length=64, block_length=16, steps=32)


def whole_blocks(tokens: int) -> GenerationConfig:
    return generation_of_length(BASE, -(-tokens // 16) * 16)


def test_requests_have_lengths_of_their_own(mine):
    found = traced_workload(mine, TRACE, 5, whole_blocks, most=900)
    assert (found.name, found.provenance.source, found.provenance.location) == ("mine", "local", "mine.csv")
    assert [each.generation.gen_length for each in found.requests] == [48, 112, 64, 16]
    assert [each.generation.steps for each in found.requests] == [24, 56, 32, 8]
    assert [each.prompt_len for each in found.requests] == [374, 396, 836, 91]
    assert [each.arrival_s for each in found.requests] == [0, 1.25, 1.25, 7]
    assert found.provenance.num_repeated == 0
    assert f"4 rows or sessions, columns {MINE.replace(',', ', ')};" in found.provenance.description
    assert "1 of 4 prompts cut to the room in 900 tokens" in found.provenance.description
    assert "3 of 4 answers rounded up to whole blocks, by 4 tokens on the mean" in found.provenance.description
    with pytest.raises(
        UserError, match=r"mine.csv line 3: an answer of 112 tokens leaves none for a prompt of the 112"
    ):
        traced_workload(mine, TRACE, 5, whole_blocks, most=112)


def test_parquet_without_its_reader_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    (tmp_path / "t.parquet").write_bytes(b"PAR1")
    assert refusal(TraceFile(where=str(tmp_path / "t.parquet"))) == (
        "t.parquet: reading parquet needs pyarrow: pip install pyarrow"
    )
    monkeypatch.undo()
    pytest.importorskip("pyarrow.parquet")
    assert "t.parquet cannot be read as parquet" in refusal(TraceFile(where=str(tmp_path / "t.parquet")))


def test_reading_leaves_the_collector_of_garbage_as_it_was(tmp_path):
    read_trace(write(tmp_path / "t.csv", f"{HEAD}0,5,5\n"))
    assert gc.isenabled()
    refusal(write(tmp_path / "bad.csv", f"{HEAD}0,x,5\n"))
    assert gc.isenabled()


# ---- files without anything but numbers -------------------------------------------------------------------


@given(
    rows=st.lists(st.tuples(st.integers(0, 3000), st.integers(0, 40), st.integers(0, 9)), min_size=1, max_size=6),
    form=st.sampled_from(["csv", "jsonl", "fractions.jsonl", "json"]),
    start_ms=st.sampled_from([0, 1_700_000_000_000]),
)
def test_rows_of_numbers_read_as_arrays_are_what_they_are_as_objects(tmp_path_factory, rows, form, start_ms):
    """Rows without a prompt or an answer are left out, and times may fall: then both read objects."""
    step = 4 if "fractions" in form else 1
    names = ("arrival_ms", "prompt_len", "gen_length")
    table = [(start_ms + (stamp / step if step > 1 else stamp), prompt, answer) for stamp, prompt, answer in rows]
    lines = json_lines(*names, rows=table)
    text = csv_text(names, table) if form == "csv" else lines
    text = f"[{','.join(lines.splitlines())}]" if form == "json" else text
    file = write(tmp_path_factory.mktemp("plain") / f"a.{form}", text)

    def found() -> object:
        read_trace.cache_clear()
        try:
            trace = read_trace(file)
        except UserError as error:
            return str(error)
        return {**vars(trace), "sessions": list(trace.sessions)}

    as_arrays = found()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(table_module, "_plain_trace", lambda *_: None)
        as_objects = found()
    assert repr(as_arrays) == repr(as_objects)


def test_a_part_of_a_file_read_as_arrays_has_its_lines(tmp_path):
    rows = [(10 * place, 1100 + place, 5) for place in range(4)]
    text = json_lines("timestamp", "input_length", "output_length", rows=rows[:1])
    text += "\n" + json_lines("timestamp", "input_length", "output_length", rows=rows[1:])
    file = write(tmp_path / "azure.jsonl", text)
    sessions = read_trace(replace(file, time_unit="ms")).sessions
    assert isinstance(sessions, PlainSessions)
    assert [each.where for each in sessions[:2]] == ["azure.jsonl line 1", "azure.jsonl line 3"]
    assert sessions[-1].arrival_s == 0.03
