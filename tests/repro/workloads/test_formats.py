"""Files as people have them: published formats by their columns, units of time, sessions, and how numbers are written."""

import json
import os
from decimal import Decimal
from pathlib import Path

import pytest
from support.tables import data_beside

from engines.errors import UserError
from repro.workloads.columns import known_names
from repro.workloads.dataset import load_card
from repro.workloads.dataset_rows import read_rows
from repro.workloads.draws import ArrivalConfig
from repro.workloads.rounds import TraceFile
from repro.workloads.served import PREFIXES_UNUSED, take_from
from repro.workloads.table import read_trace
from repro.workloads.workload import open_source

DATA = data_beside(__file__, "formats")

TRACE = ArrivalConfig(kind="trace")
HEAD = "arrival_s,prompt_len,gen_length\n"


def lines(*rows: dict) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


@pytest.fixture
def file(tmp_path):
    def made(text: str, **said) -> TraceFile:
        # In a folder of its own: what was read of a path is kept.
        path = tmp_path / str(len(list(tmp_path.iterdir()))) / ("t.jsonl" if text.lstrip().startswith("{") else "t.csv")
        path.parent.mkdir()
        path.write_text(text)
        return TraceFile(where=str(path), **said)

    return made


def replayed(trace: TraceFile) -> list[float]:
    return [pytest.approx(each) for each in take_from(trace, TRACE, 0).arrival_s]


def rounds(trace: TraceFile) -> list[tuple]:
    return [tuple(each) for session in read_trace(trace).sessions for each in session.rounds]


# ---- published formats ------------------------------------------------------------------------------------

BAILIAN = [
    {"chat_id": 159, "parent_chat_id": -1, "timestamp": 61.114, "input_length": 521, "output_length": 132, "turn": 1},
    {"chat_id": 161, "parent_chat_id": -1, "timestamp": 61.364, "input_length": 50, "output_length": 13, "turn": 1},
    {"chat_id": 160, "parent_chat_id": 159, "timestamp": 92.5, "input_length": 800, "output_length": 80, "turn": 2},
]
BAILIAN = [{**row, "type": "text", "hash_ids": [1089, 1090]} for row in BAILIAN]
MOONCAKE = DATA["mooncake"]


def test_a_sample_to_plan_by_may_leave_a_file_s_times(file):
    trace = file("timestamp,prompt_len,gen_length\n9,5,5\n0,6,5\n", time_unit="ms", sort=True)
    assert len(take_from(trace, None, 0, is_sample=True).sessions) == 2
    with pytest.raises(UserError, match="time_unit"):
        take_from(trace, None, 0)


def test_a_time_that_cannot_be_is_named_by_the_row_it_is_in(file):
    with pytest.raises(UserError, match=r"line 3: field 'arrival_s' is '9000000000"):
        read_trace(file(f"{HEAD}5,5,5\n9000000000,5,5\n6,5,5\n"))


def test_the_chat_is_read_that_is_named(file):
    one, other = ([{"role": "user", "content": letter * 40}] for letter in "xy")
    row = {"conversation": [*one, *one], "messages": other, "rounds": [[7, 7]], "output_length": 3}
    trace = file(lines(row), columns="rounds=messages,gen_length=output_length")
    assert rounds(trace) == [(10, 3, None)]


