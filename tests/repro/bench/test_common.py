"""What the scripts share: options that count, rows that are written one by one, and their table."""

import json

import pytest

from repro.bench.common import Rows, add_counts, parser_of, row_text, table

ROWS = (
    {"name": "a", "ms": 12.3456, "works": (1, 2), "fused": True},
    {"name": "long", "ms": None, "works": (), "fused": False},
)


def test_a_table_has_what_is_no_list():
    assert table(ROWS).splitlines() == ["name    ms  fused", "   a 12.35   True", "long     -  False"]
    assert table([]) == "nothing was timed"


def test_rows_are_in_the_file_as_soon_as_they_are_there(tmp_path):
    path = tmp_path / "rows.json"
    rows = Rows(path, {"torch": "2"})
    rows.add(ROWS[0])
    assert json.loads(path.read_text()) == {"torch": "2", "rows": [{**ROWS[0], "works": [1, 2]}]}
    rows.add({"name": "b"})
    rows.save(elapsed_s=1.5)
    found = json.loads(path.read_text())
    assert (len(found["rows"]), found["elapsed_s"]) == (2, 1.5)
    assert [each.name for each in tmp_path.iterdir()] == ["rows.json"], "it is whole at any time"
    Rows(None).add(ROWS[0])


@pytest.mark.parametrize("text", ["0", "-1", "1.5", "many"])
def test_counts_begin_at_one(text, capsys):
    parser = parser_of("Times.")
    add_counts(parser, max_rows=(3, "rows"), batch=((1, 8), "requests"))
    assert vars(parser.parse_args([])) == {"json": None, "max_rows": 3, "batch": (1, 8)}
    assert parser.parse_args(["--batch", "2", "4", "--max-rows", "5"]).batch == [2, 4]
    with pytest.raises(SystemExit):
        parser.parse_args(["--max-rows", text])
    assert f"--max-rows: {text!r} is no whole number from 1" in capsys.readouterr().err


def test_a_row_on_a_line():
    assert row_text({"panel": "x", "ms": 1.23456, "events": 12345}) == "panel=x  ms=1.235  events=12345"
