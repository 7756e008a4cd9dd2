"""Every block of code in the documents runs as it stands there, at sizes of a test, or says here why it does not."""

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from support.command import Result, repro
from support.documents import Unit, calls_in, parsed, run_line, run_script, units
from support.tables import data_beside

from repro.paths import REPO

pytestmark = pytest.mark.usefixtures("no_data")

PAGES = [
    "README.md",
    "CONTRIBUTING.md",
    *sorted(str(path.relative_to(REPO)) for path in (REPO / "docs").glob("*.md")),
    "datasets/README.md",
    "results/README.md",
]

TABLES = data_beside(__file__, "blocks")


def table_of(name: str) -> Mapping[tuple[str, str], Any]:
    """By document and how the line, or the block, begins."""
    return {(page, first): said for page, table in TABLES[name].items() for first, said in table.items()}


NOT_RUN, ELSEWHERE, FEWER = table_of("not_run"), table_of("elsewhere"), table_of("fewer")
ENDS_WITH_1 = table_of("ends_with_1")


def of(unit: Unit, table: Mapping[tuple[str, str], object]) -> list[tuple[str, str]]:
    return [key for key in table if key[0] == unit.page and unit.first.startswith(key[1])]


def is_run(unit: Unit) -> bool:
    return not of(unit, NOT_RUN) and not of(unit, ELSEWHERE)


def write_grid(text: str, folder: Path) -> None:
    (folder / "grid.yaml").write_text(text.replace("num_prompts: 16", "num_prompts: 4"))


def draw_requests(text: str, folder: Path) -> None:
    (folder / "requests.jsonl").write_text(text)
    asked = ("--dataset-path", folder / "requests.jsonl", "--result-dir", folder / "runs")
    result = repro("bench --platform rtx4090 --arrivals trace --num-prompts 2", *asked)
    assert (result.code, "INVALID" in result.out) == (0, False), result


def name_folders(text: str, folder: Path) -> None:
    named = re.findall(r"^([\w/]+/) ", text, re.MULTILINE) + re.findall(r"^(tests/)$", text, re.MULTILINE)
    assert len(named) == len(re.findall(r"^\S", text, re.MULTILINE))
    assert [name for name in named if not (REPO / name).is_dir()] == []


USED: Mapping[tuple[str, str], Callable[[str, Path], None]] = {
    ("README.md", "engines/"): name_folders,
    ("docs/using.md", "system: [dllm-serve, sparse-dllm]"): write_grid,
    ("datasets/README.md", '{"arrival_s": 0.0'): draw_requests,
}
"""What is no program: it is put to its use."""


@pytest.mark.parametrize("page", [page for page in PAGES if any(map(is_run, units(page)))])
def test_blocks_run(page, tmp_path, monkeypatch):
    """One after the other, in one folder."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tests").symlink_to(REPO / "tests")
    rounds = re.findall(r"`(\[\[.*?\]\])`", (REPO / page).read_text(encoding="utf-8"))
    (tmp_path / "mine.jsonl").write_text("".join(f'{{"rounds": {each}}}\n' for each in rounds * 40))
    comes = "".join(f'{{"arrival_s": {60 * n}, "rounds": [[792, 233]]}}\n' for n in range(120))
    (tmp_path / "morning.jsonl").write_text(comes)
    for unit in filter(is_run, units(page)):
        if used := of(unit, USED):
            USED[used[0]](unit.text, tmp_path)
        else:
            result = ran(unit, tmp_path)
            # A comparison ends with 1 where something has changed.
            may_be_1 = unit.text.startswith("repro compare") and not result.err
            codes = (1,) if of(unit, ENDS_WITH_1) else (0, 1) if may_be_1 else (0,)
            assert result.code in codes, (unit.text, result)


def ran(unit: Unit, folder: Path) -> Result:
    assert unit.kind in ("sh", "python"), f"{unit.page}: nothing here runs {unit.kind!r}: {unit.first}"
    sizes = {name: value for key in of(unit, FEWER) for name, value in FEWER[key].items()}
    if unit.kind == "sh":
        return run_line(unit.text, folder, sizes)
    text = unit.text
    for name, value in sizes.items():
        assert name in text
        text = text.replace(name, value)
    return run_script(text, folder)


@pytest.mark.parametrize("page", PAGES)
def test_calls_are_read_as_they_stand(page):
    """Also of what is not run: commands, options, words to choose from, systems, platforms and figures are there."""
    for unit in units(page):
        for name, *words in calls_in(unit.text) if unit.kind == "sh" else ():
            if not any(word.startswith(("mine.", "mine/")) for word in words):
                parsed(name, words)


def test_every_reason_is_of_a_block_and_every_block_has_one():
    every = [unit for page in PAGES for unit in units(page)]
    for table in (NOT_RUN, ELSEWHERE, FEWER, USED, ENDS_WITH_1):
        found = {key for unit in every for key in of(unit, table)}
        assert [key for key in table if key not in found] == []
    for unit in every:
        assert len(of(unit, NOT_RUN) + of(unit, ELSEWHERE)) <= 1, unit
    assert [path for path in ELSEWHERE.values() if not (REPO / path).is_file()] == []


def test_no_block_is_missed():
    """None is without a fence: what is only indented is found by nobody."""
    for page in PAGES:
        text = (REPO / page).read_text(encoding="utf-8")
        block = re.compile(r"^ *```\w*\n.*?^ *```$", re.DOTALL | re.MULTILINE)
        assert len(re.findall(r"^ *```", text, re.MULTILINE)) == 2 * len(block.findall(text)), page
        assert re.findall(r"\n\n {4}.*", block.sub("", text)) == [], page
