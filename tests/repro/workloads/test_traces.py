"""Trace parsers: right rows from good files, one clear sentence for each bad line."""

import gzip
import json
from pathlib import Path

import pytest

from engines.errors import UserError
from repro.workloads.dataset_rows import read_prompts, read_rows

BURST_HEADER = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type"
AZURE_HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens"


def write(path: Path, *lines: str) -> Path:
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def told(path: Path) -> list[tuple[float | None, int, int | None, str | None]]:
    """When each request comes, its tokens, those that it asks for, and its text."""
    return [(each.arrival_s, *each.rounds[0][:2], each.prompt) for each in read_rows(path)]


@pytest.mark.parametrize("front", ["\ufeff", "\n \r\n", "\ufeff\n"])
@pytest.mark.parametrize("name", ["own.jsonl", "own.jsonl.gz"])
def test_what_an_editor_puts_in_front_is_nothing(front, name, tmp_path):
    path, content = tmp_path / name, (front + '{"prompt_len": 5}\n\n{"prompt_len": 7}').encode()
    path.write_bytes(gzip.compress(content) if name.endswith("gz") else content)
    assert [row[1] for row in told(path)] == [5, 7]


def test_prompts_from_a_list_column_with_a_filter(tmp_path):
    path = write(tmp_path / "q.jsonl", '{"turns": ["solve", "x"], "task": "a"}', '{"turns": [], "task": "b"}')
    assert [each.prompt for each in read_prompts(path, "turns[0]", lambda row: row["task"] == "a")] == ["solve"]
    with pytest.raises(UserError, match=r"q.jsonl line 2: field 'turns\[0\]' is None: expected text"):
        read_prompts(path, "turns[0]")


COUNT, TIME = "expected a whole number, at least 0", "expected a finite number, not negative, at most 1e+12"
MALFORMED = {
    "5,G,-3,18,490,C": f"line 2: field 'Request tokens' is '-3': {COUNT}",
    "5,G,3,,490,C": "has no rows: check that it is the whole file",
    "soon,G,3,18,490,C": f"line 2: field 'Timestamp' is 'soon': {TIME}",
    "5,G,3,18,490,C\n5,G,3": "line 3: field 'Response tokens' is '5,G,3': the line has 3 cells, the header 6",
    "": "has no rows: check that it is the whole file",
}
"""Behind the header of BurstGPT."""
MALFORMED_FILES = {
    "Timestamp,Request tokens\n5,3": "no column is the answers' length gen_length, the file has Timestamp, Request tokens",
    f"{AZURE_HEADER}\n16 Nov 2023,3,4": "line 2: field 'TIMESTAMP' is '16 Nov 2023': expected a time like "
    "2023-11-16 18:17:03.9799600",
    f"{AZURE_HEADER}\n2023-13-45 18:17:03.9,3,4": "line 2: field 'TIMESTAMP' is '2023-13-45 18:17:03.9': expected a time "
    "like 2023-11-16 18:17:03.9799600",
    "when,what\n1,2": "no column is the prompts' length, the file has when, what: name it",
    '{"timestamp": 0, "input_length": "12", "output_length": 5.5}': f"line 1: field 'output_length' is 5.5: {COUNT}",
    '{"timestamp": 0, "input_length": 12}': "no column is the answers' length gen_length",
    '{"timestamp": 0, "input_length": 12, "output_length": 1}\n{"timestamp": 0, "input_length": 12}': "line 2: field "
    "'output_length' is None: the key is missing",
    '{"timestamp": -1, "input_length": 12, "output_length": 5}': f"line 1: field 'timestamp' is -1: {TIME}",
    '{"prompt_len": 3}\n{"prompt_len": 3': "line 2: field 'line' is '{\"prompt_len\": 3': not JSON (Expecting ',' delimiter), "
    "one object a line",
    '{"prompt_len": 3}\n[1, 2]': "line 2: field 'line' is [1, 2]: expected an object {...}, one a line",
    '{"prompt_len": 0}': "line 1: field 'prompt_len' is 0: expected a whole number, at least 1",
    '{"prompt_len": true}': "line 1: field 'prompt_len' is True: expected a whole number, at least 1",
    '{"prompt_len": 3, "prompt": "x"}': "line 1: field 'prompt_len' is 3: give either prompt (text) or prompt_len (tokens), "
    "not both or neither",
    '{"arrival_s": 3}': "no column is the prompts' length",
    '{"prompt_len": 3}\n{"arrival_s": 3}': "line 2: field 'prompt_len' is None: give either prompt (text) or prompt_len",
    '{"prompt": ""}': "line 1: field 'prompt' is '': expected a text that is not empty",
    '{"prompt_len": 3, "arival_s": 1}': "line 1: field 'arival_s' is 1: unknown key, use only arrival_s, prompt_len, prompt, "
    "gen_length",
    '{"prompt_len": 3, "max_tokens": 1}': "line 1: field 'max_tokens' is 1: unknown key, call it gen_length",
    '{"prompt_len": 3, "arrival_s": NaN}': f"line 1: field 'arrival_s' is nan: {TIME}",
    '{"prompt_len": 3, "gen_length": 0}': "line 1: field 'gen_length' is 0: expected a whole number, at least 1",
}


@pytest.mark.parametrize(
    ("content", "message"),
    [*((f"{BURST_HEADER}\n{line}", message) for line, message in MALFORMED.items()), *MALFORMED_FILES.items()],
)
def test_malformed_line_is_named(tmp_path, content, message):
    with pytest.raises(UserError) as caught:
        read_rows(write(tmp_path / "bad.csv", content))
    assert str(caught.value).startswith("bad.csv")
    assert message in str(caught.value)


def test_long_values_are_shortened_in_the_message(tmp_path):
    path = write(tmp_path / "t.jsonl", json.dumps({"prompt_len": "x" * 500}))
    with pytest.raises(UserError) as caught:
        read_rows(path)
    assert len(str(caught.value)) < 160


def test_missing_file(tmp_path):
    with pytest.raises(UserError, match=r"nowhere.csv' does not exist: check the path"):
        read_rows(tmp_path / "nowhere.csv")


@pytest.mark.parametrize("content", [b"\xff\xfe\x00\x01binary\x00", gzip.compress(b"x" * 100, mtime=0)[:20]])
def test_unreadable_file(tmp_path, content):
    path = tmp_path / "broken.csv.gz"
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"broken\.csv\.gz is not a text file"):
        read_rows(path)


def test_file_damaged_in_the_middle(tmp_path):
    lines = "\n".join(json.dumps({"prompt_len": n, "arrival_s": n * 0.37}) for n in range(1, 20_000))
    packed = gzip.compress(lines.encode())
    path = tmp_path / "cut.jsonl.gz"
    path.write_bytes(packed[: len(packed) // 2])
    with pytest.raises(UserError, match=r"cut.jsonl.gz line \d+: unreadable"):
        read_rows(path)