def test_a_row_with_an_empty_cell_is_counted_of_a_data_set_too(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text("Timestamp,Request tokens,Response tokens\n1,5,5\n2,,5\n,7,5\n4,7,7\n")
    source = open_source(load_card("burst"), "local", dataset_path=str(path))
    assert [row.rounds[0].prefill_tokens for row in source.sessions] == [5, 7]
    assert source.num_dropped == 2


def test_a_data_set_s_chat_that_counts_tokens_is_no_trace_without_times(tmp_path):
    path = tmp_path / "t.jsonl"
    path.write_text(lines({"messages": [{"role": "user", "content": "Hi"}], "input_length": 30, "output_length": 7}))
    with pytest.raises(UserError, match="is a file of conversations"):
        read_rows(path)


def test_every_format_can_be_a_data_set_s(tmp_path):
    assert len({known.name for known in known_names().formats}) == 12
    path = tmp_path / "t.jsonl"
    path.write_text(lines(*BAILIAN))
    source = open_source(load_card("burst"), "local", dataset_path=str(path))
    assert source.remarks == ("outputs as long as asked for, not as the trace's", PREFIXES_UNUSED)
    assert [row.rounds[0].decode_tokens for row in source.sessions] == [None, None, None]


def test_a_data_set_s_file_is_read_by_the_same_columns(tmp_path):
    path = tmp_path / "t.jsonl"
    path.write_text(lines(*BAILIAN))
    assert [row.arrival_s for row in read_rows(path)] == [61.114, 61.364, 92.5]
    assert [row.rounds[0].prefill_tokens for row in read_rows(path)] == [521, 50, 800]
    path.write_text(lines(*({k: v for k, v in row.items() if k != "hash_ids"} for row in MOONCAKE)))
    with pytest.raises(UserError, match=r"timestamp.* in ms 4 rows in 9 s"):
        read_rows(path)
    assert [row.arrival_s for row in read_rows(path, time_unit="ms")] == [0, 3.027, 6, 9]


def test_published_names_in_other_letters_are_names_too(file):
    row = "2024-05-10 00:00:00+00:00,2162,5\n2024-05-10 00:00:01.5+00:00,2399,6\n"
    for names in ("timestamp,context_tokens,generated_tokens", "Timestamp,Context Tokens,Generated Tokens"):
        assert replayed(file(f"{names}\n{row}")) == [0, 1.5]
    burst = file("timestamp,model,request_tokens,response_tokens\n5,GPT-4,472,18\n45,GPT-4,10,9\n", time_unit="s")
    assert replayed(burst) == [0, 40]
    assert rounds(file("Prompt Tokens Count,Output Tokens Count\n10,5\n")) == [(10, 5, None)]


@pytest.mark.parametrize("name", ["body", "payload"])
def test_a_request_in_the_body_of_a_row_is_read(name, file):
    chat = {"model": "m", "messages": [{"role": "user", "content": "x" * 40}], "max_tokens": 20}
    assert rounds(file(lines({"custom_id": "r1", name: chat}))) == [(10, 20, None)]


def test_a_later_round_needs_no_time(file):
    text = "arrival_s,session,prompt_len,gen_length,delay_s\n0,a,5,5,1\n,a,6,5,\n2,b,7,5,\n"
    assert [len(each.rounds) for each in read_trace(file(text)).sessions] == [2, 1]
    assert replayed(file(text)) == [0, 2]


def test_turns_of_a_session_come_with_their_delays(file):
    turns = [{"text": "x" * 40, "output_length": 5}, {"texts": ["y" * 8], "delay": 500, "output_length": 7}]
    assert rounds(file(lines({"session_id": "s", "turns": turns}))) == [(10, 5, 0.5), (2, 7, None)]
    bare = lines({"session_id": "s", "turns": ["x" * 40, "y" * 8]})
    assert rounds(file(bare, gen_length=9)) == [(10, 9, None), (2, 9, None)]
    with pytest.raises(UserError, match="field 'turns'"):
        read_trace(file(lines({"turns": [{"image": "x"}]})))


def test_answers_without_a_length_have_the_one_that_is_given(file):
    prompts = lines({"prompt": "x" * 40}, {"prompt": "y" * 8})
    with pytest.raises(UserError, match="gen_length"):
        read_trace(file(prompts))
    trace = file(prompts, gen_length=9)
    assert rounds(trace) == [(10, 9, None), (2, 9, None)]
    assert "2 answers of 9 tokens, where the file tells none" in take_from(trace, None, 0).description
    some = lines({"prompt": "x" * 40, "output_tokens": 4}, {"prompt": "y" * 8, "output_tokens": None})
    assert rounds(file(some, gen_length=9)) == [(10, 4, None), (2, 9, None)]
    asked = lines({"messages": [{"role": "user", "content": "x" * 40}]})
    assert rounds(file(asked, gen_length=9)) == [(10, 9, None)]
    with pytest.raises(UserError, match="gen_length=9 has no effect"):
        read_trace(file(lines({"prompt": "x", "output_tokens": 4}), gen_length=9))


# ---- units ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("column", ["timestamp", "Timestamp", "time", "arrival_time", "ts", "request_time"])
def test_a_unit_that_nobody_says_is_asked_for(column, file):
    text = f"{column},input_length,output_length\n0,10,5\n500,10,5\n9000,10,5\n"
    with pytest.raises(UserError) as caught:
        take_from(file(text), TRACE, 0)
    for told in (column, "in s 3 rows in 9,000 s", "in ms 3 rows in 9 s, 0.222 a second", "in us", "--time-unit"):
        assert told in str(caught.value)
    assert replayed(file(text, time_unit="ms")) == [0, 0.5, 9]
    assert replayed(file(text, time_unit="s")) == [0, 500, 9000]
    # Rows whose times are not used need none.
    assert len(take_from(file(text), ArrivalConfig(kind="poisson", rate=1.0), 0).sessions) == 3


def test_what_a_run_is_served_says_window_rate_and_unit(file):
    text = "timestamp,input_length,output_length\n0,10,5\n500,10,5\n1000,10,5\n"
    said = take_from(file(text, time_unit="ms"), TRACE, 0).description
    assert "3 in 1 s, 2 a second, timestamp in ms" in said


def in_seconds(row: dict, number: type) -> dict:
    return {**row, "timestamp": number(row["timestamp"] / 1000)}


@pytest.mark.parametrize("number", [int, float])
def test_a_published_format_in_another_unit_is_refused_with_the_one_that_fits(number, file):
    text = lines(*(in_seconds(row, number) for row in MOONCAKE))
    with pytest.raises(UserError, match=r"field 'timestamp' .*--time-unit s .4 rows in 9 s"):
        read_trace(file(text))
    assert replayed(file(text, time_unit="s"))[-1] == 9


def test_fractions_of_seconds_that_are_not_there_tell_of_milliseconds(file):
    rows = [{**BAILIAN[1], "chat_id": number, "timestamp": 61114 + 300 * number} for number in range(5)]
    with pytest.raises(UserError, match=r"field 'timestamp' .*--time-unit ms .5 rows in 1.2 s"):
        read_trace(file(lines(*rows)))
    slow = [{**row, "timestamp": number} for number, row in enumerate(rows)]
    assert replayed(file(lines(*slow))) == [0, 1, 2, 3, 4]


def test_numbers_where_a_format_has_dates_have_no_unit(file):
    text = "TIMESTAMP,ContextTokens,GeneratedTokens\n0,4,5\n500,4,5\n9000,4,5\n"
    with pytest.raises(UserError, match=r"'TIMESTAMP' is not said.* in ms 3 rows in 9 s"):
        take_from(file(text), TRACE, 0)
    assert replayed(file(text, time_unit="ms")) == [0, 0.5, 9]


@pytest.mark.parametrize("zone", ["", "Z", "+00", "+0000", "+00:00", " UTC", " +02:00"])
@pytest.mark.parametrize("second", ["", ":00", ":00.25"])
def test_dates_as_tools_write_them(zone, second, file):
    text = f"{HEAD}2024-05-10 00:00{second}{zone},9,5\n2024-05-10T00:01{second}{zone},9,5\n"
    assert replayed(file(text)) == [0, 60]


def test_a_published_unit_is_not_overruled_by_a_name(file):
    columns = "arrival_s=timestamp,prompt_len=input_length,gen_length=output_length"
    for rows, unit in ((MOONCAKE, "milliseconds"), (BAILIAN, "seconds")):
        wrong = columns if rows is MOONCAKE else columns.replace("arrival_s", "arrival_ms")
        with pytest.raises(UserError, match=f"timestamp of t.jsonl.* is in {unit}"):
            read_trace(file(lines(*rows), columns=wrong))
    # Rows alone, in place of sessions.
    assert replayed(file(lines(*BAILIAN), columns=columns)) == [0, 0.25, 31.386]


@pytest.mark.parametrize(("header", "stamps", "fits"), DATA["times_that_cannot_be"])
def test_times_that_cannot_be_are_refused_with_the_reading_that_would_fit(header, stamps, fits, file):
    text = f"{header},prompt_len,gen_length\n" + "".join(f"{stamp!r},10,5\n" for stamp in stamps)
    with pytest.raises(UserError, match=f"field '{header}'") as caught:
        read_trace(file(text))
    assert fits is None or f"--time-unit {fits} (" in str(caught.value)


@pytest.mark.parametrize(("unit", "per_second"), [("ms", 10**3), ("us", 10**6), ("ns", 10**9)])
def test_times_since_1970_keep_their_digits(unit, per_second, file):
    first = 1700000000 * per_second
    text = f"arrival_{unit},prompt_len,gen_length\n{first},10,5\n{first + per_second // 4},10,5\n"
    assert take_from(file(text), TRACE, 0).arrival_s == (0, 0.25)


@pytest.mark.parametrize(("text", "said"), DATA["units_without_effect"])
def test_a_unit_that_changes_nothing_is_refused(text, said, file):
    with pytest.raises(UserError, match=r"time_unit|unit out"):
        read_trace(file(text, **said))


def test_a_unit_is_refused_where_times_are_not_used(file):
    trace = file("timestamp,prompt_len,gen_length\n0,5,5\n9,5,5\n", time_unit="ms")
    with pytest.raises(UserError, match="time_unit='ms' has no effect"):
        take_from(trace, ArrivalConfig(kind="burst"), 0)


# ---- sessions ---------------------------------------------------------------------------------------------


def test_delays_follow_from_the_rows_own_times(file):
    rows = [(0, "a"), (1, "b"), (7, "a"), (194, "b")]
    text = "arrival_s,session,prompt_len,gen_length\n" + "".join(f"{s},{name},10,5\n" for s, name in rows)
    found = take_from(file(text), TRACE, 0)
    assert [each.rounds[0].delay_s for each in found.sessions] == [7, 193]
    assert found.arrival_s == (0, 1)
    assert "delays follow from the rows' times" in found.description
    assert "all rows in 194 s" in found.description
    bare = text.replace("arrival_s", "timestamp")
    with pytest.raises(UserError, match="'timestamp' is not said"):
        read_trace(file(bare))
    assert read_trace(file(bare, time_unit="ms")).sessions[1].rounds[0].delay_s == pytest.approx(0.193)


def test_rows_of_a_session_without_times_are_rounds(file):
    rows = [{"session_id": "a", "input_length": 300, "output_length": 40}]
    rows += [{"session_id": "a", "delay": 2000, "input_length": 150, "output_length": 20}]
    assert rounds(file(lines(*rows))) == [(300, 40, 2.0), (150, 20, None)]
    with pytest.raises(UserError, match="'delay' is not said"):
        read_trace(file(lines(*rows).replace("input_length", "prompt_tokens")))


def test_a_row_follows_its_parent_and_adds_to_what_came_before(file):
    first, second = read_trace(file(lines(*BAILIAN))).sessions
    assert [each[:2] for each in first.rounds] == [(521, 132), (800 - 521 - 132, 80)]
    assert first.rounds[0].delay_s == pytest.approx(31.386)
    assert [each[:2] for each in second.rounds] == [(50, 13)]
    branch = {**BAILIAN[2], "chat_id": 162, "timestamp": 99.5, "input_length": 700}
    trace = read_trace(file(lines(*BAILIAN, branch)))
    assert [each.rounds[0].prefill_tokens for each in trace.sessions] == [521, 50, 700]
    assert any("begin a session of their own" in each for each in trace.remarks)
    for tokens in (400, 521 + 132):
        short = {**BAILIAN[2], "input_length": tokens}
        assert read_trace(file(lines(*BAILIAN[:2], short))).sessions[0].rounds[1].prefill_tokens == tokens
    with pytest.raises(UserError, match="field 'parent_chat_id'"):
        read_trace(file(lines(*BAILIAN[1:], BAILIAN[0])))
    with pytest.raises(UserError, match="field 'chat_id'"):
        read_trace(file(lines(BAILIAN[0], BAILIAN[0])))


def test_our_own_names_of_parents_need_no_saying(file):
    own = lines(*({"id": n, "parent": n - 1 or None, "prompt_len": 10 * n, "gen_length": 5} for n in (1, 2, 3)))
    assert [each[:2] for each in rounds(file(own))] == [(10, 5), (20, 5), (30, 5)]
    assert len(read_trace(file(own.replace("parent", "other"))).sessions) == 3


def test_rounds_come_by_their_turn(file):
    head = "arrival_time_us,session_id,round_index,input_tokens,output_tokens\n"
    assert [each[0] for each in rounds(file(f"{head}9,s,1,20,5\n0,s,0,10,5\n"))] == [10, 20]
    with pytest.raises(UserError, match="field 'round_index'"):
        read_trace(file(f"{head}0,s,1,20,5\n9,s,1,10,5\n"))


def test_sessions_of_another_kind_are_others(file):
    text = lines(*({"session": each, "prompt_len": 2, "gen_length": 2} for each in (1, True, "1", 1.0)))
    assert [len(each.rounds) for each in read_trace(file(text)).sessions] == [2, 1, 1]


# ---- how a table is written -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        f"{HEAD}0,100.0,5\n1,1e2,5.0\n",
        f"\n \n{HEAD}0,100,5\n\n1,100,5\n",
        f"{HEAD}0,100,5\n1,100,5\n".replace(",", ";"),
        f"{HEAD}0,100,5\n1,100,5\n".replace(",", "\t"),
        f"{HEAD}0,100,5,\n1,100,5,,\n",
        f"{HEAD.strip()},\n0,100,5\n1,100,5,\n",
        f"{HEAD}0,100,5\n0.5,,5\n0.7,100,\n,100,5\n1,100,5\n",
        lines(
            {"arrival_s": 0, "prompt_len": 100.0, "gen_length": 5},
            {"arrival_s": 0.5, "prompt_len": None, "gen_length": 5},
            {"arrival_s": 1, "prompt_len": "100", "gen_length": 5},
        ),
    ],
)
def test_tables_as_people_write_them(text, file):
    trace = read_trace(file(text))
    assert [(each.arrival_s, *each.rounds[0][:2]) for each in trace.sessions] == [(0, 100, 5), (1, 100, 5)]
    num_empty = 0 if "5,\n" in text else text.count(",,") + text.count(",\n") + text.count("\n,") + text.count("null")
    assert [each for each in trace.remarks if "empty cell" in each] == [
        f"{num_empty} rows with an empty cell left out" for _ in range(num_empty > 0)
    ]


