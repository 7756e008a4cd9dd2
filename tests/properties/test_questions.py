"""The numbers on the page of questions are those of its commands, whole: ``questions.json`` keeps what these say. To make it again, which
takes minutes: ``python tests/properties/test_questions.py FOLDER`` with the page's files in it."""

import json
import os
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from support.command import repro
from support.documents import Unit, calls_in, units

from repro.paths import REPO
from repro.runs.cell import Cell
from repro.runs.system import SYSTEMS

PAGE = "docs/questions.md"
STORED = Path(__file__).with_name("questions.json")
KEPT = (
    "ran",
    "system",
    "platform",
    "gpus",
    "plan",
    "schedule",
    "change",
    "percent",
    "rate",
    "session_attainment",
    "longest_ttft_s",
)
KEPT += ("dollars_per_1000_good", "deployment", "ttft_p95_of_slo", "itl_p95_of_slo", "begin_h", "rank")
KEPT += ("fixed_gpu_hours", "stepped_gpu_hours", "throughput_tok_s", "slo_attainment", "prefill_load")
NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)?")


def numbers_in(value: Any) -> Iterator[float]:
    """Also of texts."""
    if isinstance(value, dict | list):
        for each in value.values() if isinstance(value, dict) else value:
            yield from numbers_in(each)
    elif value is not None:
        yield from (float(each.replace(",", "")) for each in NUMBER.findall(str(value)))


def is_told(text: str, known: Sequence[float]) -> bool:
    """Whether each number of a text is one of these, as it is or in percent, to its last digit."""
    for word in NUMBER.findall(text):
        number, half = float(word.replace(",", "")), 0.501 * 10 ** -len(word.partition(".")[2])
        if all(abs(scale * each - number) > half for each in known for scale in (1, 100)):
            return False
    return True


def wrong(section: str, unit: Unit, told: dict[str, Any]) -> list[str]:
    """Rows of a question's tables, and paragraphs, with a number that no row of its answers has, or nothing of them."""
    rows = [[*numbers_in(row)] for row in told["rows"]]
    every = [each for row in rows for each in row] + [*numbers_in(told["notes"]), *numbers_in(unit.text)]
    body = re.sub(r"```.*?```|\]\([^)]*\)|`--[^`]*`", "", section.partition("\n")[2], flags=re.DOTALL)
    lines = [line for line in body.splitlines() if line.startswith("|")][2:]
    found = [line for line in lines if not any(is_told(line, row) for row in rows)]
    return found + [each for each in re.split(r"\n\n", body) if "|" not in each and not is_told(each, every)]


def sections() -> list[str]:
    return re.split(r"^## \d+\. ", (REPO / PAGE).read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]


QUESTIONS = [unit for unit in units(PAGE) if unit.kind == "sh"]
TOLD = json.loads(STORED.read_text(encoding="utf-8")) if STORED.exists() else []


@pytest.mark.parametrize("place", range(10))
def test_numbers_are_those_of_the_run_and_a_planted_digit_is_found(place):
    section, unit, told = sections()[place], QUESTIONS[place], TOLD[place]
    assert told["command"] == unit.text
    assert "--plot" in unit.text
    assert wrong(section, unit, told) == []
    cells = re.findall(r"(?<=\S \| )[\d,]*\.?\d+(?= (?:% )?\|)", section)
    assert cells
    for cell in dict.fromkeys(cells):
        planted = cell[:-1] + str((int(cell[-1]) + 1) % 10)
        assert wrong(section.replace(f"| {cell} ", f"| {planted} "), unit, told), (cell, planted)


@pytest.mark.parametrize("place", [0, 6])
def test_the_answer_is_made_again(place, tmp_path, monkeypatch):
    """Its first seed, at the rate that is told."""
    monkeypatch.chdir(tmp_path)
    Path("mine.jsonl").write_text('{"rounds": [[792, 233]]}\n' * 40)
    assert made_again(TOLD[place]["cell"]) == pytest.approx(TOLD[place]["mean_s"], rel=1e-9)


def made_again(cell: dict[str, Any]) -> float:
    """Mean seconds of a request."""
    system = SYSTEMS.get(cell["system"])
    deployment, workload = system.prepare(Cell.from_written(cell))
    return float(system.family.summarize(deployment.run(workload))["e2el_s"]["mean"])


def answered(unit: Unit) -> dict[str, Any]:
    ((name, *words),) = calls_in(unit.text)
    told = json.loads(repro(name, *words, "--json").out)
    first = told.get("answers", [{}])[0]
    rows = [row for kind in ("answers", "effects", "plans") for row in told.get(kind, [])] + first.get("steps", [])
    rows += [run["cell"] | run["facts"] | run["summary"] for run in told.get("runs", [])]
    found = [{name: row[name] for name in KEPT if row.get(name) is not None} for row in rows]
    for run, row in zip(told.get("runs", []), found, strict=False):
        row["longest_ttft_s"] = run["summary"]["ttft_s"]["max"]
    again = {"cell": first["cell"], "mean_s": made_again(first["cell"])} if first else {}
    return {"command": unit.text, "rows": found, "notes": told.get("notes", []), **again}


if __name__ == "__main__":
    os.chdir(sys.argv[1])
    asked = [int(word) for word in sys.argv[2:]] or range(10)
    found = [answered(QUESTIONS[place]) if place in asked else TOLD[place] for place in range(10)]
    STORED.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
