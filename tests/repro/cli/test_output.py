"""What a terminal shows: tables, paragraphs and help, whole words on lines that fit."""

import io
import json
import os
import re
import sys
import textwrap
from collections.abc import Sequence
from contextlib import redirect_stdout

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.command import commands, repro
from support.tables import data_beside

from repro.cli.main import COMMANDS
from repro.cli.output import count_text, number, print_table, say

words = st.text("abcxyz-_:/.0123456789", min_size=1, max_size=30)
cells = st.lists(words, min_size=1, max_size=8).map(" ".join)


@st.composite
def tables(draw: st.DrawFn) -> tuple[list[str], list[list[str]]]:
    columns = draw(st.lists(cells, min_size=1, max_size=7))
    row = st.lists(cells, min_size=len(columns), max_size=len(columns))
    return columns, draw(st.lists(row, max_size=4))


@given(tables(), st.integers(40, 130), st.sampled_from(["xterm-256color", "dumb"]))
def test_a_table_fits_and_breaks_no_word(table, width, kind):
    columns, rows = table
    out = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out):
        patch.setenv("COLUMNS", str(width))
        patch.setenv("TERM", kind)
        print_table("a title", columns, rows)
    lines = out.getvalue().splitlines()
    assert max(map(len, lines)) <= width
    shown = {word.strip(":;") for line in lines for word in line.split()}
    asked = {word.strip(":;") for each in (*rows, columns if rows else []) for cell in each for word in cell.split()}
    assert asked - {""} <= shown


def test_a_table_keeps_its_numbers(capsys, monkeypatch):
    """Words that are the same in every row go above first; numbers stay, with their units, while there is room."""
    monkeypatch.setenv("COLUMNS", "58")
    columns = ("trace", "variant of the scheduler", "served in time", "verdict of the run")
    print_table("title", columns, [("toolbench", each, "100.0 %", "VALID") for each in ("first come", "late first")])
    said, *table = capsys.readouterr().out.splitlines()[1:]
    assert said == "trace: toolbench; verdict of the run: VALID"
    assert [line for line in table if "first come" in line and "100.0 %" in line]
    monkeypatch.setenv("COLUMNS", "40")
    print_table(
        "title", ("a", "rank in all", "where it is"), [("x y", "1", "not stated anywhere")] * 2 + [("z", "2", "-")]
    )
    assert is_across(capsys.readouterr().out.splitlines())


VARIANTS = ("one queue, first come, first served", "classes apart, one long prompt a step (§3.2)")
NUMBERS = data_beside(__file__, "output")["numbers"]


def is_across(lines: Sequence[str]) -> bool:
    return any(re.fullmatch("-+(  -+)*", line.strip()) for line in lines)


def shown(columns: Sequence[str], rows: Sequence[Sequence[str]], capsys: pytest.CaptureFixture[str]) -> list[str]:
    print_table("title", columns, rows)
    return capsys.readouterr().out.splitlines()[1:]


def test_rows_are_no_towers_of_words(capsys, monkeypatch):
    """What words need is taken from where it is not needed, before a cell takes more than three lines."""
    monkeypatch.setenv("COLUMNS", "80")
    rows = [(variant, *(f"{number}{i}" for number in NUMBERS.values())) for i, variant in enumerate(VARIANTS)]
    _, *lines = shown(("variant", *NUMBERS), rows, capsys)
    assert is_across(lines)
    first = next(i for i, line in enumerate(lines) if line.startswith("one"))
    assert len([line for line in lines[first:] if line.strip()]) <= 2 * 3


def test_no_more_numbers_go_above_than_have_to(capsys, monkeypatch):
    """A table of names alone says nothing, even where every number is the same."""
    monkeypatch.setenv("COLUMNS", "80")
    columns = ("trace", "variant", *NUMBERS, "verdict")
    said, *lines = shown(columns, [("gaia", each, *NUMBERS.values(), "VALID") for each in VARIANTS], capsys)
    assert said == "trace: gaia; verdict: VALID"
    assert all([line for line in lines if number in line] for number in NUMBERS.values())
    monkeypatch.setenv("COLUMNS", "60")
    said, *lines = shown(columns, [("gaia", each, *NUMBERS.values(), "VALID") for each in VARIANTS], capsys)
    left = [name for name, number in NUMBERS.items() if [line for line in lines if number in line.split()]]
    assert 0 < len(left) < len(NUMBERS)
    assert {name for name in NUMBERS if f"{name}: " in said} | {*left} == {*NUMBERS}