@pytest.mark.parametrize("value", ["1_0", "0x10", "inf", "nan", "١٠", "1e400", "", "-1", "1,5"])
def test_numbers_that_are_none(value, file):
    row = json.dumps({"arrival_s": value, "prompt_len": 5, "gen_length": 5})
    with pytest.raises(UserError, match=r"field 'arrival_s'|no row with a prompt"):
        read_trace(file(row))
    with pytest.raises(UserError, match=r"field 'prompt_len'|no row with a prompt"):
        read_trace(file(row.replace("arrival_s", "x").replace("prompt_len", "arrival_s").replace("x", "prompt_len")))


def test_a_number_with_commas_is_named(file):
    with pytest.raises(UserError, match=r"field 'prompt_len' is '1,024'.*: 1024"):
        read_trace(file(f'{HEAD}0,"1,024",5\n'))


def test_a_table_that_cannot_be_read_is_told_how_to_be(file, tmp_path):
    with pytest.raises(UserError, match=r"field 'arrival_s' is '0,5'.*: 0\.5"):
        read_trace(file(HEAD.replace(",", ";") + "0,5;9;5\n"))
    with pytest.raises(UserError, match="first line names no columns"):
        read_trace(file("0.5,100,5\n1.5,101,6\n"))
    with pytest.raises(UserError, match=r"line 2.*2 cells, the header 3"):
        read_trace(file(f"{HEAD}0,5\n"))
    path = tmp_path / "wide.csv"
    path.write_text(f"{HEAD}0,9,5\n", encoding="utf-16")
    with pytest.raises(UserError, match="save it as text of UTF-8"):
        read_trace(TraceFile(where=str(path)))
    path = tmp_path / "t.json"
    path.write_text('[{"prompt_len": 9, "gen_length": 5},\n]')
    with pytest.raises(UserError, match=r"t.json row 2 cannot be read"):
        read_trace(TraceFile(where=str(path)))


