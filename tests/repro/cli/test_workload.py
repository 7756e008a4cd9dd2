"""One file of requests, served by every family from a folder outside the repository, at its own times and lengths."""

import csv
import json
import os
import re
import shlex
from fractions import Fraction
from pathlib import Path

import pytest
from support.command import refused, repro
from support.tables import data_beside

from repro import api
from repro.families.http.requests import resolve, workload_of
from repro.files import forget
from repro.paths import REPO
from repro.runs.store import StoredRun
from repro.runs.system import SYSTEMS
from repro.workloads.columns import NAMES

CASES = data_beside(__file__, "cases")

COLUMNS = "arrival_s=timestamp,prompt_len=ContextTokens,gen_length=GeneratedTokens"
FAMILIES = data_beside(__file__, "workload")["families"]
ROWS = [(round(0.3 * n + 0.05 * (n % 3), 6), 100 + 37 * n, 16 * (1 + n % 4)) for n in range(24)]
AZURE = "azure/AzureLLMInferenceTrace_conv.csv"
AZURE_ROWS = 60
REAL_DATA = os.environ.get("REPRO_DATA_DIR")


@pytest.fixture(autouse=True)
def _outside(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("REPRO_DATA_DIR", raising=False)


def write(name: str, rows=ROWS) -> str:
    forget()  # what this process has read of a file of that name
    lines = (json.dumps({"timestamp": t, "ContextTokens": a, "GeneratedTokens": b}) for t, a, b in rows)
    Path(name).write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return name


def bench(system: str, file: str, *options: object, code: int = 0) -> StoredRun:
    forget()
    asked = ("--system", system, "--platform", FAMILIES[system], "--workload", file, "--result-dir", "runs")
    result = repro("bench", *asked, *options, "--json")
    assert result.code == code, (result.out, result.err)
    (told,) = json.loads(result.out)["runs"]
    return api.load(api.Cell.from_dict(told["cell"] | {"knobs": without_basis(told["cell"])}), result_dir="runs")


def without_basis(cell) -> dict:
    return {name: value for name, value in dict(cell["knobs"]).items() if name != "basis"}


def served(run: StoredRun) -> list[tuple]:
    """When each request came, and the tokens of its prompt and of its answer."""
    requests = run.table("requests")
    answers = requests["gen_length"] if "gen_length" in requests else requests["output_len"]
    return list(zip(requests["arrival_s"], requests["prompt_len"], answers, strict=True))


@pytest.mark.parametrize("system", FAMILIES)
def test_every_family_serves_the_file_at_its_own_times(system):
    run = bench(system, write("mine.jsonl"), "--columns", COLUMNS, "--arrivals", "trace", "--time-scale", "2")
    assert run.cell.dataset == "mine"
    assert run.file.name.startswith(f"{system}_mine_{FAMILIES[system]}")
    assert run.validity.valid, run.validity.reasons
    found = served(run)
    assert [row[:2] for row in found] == [(pytest.approx(time / 2), prompt) for time, prompt, _ in ROWS]
    # A prefill ends with its first token; blocks of a diffusion model are whole, of 32 tokens.
    answers = {"laps": [1] * 24, "reserve": [1] * 24}.get(system, [row[2] for row in ROWS])
    if FAMILIES[system] == "l40s":
        answers = [32 * -(-tokens // 32) for tokens in answers]
    assert [row[2] for row in found] == answers
    assert run.record.manifest["dataset"]["location"] == "mine.jsonl"
    listed = json.loads(repro("list", "--metrics", system, "--json").out)["metrics"]
    assert {metric["name"] for metric in listed} == {*run.summary}


@pytest.mark.parametrize("system", ["dllm-serve", "vllm-sim", "laps"])
def test_the_same_fields_are_the_same_run_from_everywhere(system):
    fields = {"workload": write("mine.jsonl"), "columns": COLUMNS, "arrivals": "trace", "time_scale": 2.0}
    run = bench(system, "mine.jsonl", "--columns", COLUMNS, "--arrivals", "trace", "--time-scale", "2")
    again = api.run(system, platform=FAMILIES[system], result_dir="runs", **fields)
    grid = {"system": system, "platform": FAMILIES[system], "knobs": fields}
    Path("grid.json").write_text(json.dumps(grid))
    result = repro("sweep", "grid.json", "--result-dir", "runs", "--json")
    (told,) = json.loads(result.out)["runs"]
    assert {run.file.name, again.file.name, Path(told["file"]).name} == {
        path.name for path in Path("runs").glob("*.gz")
    }
    assert again.cell.key == run.cell.key


def test_other_contents_are_another_run():
    first = bench("vllm-sim", write("mine.jsonl"), "--columns", COLUMNS, "--arrivals", "trace")
    other = bench("vllm-sim", write("mine.jsonl", ROWS[:-1]), "--columns", COLUMNS, "--arrivals", "trace")
    assert first.cell.key != other.cell.key


PLAIN = COLUMNS.replace("arrival_s", "arrival")


def test_the_unit_and_the_order_of_a_file_are_part_of_its_run():
    in_ms = [(int(1000 * t), *rest) for t, *rest in ROWS]
    asked = ("--columns", PLAIN, "--arrivals", "trace")
    run = bench("vllm-sim", write("mine.jsonl", in_ms), *asked, "--time-unit", "ms")
    assert served(run)[-1][0] == pytest.approx(ROWS[-1][0] - ROWS[0][0], abs=1e-3)
    assert "24 in 7 s, 3.29 a second, timestamp in ms" in json.dumps(run.manifest)
    slow = bench("vllm-sim", "mine.jsonl", *asked, "--time-unit", "s")
    assert served(slow)[-1][0] == pytest.approx(1000 * ROWS[-1][0], rel=1e-3)
    assert slow.cell.key != run.cell.key
    backwards = bench("vllm-sim", write("mine.jsonl", in_ms[::-1]), *asked, "--time-unit", "ms", "--sort")
    assert sorted(served(backwards)) == sorted(served(run))
    refused(
        repro("bench", "--platform", "l40s", "--workload", "mine.jsonl", *asked), "'timestamp' is not said", "in us"
    )
    without = (*asked, "--time-unit", "ms", "--result-dir", "runs")
    refused(repro("bench", "--platform", "l40s", "--workload", "mine.jsonl", *without), "field 'timestamp'", "--sort")


def truncated(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(1 << 42)


NO_FILES = {
    "pipe": (os.mkfifo, "is a device or a pipe"),
    "folder": (Path.mkdir, "is a directory"),
    "device": (lambda path: path.symlink_to("/dev/zero"), "is a device or a pipe"),
    "loop": (lambda path: path.symlink_to(path.name), "does not exist"),
    "large": (truncated, "are the most that are read"),
    "long name": (lambda path: None, "File name too long"),
}


@pytest.mark.parametrize("kind", NO_FILES)
@pytest.mark.parametrize("command", CASES["commands that name a file"])
def test_what_is_no_plain_file_is_refused_wherever_one_is_named(command, kind, tmp_path):
    put, says = NO_FILES[kind]
    command = command.replace("FILE", "x" * 300) if kind == "long name" else command
    name = next(word.partition("=")[2] or word for word in command.split() if "FILE" in word or "xxx" in word)
    put(tmp_path / name)
    has_own_words = command.startswith("generate") or "--platform FILE" in command or "--platform xxx" in command
    refused(repro(*command.split()), name, *([] if has_own_words else [says]))


def test_a_rate_has_the_lengths_of_the_file():
    run = bench("vllm-sim", write("mine.jsonl"), "--columns", COLUMNS, "--request-rate", "2")
    found = served(run)
    assert sorted(row[1:] for row in found) == sorted(row[1:] for row in ROWS)
    assert [row[0] for row in found] != [row[0] for row in ROWS]


def test_objectives_are_those_that_are_given():
    """A file that is called like a trace has nothing of it."""
    asked = ("--columns", COLUMNS, "--arrivals", "trace")
    run = bench("ampd", write("dureader.jsonl"), *asked)
    assert run.facts["slo"] == {"ttft_s": None, "itl_s": None}
    assert run.facts["num_gpus"] == 32
    assert run.facts["planned_for"] == pytest.approx(23 / ROWS[-1][0])
    assert run.summary["slo_attainment"] is None
    assert run.record.manifest["dataset"]["description"].endswith("no objective: slo_ttft_s, slo_itl_s")
    held = bench("ampd", "dureader.jsonl", *asked, "--knob", "slo_ttft_s=1e-6")
    assert held.facts["slo"] == {"ttft_s": 1e-6, "itl_s": None}
    assert held.summary["slo_attainment"] == 0
    laps = bench("laps", "dureader.jsonl", *asked)
    assert laps.record.manifest["dataset"]["description"].endswith("objective: TTFT 0.4 s, that of platform='h200'")


@pytest.mark.parametrize("name", ["osc", "gsm8k"])
def test_a_file_called_like_a_data_set_or_a_task_is_neither(name):
    run = bench("dllm-serve", write(f"{name}.jsonl"), "--columns", COLUMNS)
    assert len(served(run)) == 24


def test_it_is_measured_with_prompts_of_its_lengths():
    write("mine.jsonl", [(0.0, 20, 8), (0.05, 9, 16)])
    result = repro(
        *("bench", "--workload", "mine.jsonl", "--columns", COLUMNS, "--arrivals", "trace", "--block-length", "8"),
        *("--result-dir", "runs", "--json"),
    )
    (told,) = json.loads(result.out)["runs"]
    assert (told["obtained"], told["valid"]) == ("measured", True), told["reasons"]
    run = api.load(api.Cell.from_dict(told["cell"] | {"knobs": without_basis(told["cell"])}), result_dir="runs")
    assert served(run) == [(0, 20, 8), (0.05, 9, 16)]


def test_times_that_fall_are_refused():
    write("mine.jsonl", ROWS[::-1])
    for system, platform in FAMILIES.items():
        asked = ("--system", system, "--platform", platform, "--columns", COLUMNS, "--arrivals", "trace")
        refused(
            repro("bench", "--workload", "mine.jsonl", *asked, "--result-dir", "runs"),
            "mine.jsonl line 2: field 'timestamp' is",
            "sort the",
        )


def test_a_unit_and_an_order_hold_for_what_is_planned_by_too():
    Path("late.jsonl").write_text(
        "".join(json.dumps({"timestamp": t, "prompt_len": 100, "gen_length": 16}) + "\n" for t in (8, 2, 6, 4))
    )
    for system in ("ampd", "vllm-sim"):
        run = bench(system, "late.jsonl", "--arrivals", "trace", "--time-unit", "s", "--sort")
        assert run.table("requests")["arrival_s"] == [0, 2, 4, 6]


def test_sessions_are_for_systems_that_serve_them():
    Path("own.jsonl").write_text('{"arrival_s": 1, "rounds": [[100, 16, 0.5], [50, 16]]}\n' * 24)
    run = bench("vllm-sim", "own.jsonl", "--arrivals", "trace")
    assert run.table("requests")["num_rounds"] == [2] * 24
    assert len(bench("laps", "own.jsonl", "--request-rate", "40").table("requests")["turn"]) == 48
    asked = ("--platform", "l40s", "--workload", "own.jsonl", "--result-dir", "runs")
    refused(repro("bench", *asked, "--arrivals", "trace"), "own.jsonl line 1: a session of 2 rounds, and requests have")


@pytest.mark.parametrize("is_whole", [False, True])
def test_a_server_is_asked_for_the_lengths_of_the_file(is_whole):
    write("mine.jsonl")
    rounds = [{"arrival_s": t, "rounds": [[a, b], [7, 3]]} for t, a, b in ROWS]
    Path("own.jsonl").write_text("".join(json.dumps(each) + "\n" for each in rounds), encoding="utf-8")
    own: dict = {"workload": "own.jsonl"} if is_whole else {"workload": "mine.jsonl", "columns": COLUMNS}
    given = {**own, "arrivals": "trace", "url": "http://127.0.0.1:1"}
    name = "own" if is_whole else "mine"
    fields = {"dataset": name, "platform": "endpoint", "executor": "torch", "rate": None, "seed": 0}
    cell = api.Cell(system="openai-http", knobs=tuple(given.items()), **fields)
    asked = workload_of(cell, resolve(cell.system, cell.requested), "model", None).conversations
    assert [each.arrival_s for each in asked] == [time for time, *_ in ROWS]
    later = [(7, 3)] * is_whole
    assert [[(len(turn.new_ids), turn.asked_tokens) for turn in each.turns] for each in asked] == [
        [row[1:], *later] for row in ROWS
    ]


def test_live_workers_have_the_sessions_of_the_file():
    knobs = {"workload": write("mine.jsonl"), "columns": COLUMNS, "arrivals": "trace"}
    fields = {"dataset": "mine", "platform": "cpu-tiny", "executor": "torch", "rate": None, "seed": 0}
    _, workload = SYSTEMS.get("ampd-live").prepare(api.Cell(system="ampd-live", knobs=tuple(knobs.items()), **fields))
    assert [(each.arrival_s, *each.rounds[0][:2]) for each in workload.sessions] == ROWS


PAGE = (
    (REPO / "docs" / "using.md")
    .read_text(encoding="utf-8")
    .partition("## A trace of your own\n")[2]
    .partition("\n## ")[0]
)
SHOWN = re.search(r"^```sh\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)[1].splitlines()


def test_the_page_shows_what_works():
    forget()
    Path("mine.csv").write_text(re.search(r"^```csv\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)[1], encoding="utf-8")
    name, _, value = SHOWN[0].partition("=")
    assert value == COLUMNS
    assert len(SHOWN) == 6
    for line in SHOWN[1:]:
        words = shlex.split(line.replace(f"${name}", value).replace("$REPRO_DATA_DIR", REAL_DATA or "absent"))
        if not any(word.startswith("absent/") for word in words):
            result = repro(*words[1:], "--result-dir", "runs")
            assert (result.code, "INVALID" in result.out) == (0, False), (line, result.out, result.err)
            assert ("AzureLLM" if "AzureLLM" in line else "mine") in result.out
            assert "osc" not in result.out


@pytest.mark.parametrize("name", NAMES)
def test_the_page_names_every_column(name):
    assert f"`{name}`" in PAGE


def azure() -> Path:
    path = Path(REAL_DATA or "") / AZURE
    if not path.is_file():
        pytest.skip(f"REPRO_DATA_DIR has no {AZURE}")
    return path


def nanoseconds(stamp: str) -> int:
    hours, minutes, seconds = stamp.split(" ")[1].split(":")
    return int((int(hours) * 3600 + int(minutes) * 60 + Fraction(seconds)) * 10**9)


@pytest.mark.parametrize("system", FAMILIES)
def test_a_slice_of_azure_s_trace(system):
    path = azure()
    with path.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))[:AZURE_ROWS]
    slice_of = ("--arrivals", "trace", "--num-prompts", AZURE_ROWS)
    run = bench(system, str(path), "--columns", COLUMNS.replace("timestamp", "TIMESTAMP"), *slice_of)
    assert run.cell.dataset == "AzureLLMInferenceTrace_conv"
    found = served(run)
    assert found == served(bench(system, str(path), *slice_of))
    begun = nanoseconds(rows[0]["TIMESTAMP"])
    times = [(nanoseconds(row["TIMESTAMP"]) - begun) / 1e9 for row in rows]
    assert [row[0] for row in found] == [pytest.approx(time, abs=1e-6) for time in times]
    prompts, answers = ([int(row[name]) for row in rows] for name in ("ContextTokens", "GeneratedTokens"))
    if FAMILIES[system] == "l40s":
        answers = [32 * -(-tokens // 32) for tokens in answers]
        prompts = [min(prompt, 4096 - answer) for prompt, answer in zip(prompts, answers, strict=True)]
    if FAMILIES[system] == "h200":
        answers = [1] * AZURE_ROWS
    assert [row[1:] for row in found] == [*zip(prompts, answers, strict=True)]
