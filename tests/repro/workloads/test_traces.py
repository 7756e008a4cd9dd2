"""Trace parsers: right rows from good files, one clear sentence for each bad line."""

import gzip
import json
from pathlib import Path

import pytest
from support.tables import data_beside

from engines.errors import UserError
from repro.workloads.dataset_rows import read_prompts, read_rows

REFUSED = data_beside(__file__, "refused")


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


@pytest.mark.parametrize(("content", "message"), REFUSED["requests"])
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
    with pytest.raises(UserError, match=r"broken\.csv\.gz.* is unreadable"):
        read_rows(path)


def test_file_damaged_in_the_middle(tmp_path):
    lines = "\n".join(json.dumps({"prompt_len": n, "arrival_s": n * 0.37}) for n in range(1, 20_000))
    packed = gzip.compress(lines.encode())
    path = tmp_path / "cut.jsonl.gz"
    path.write_bytes(packed[: len(packed) // 2])
    with pytest.raises(UserError, match=r"cut.jsonl.gz line \d+ is unreadable"):
        read_rows(path)