def test_two_columns_of_one_name_are_refused_in_json_and_parquet_too(file, tmp_path):
    with pytest.raises(UserError, match="given twice"):
        read_trace(file('{"prompt_len": 10, "gen_length": 5, "prompt_len": 99}\n'))
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    table = pyarrow.Table.from_arrays([[10], [99], [5]], names=["prompt_len", "prompt_len", "gen_length"])
    parquet.write_table(table, tmp_path / "t.parquet")
    with pytest.raises(UserError, match="'prompt_len' is given twice"):
        read_trace(TraceFile(where=str(tmp_path / "t.parquet")))


def test_decimals_and_empty_cells_of_parquet(tmp_path):
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    times = pyarrow.array([Decimal("0.5"), Decimal("2.0"), Decimal("3.0"), Decimal("4.0")])
    lengths = {"prompt_len": [10.0, 9.0, float("nan"), None], "gen_length": [5, 5, 5, 5]}
    parquet.write_table(pyarrow.table({"arrival_s": times, **lengths}), tmp_path / "t.parquet")
    trace = TraceFile(where=str(tmp_path / "t.parquet"))
    assert replayed(trace) == [0, 1.5]
    assert "2 rows with an empty cell left out" in read_trace(trace).remarks
    source = open_source(load_card("burst"), "local", dataset_path=trace.where)
    assert [each.rounds[0].prefill_tokens for each in source.sessions] == [10, 9]


