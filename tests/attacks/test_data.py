"""Files with data that a user names, and pages that the program wrote itself, each broken in every way: one sentence."""

import gzip
import json
from typing import Any

import pytest
from support.command import refused, repro

from repro.checks.results import check_claims
from repro.paths import RESULTS

DEEP = "[" * 100_000
SESSIONS = ("bench", "--platform", "h20x32", "--num-prompts", 2)


def rows(*rounds: str, **more: str) -> str:
    fields = [*(f'"{name}": {value}' for name, value in more.items()), f'"rounds": [{", ".join(rounds)}]']
    return f"{{{', '.join(fields)}}}\n"


LINES = {
    "2^31": (rows(f"[{2**31}, 5]"), "tokens 1 to 2147483647"),
    "delay of 400 digits": (rows(f"[5, 5, 1{'0' * 400}]"), "seconds 0 to 1000000"),
    "arrival inf": (rows("[5, 5]", arrival_s="Infinity"), "expected seconds, 0 to 1e+12"),
    "deep": (f'{{"rounds": {DEEP}', "nested too deeply, or with a number too long, to be read"),
    "empty": ("", "has no session"),
    "binary": (b"\x00\xff", "line 1 is unreadable"),
}
"""More of them are read alone in tests/repro/workloads."""


@pytest.mark.parametrize("name", LINES)
def test_a_line_of_a_session_file(name, tmp_path):
    content, says = LINES[name]
    path = tmp_path / "mine.jsonl"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    where = ("--result-dir", tmp_path / "r", "--arrivals", "trace") if "arrival" in name else ()
    refused(repro(*SESSIONS, "--dataset-path", path, *(where or ("--result-dir", tmp_path / "r"))), "mine.jsonl", says)
    assert not (tmp_path / "r").exists()


def test_a_published_file_without_rounds(tmp_path):
    """What reads as the format says, and is of no use all the same."""
    path = tmp_path / "toolbench_dfsdt_examples.jsonl.gz"
    answer = {"answer_generation": {"valid_data": 1, "train_messages": [[]]}}
    path.write_bytes(gzip.compress((json.dumps(answer) + "\n").encode()))
    asked = ("--dataset-name", "toolbench", "--dataset-path", path, "--result-dir", tmp_path / "r")
    refused(repro(*SESSIONS, *asked), path.name)


TURNS = ("bench", "--platform", "h200", "--system", "laps", "--request-rate", 5)


@pytest.mark.parametrize(
    ("command", "asked", "says"),
    [
        (SESSIONS[:3], 5, "3 of 5 sessions repeat one of the file's 2"),
        (TURNS, 40, "36 of 40 turns repeat one of the file's 4"),
        ((*TURNS, "--knob", "max_tokens=60"), 40, "38 of 40 turns repeat one of the file's 2"),
        (("bench", "--platform", "rtx4090"), 5, "3 of 5 requests repeat a row"),
    ],
    ids=["sessions", "turns", "turns of a band", "requests"],
)
def test_a_file_that_comes_round_again_is_said_to(command, asked, says, tmp_path):
    path = tmp_path / "mine.jsonl"
    path.write_text('{"prompt": "one two three"}\n' * 2 if "rtx4090" in command else rows("[50, 9]", "[70, 8]") * 2)
    result = repro(*command, "--dataset-path", path, "--num-prompts", asked, "--result-dir", tmp_path / "r", "--json")
    assert says in " ".join(result.err.split())
    held = repro(*command, "--dataset-path", path, "--num-prompts", 2, "--result-dir", tmp_path / "r", "--json")
    assert "repeat" not in held.err


def test_times_of_a_file_come_once(tmp_path):
    path = tmp_path / "mine.jsonl"
    path.write_text("".join(rows("[50, 9]", arrival_s=str(at)) for at in range(3)))
    asked = ("--dataset-path", path, "--arrivals", "trace", "--result-dir", tmp_path / "r")
    refused(repro(*SESSIONS[:3], *asked, "--num-prompts", 4), "num_prompts=4", "--num-prompts 3")
    refused(repro(*SESSIONS[:3], *asked), "--num-prompts 3")
    assert repro(*SESSIONS[:3], *asked, "--num-prompts", 3).code == 0


def test_a_fault_of_the_program_is_not_the_files(tmp_path, monkeypatch):
    """The same failure is the file's where reading it alone fails too."""
    from repro.families.cluster import ampd
    from repro.workloads import recorded

    path = tmp_path / "mine.jsonl"
    path.write_text(rows("[50, 9]") * 2)
    command = (*SESSIONS, "--dataset-path", path, "--result-dir", tmp_path / "r")

    ours: dict[str, Any] = {"__name__": "repro.somewhere"}
    exec("def fail(*_):\n    raise TypeError('of our own')\n", ours)
    fail = ours["fail"]
    with monkeypatch.context() as patch:
        patch.setattr(ampd.ClusterDeployment, "check", fail)
        result = repro(*command)
    assert result.code == 1
    assert "TypeError: of our own: a fault of this program" in result.err
    with monkeypatch.context() as patch:
        patch.setattr(recorded, "read_sessions", fail)
        refused(repro(*command), "mine.jsonl' has not the format", "TypeError: of our own")


@pytest.mark.parametrize("content", [b"\xff\xfe", b"", b"id\0", b"x" * 200_000, b'"'], ids=repr)
def test_claims_that_cannot_be_read_are_stale(content, tmp_path):
    head = (RESULTS / "claims-ampd.csv").read_bytes().splitlines()[0] + b"\n"
    for written in (content, head + (content or b"a,b\n")):
        path = tmp_path / "claims-ampd.csv"
        path.write_bytes(written)
        (found,) = check_claims(tmp_path, [])
        assert found.is_fault, found


@pytest.mark.parametrize("option", ["--export", "--result-dir"])
def test_a_suite_that_cannot_write(option, tmp_path):
    (tmp_path / "file").write_text("")
    folders = {"--result-dir": tmp_path / "g", option: tmp_path / "file"}
    command = ("gpu-suite", "--platform", "cpu-tiny", "--stage", "goldens")
    refused(repro(*command, *(word for each in folders.items() for word in each)), "is not a directory")
    assert {path.name for path in tmp_path.iterdir()} == {"file"}
