"""Our cluster beside AISimulate's core, which a stand-in answers for."""

import gzip
import json
import sys

import pytest
from support.command import refused, repro
from support.tables import data_beside

from engines.errors import UserError
from repro import aisimulate

SEEN = data_beside(__file__, "aisimulate")["seen"]
"""What ai-dynamo-runtime 1.5.1 answered on 2026-11-29."""
ANSWER = {"ttft_ms": 1.5, "tpot_ms": 2.5, "e2e_ms": 3.5, "reuse": 0.25, "cpu_s": 4.5}


@pytest.fixture
def python(tmp_path):
    """Keeps what it is asked, and says one answer below other words."""
    script = tmp_path / "python"
    script.write_text(
        f"#!{sys.executable}\nimport pathlib, sys\n"
        f"with pathlib.Path({str(tmp_path / 'asked')!r}).open('a') as file: file.write(sys.stdin.read() + chr(10))\n"
        f"print('loading')\nprint({json.dumps(ANSWER)!r})\n"
    )
    script.chmod(0o755)
    return script


def test_every_case_is_served_by_both(python, tmp_path, monkeypatch):
    monkeypatch.setenv("REPRO_DATA_DIR", str(tmp_path))
    monkeypatch.setattr(aisimulate, "CASES", [each for each in aisimulate.CASES if each["num"] <= 5000])
    result = repro("reproduce truth --json --aisimulate", python)
    found = {each["case"]: each for each in json.loads(result.out)["cases"]}
    assert result.err.startswith("2 cases left out")  # those of Mooncake's file
    assert {*SEEN} < {*found}
    for name, seen in SEEN.items():
        assert found[name]["aisimulate"] == ANSWER
        # With its prices of a step, ours is AISimulate's to 1.5 %.
        assert {each: found[name]["repriced"][each] for each in seen} == pytest.approx(seen, rel=0.015)
        assert found[name]["ours"]["ttft_ms"] < found[name]["repriced"]["ttft_ms"]
    asked = [json.loads(line) for line in (tmp_path / "asked").read_text().splitlines()]
    assert [each["replay"].get("num_workers") for each in asked] == [1, 1, 4, 4, None]
    assert {each["engine"]["num_gpu_blocks"] * each["engine"]["block_size"] for each in asked} == {512_000}


def test_conversations_are_those_of_the_data_directory(tmp_path, monkeypatch):
    monkeypatch.setenv("REPRO_DATA_DIR", str(tmp_path))
    case = next(each for each in aisimulate.CASES if "rate" not in each)
    assert aisimulate.conversations(case) == []
    (tmp_path / "mooncake").mkdir()
    with gzip.open(tmp_path / "mooncake" / "conversation_trace.jsonl.gz", "wt") as file:
        file.write("{}\n" * 3000)
    assert aisimulate.conversations(case) == ["{}"] * 2000


@pytest.mark.parametrize(
    ("text", "said"), [(None, "is no program"), ("echo no", "replays no file"), ("exit 1", "it says nothing")]
)
def test_a_python_without_aisimulate_is_refused(text, said, tmp_path):
    python = tmp_path / "python"
    if text is not None:
        python.write_text(f"#!/bin/sh\n{text}\n")
        python.chmod(0o755)
    with pytest.raises(UserError, match=f"^aisimulate=.*{said}"):
        list(aisimulate.compare(python, tmp_path))


@pytest.mark.parametrize("words", ["truth --measured .", "truth --out-dir .", "ampd/fig4"])
def test_it_is_asked_for_alone(words):
    refused(repro(f"reproduce {words} --aisimulate", sys.executable), "has no effect")