def test_rows_are_sorted_where_that_is_asked_for(file):
    text = f"{HEAD}9,1,5\n0,2,5\n9,3,5\n4,4,5\n"
    with pytest.raises(UserError, match=r"field 'arrival_s'.*--sort"):
        take_from(file(text), TRACE, 0)
    found = take_from(file(text, sort=True), TRACE, 0)
    assert found.arrival_s == (0, 4, 9, 9)
    assert [each.rounds[0].prefill_tokens for each in found.sessions] == [2, 4, 1, 3]
    with pytest.raises(UserError, match="sort has no effect"):
        read_trace(file("prompt_len,gen_length\n5,5\n", sort=True))
    with pytest.raises(UserError, match="sort has no effect"):
        take_from(file(text, sort=True), ArrivalConfig(kind="poisson", rate=1.0), 0)


def test_names_that_both_say_one_thing_are_not_chosen_between(file):
    with pytest.raises(UserError, match="prompt_tokens and input_tokens both say prompt_len"):
        read_trace(file("input_tokens,prompt_tokens,output_tokens\n5,5,5\n"))


def test_a_pipe_is_refused_by_the_reader_itself(tmp_path):
    for name in ("p.csv", "p.jsonl.gz", "p.parquet"):
        os.mkfifo(tmp_path / name)
        with pytest.raises(UserError, match="device or a pipe"):
            read_trace(TraceFile(where=str(tmp_path / name)))


# ---- the published files themselves -----------------------------------------------------------------------

DATA_DIR = os.environ.get("REPRO_DATA_DIR")


@pytest.mark.skipif(DATA_DIR is None, reason="needs the published files in REPRO_DATA_DIR")
@pytest.mark.parametrize(("name", "num", "tokens", "seconds"), DATA["published_files"])
def test_published_files_take_the_time_that_their_publisher_says(name, num, tokens, seconds):
    path = Path(str(DATA_DIR)) / name
    if not path.is_file():
        pytest.skip(f"{name} is not there")
    found = take_from(TraceFile(where=str(path)), TRACE, 0)
    assert (len(found.sessions), found.arrival_s[-1]) == (num, pytest.approx(seconds, abs=1e-2))
    rows = read_rows(path)
    assert len(rows) == num
    assert sum(each.rounds[0].prefill_tokens for each in rows) / num == pytest.approx(tokens, abs=0.006)
