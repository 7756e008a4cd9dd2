"""What a help says first, and in which order: groups of commands, examples, the options one needs, the rest by topic."""

import json
import re
import shlex

import pytest
from support.command import commands, repro
from support.documents import parsed

from repro.cli.list_command import entries_of
from repro.cli.main import ARGUMENTS, COMMANDS, FIRST, GROUPS, NEEDED, OTHERS, examples_of
from repro.cli.options import PANELS
from repro.runs.system import SYSTEMS

ONE_LIST = 15
"""The most options that a help may have in one list."""


def sections(text: str) -> dict[str, list[str]]:
    """The lines below each title."""
    found: dict[str, list[str]] = {}
    for line in text.splitlines():
        if (title := re.fullmatch(r"(\w.*):", line)) is not None:
            below = found.setdefault(title[1], [])
        elif found and line:
            below.append(line)
    return found


def options(lines: list[str]) -> list[str]:
    """Those that begin a line."""
    return [named[1] for line in lines if (named := re.match(r"  (--[\w-]+)", line))]


def test_commands_are_in_groups(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    found = sections(repro("--help").out)
    del found["Options"]
    named = {title: re.findall(r"^  (\S+)", "\n".join(lines), re.MULTILINE) for title, lines in found.items()}
    assert named == {title: [*names] for title, names in GROUPS.items()}
    assert sorted(name for names in named.values() for name in names) == sorted(COMMANDS)
    # A sentence is two lines at most.
    assert not [title for title, names in named.items() if len(found[title]) > 2 * len(names)]


@pytest.mark.parametrize("command", COMMANDS)
def test_every_help_has_one_order(command, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    found = sections(repro(command, "--help").out)
    topics = [FIRST, *PANELS, OTHERS] if command in NEEDED else [OTHERS]
    order = ["Examples", ARGUMENTS, *topics]
    assert [*found] == [title for title in order if title in found]
    assert found["Examples"] == [
        f"  {line}" for command_line, does in examples_of(command) for line in (f"# {does}", command_line)
    ]
    shown = [option for title, lines in found.items() if title != "Examples" for option in options(lines)]
    own = [param for param in commands()[command].params if param.param_type_name == "option"]
    assert sorted(shown) == sorted([*(param.opts[0] for param in own if param.opts[0].startswith("--")), "--help"])
    if command in NEEDED:
        assert options(found[FIRST]) == [f"--{name.replace('_', '-')}" for name in NEEDED[command]]
        assert len(NEEDED[command]) <= 8
    else:
        assert len(shown) <= ONE_LIST


def test_bench_begins_with_three_examples_and_eight_options():
    assert len(examples_of("bench")) == 3
    assert len(NEEDED["bench"]) == 8
    assert {param.name for param in commands()["bench"].params if param.required} <= {*NEEDED["bench"]}


@pytest.mark.parametrize("line", [line for command in COMMANDS for line, _ in examples_of(command)])
def test_examples_are_commands(line):
    name, *words = shlex.split(line)[1:]
    parsed(name, words)
    assert f"repro {name}" in line


@pytest.mark.parametrize("line", [line for line, _ in examples_of("bench")])
def test_examples_of_bench_can_run(line, tmp_path):
    """Prepared as for a run; those that are simulated are run."""
    can_run = "--platform" in line
    words = [*shlex.split(line)[1:], "--result-dir", tmp_path, *([] if can_run else ["--dry-run"])]
    result = repro(*words)
    assert result.code == 0, result
    assert "INVALID" not in result.out
    assert ("VALID" in result.out) == can_run


@pytest.mark.parametrize("line", [line for line, _ in examples_of("generate")])
def test_examples_of_generate_are_answered(line):
    result = repro(*shlex.split(line)[1:])
    assert (result.code, result.err) == (0, "")
    assert re.search(r"#### 8$", result.out.strip())


@pytest.mark.parametrize("system", [*SYSTEMS, "support.md1:MD1"])
def test_knobs_are_one_table_at_80_columns(system, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    result = repro("list", "--knobs", system)
    assert (result.code, result.err) == (0, "")
    title, head, rule, *lines = result.out.splitlines()
    assert (title, head.split()) == (f"Knobs of {system}", ["knob", "takes", "what", "it", "is"])
    assert re.fullmatch("-+  -+  -+", rule)
    assert max(map(len, lines)) <= 80
    second, third = (found.start() for found in list(re.finditer("-+", rule))[1:])
    rows: list[list[str]] = []
    for line in lines:
        if not line.startswith(" "):
            rows.append(["", "", ""])
        parts = (line[: second - 2], line[second : third - 2], line[third:])
        rows[-1] = [f"{before} {part.strip()}".strip() for before, part in zip(rows[-1], parts, strict=True)]
    for entry, (name, takes, said) in zip(entries_of(system), rows, strict=True):
        assert name == entry.name
        assert takes == entry.takes.replace("from 1 to 1,000,000,000,000,000", "at least 1")
        assert entry.text.removesuffix(".") in said
        assert not entry.default or f"[default: {entry.default}]." in said
        assert entry.only in said


@pytest.mark.parametrize("system", [*SYSTEMS, "support.md1:MD1"])
def test_every_metric_of_a_system_is_explained(system):
    listed = json.loads(repro("list", "--metrics", system, "--json").out)["metrics"]
    names = [metric["name"] for metric in listed]
    assert len(names) == len({*names}) > 0
    assert [metric for metric in listed if not (metric["unit"] and metric["formula"] and metric["undefined"])] == []
    table = repro("list", "--metrics", system).out
    assert [name for name in names if not re.search(rf"^{name}\b|^metric +{name}$", table, re.MULTILINE)] == []


def test_knobs_and_metrics_are_two_lists():
    result = repro("list", "--knobs", "ampd", "--metrics", "ampd")
    assert (result.code, result.out) == (2, "")
    assert "--metrics" in result.err