def test_a_paragraph_is_one_line_where_there_is_no_terminal(capsys, monkeypatch):
    text = "gpus/dllm-serve " * 20
    monkeypatch.delenv("COLUMNS", raising=False)
    say(text, "  ")
    assert capsys.readouterr().out == f"  {text}\n"
    for told in ("0", "-5", "x", "²", "1" + "0" * 12):
        monkeypatch.setenv("COLUMNS", told)
        say(text)
        assert capsys.readouterr().out == f"{text}\n"
    monkeypatch.setenv("COLUMNS", "60")
    say(text)
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 60
    assert {word for line in lines for word in line.split()} == {"gpus/dllm-serve"}


def test_counts():
    assert [number(value) for value in (None, -0.04, -0.06, 1234.5)] == ["-", "0.0", "-0.1", "1,234.5"]
    assert [count_text(count, "run") for count in (0, 1, 2)] == ["0 runs", "1 run", "2 runs"]


@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_help_is_whole(command, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    result = repro(*[command] if command else [], "--help")
    assert (result.code, result.err) == (0, "")
    lines = result.out.splitlines()
    assert max(map(len, lines)) <= 80
    assert not [line for line in lines if re.search(r"\w-$|\.\.\.$", line.strip()) and "ARGS" not in line]
    assert "\u2011" not in result.out
    if not command:
        assert all(f"  {name} " in result.out for name in COMMANDS)


@pytest.mark.parametrize("command", [name for name in COMMANDS if "What is run:" in repro(name, "--help").out])
def test_panels_hold_every_option(command, monkeypatch):
    """And defaults are told in one way."""
    monkeypatch.setenv("COLUMNS", "200")
    said = repro(command, "--help").out
    _, _, others = said.partition("\nOptions:\n")
    assert others.split() in ([], ["--help", "Show", "this", "message", "and", "exit."])
    assert not re.search(r"\S  \[", said)
    assert "in generate" not in said


def test_no_arguments_are_a_question():
    result = repro()
    assert (result.code, result.err) == (0, "")
    assert result.out == repro("--help").out


def test_every_option_of_a_path_is_known_as_one():
    """An empty one would be the working directory."""
    found = {f"--{path.replace('_', '-')}" for command in commands().values() for path in command.callback.paths}
    assert found == {
        *("--dataset-path", "--export", "--golden", "--out", "--out-dir", "--plot", "--prompt-ids", "--result-dir"),
        *("--results", "--trace-path", "--file", "--folder", "--grid", "--measured", "--aisimulate"),
        *("--files", "--run"),
    }


def test_stdout_is_what_a_table_is_measured_by(monkeypatch):
    class Terminal(io.StringIO):
        def fileno(self) -> int:
            return 99

    def size_of(file: int) -> os.terminal_size:
        if file != 99:
            raise OSError
        return os.terminal_size((44, 10))

    out = Terminal()
    monkeypatch.delenv("COLUMNS", raising=False)
    monkeypatch.setattr(os, "get_terminal_size", size_of)
    monkeypatch.setattr(sys, "stdout", out)
    print_table("title", ("a", "b"), [("one two " * 6, "x")])
    assert max(map(len, out.getvalue().splitlines())) == 44


def test_a_dumb_terminal_has_its_columns(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setenv("TERM", "dumb")
    monkeypatch.setenv("FORCE_COLOR", "1")
    print_table("title", ("kind", "what it is"), [("system", "x " * 50)])
    assert max(map(len, capsys.readouterr().out.splitlines())) > 100


def test_json_is_alone_on_standard_output(tmp_path, monkeypatch):
    """What a policy prints goes to standard error."""
    source = """
        from engines.dllm.scheduling import PhaseScheduler

        class Loud(PhaseScheduler):
            def charge(self, sequence):
                print("charging")
                return sequence.query_tokens
    """
    (tmp_path / "loud_policy.py").write_text(textwrap.dedent(source))
    monkeypatch.syspath_prepend(tmp_path)
    options = ["--platform", "l40s", "--dataset-name", "osc", "--num-prompts", 1, "--scheduler", "loud_policy:Loud"]
    result = repro("bench --system dllm-serve", *options, "--result-dir", tmp_path, "--json")
    assert result.code == 0
    assert len(json.loads(result.out)["runs"]) == 1
    assert "charging" in result.err
