"""The server that every client is measured against, and the table."""

import json

import pytest

from repro.bench import other_clients
from repro.bench.other_clients import FAILED, STREAMS, Reading, each_in_turn, ours, table, tokenizer_in

pytest.importorskip("aiohttp", reason="needs the extra http: aiohttp is not installed")


def test_streams_in_turn_are_read_as_they_were_sent(tmp_path, monkeypatch):
    names = ("no usage, 4 tokens an event", "ends after 8 tokens, without a word", "an error event after 8 tokens")
    quick = {name: [part / 20 if isinstance(part, float) else part for part in STREAMS[name]] for name in names}
    monkeypatch.setattr(other_clients, "STREAMS", quick)
    found = each_in_turn(ours, tokenizer_in(tmp_path / "tokenizer"), tmp_path)
    whole, broken, wrong = (found[name] for name in names)
    assert [each.tokens for each in whole] == [16] * 3, "a word is two tokens of the tokenizer, which counts them"
    assert all(each.ttft is not None and 10 <= each.ttft <= (each.latency or 0) for each in whole)
    assert broken == wrong == [FAILED] * 3


def test_a_cell_is_the_medians_of_what_was_told(monkeypatch):
    monkeypatch.setattr(other_clients, "STREAMS", {"one": (), "none": ()})
    told = [Reading(100.0, 900.0, 50.0, None, 16), Reading(102.0, 930.0, 50.0, None, 16), FAILED]
    assert table({"here": {"one": told, "none": [FAILED]}}).splitlines()[2:] == [
        "| one | 101 / 915 / 50 / - / 16 |",
        "| none | failed |",
    ]


def test_readings_are_written(tmp_path, monkeypatch):
    monkeypatch.setattr(other_clients, "each_in_turn", lambda *_: {name: [FAILED] for name in STREAMS})
    monkeypatch.setattr("sys.argv", ["other_clients", "--json", str(tmp_path / "rows.json")])
    other_clients.main()
    written = json.loads((tmp_path / "rows.json").read_text())
    assert written["here"]["no usage"] == [dict.fromkeys(("ttft", "latency", "per_token", "longest_gap", "tokens"))]
