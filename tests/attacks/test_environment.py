"""What surrounds a command: variables, users without a name, folders that are gone, input that never ends."""

import io
import os
import sys
from pathlib import Path

import pytest
from support.command import refused, repro
from support.stored_runs import parts

from repro.cli.main import ending_of
from repro.runs.clean import clean_command, clean_text

BENCH = ("bench", "--platform", "rtx4090", "--num-prompts", 1)


@pytest.mark.parametrize("value", ["0", "-5", "x", "²", "1" + "0" * 12, "9" * 5000, ""])
def test_a_terminal_of_no_size(value, monkeypatch):
    monkeypatch.setenv("COLUMNS", value)
    monkeypatch.setenv("LINES", value)
    result = repro("plan")
    assert (result.code, result.err) == (0, "")
    assert max(map(len, result.out.splitlines())) <= 160


def test_a_backend_that_draws_windows_is_not_asked_for(tmp_path, monkeypatch):
    monkeypatch.setenv("MPLBACKEND", "nosuch")
    assert repro("list").code == 0
    assert os.environ["MPLBACKEND"] == "agg"


@pytest.mark.parametrize("home", [None, "", "."])
def test_a_user_without_a_home_has_none_to_hide(home, tmp_path, monkeypatch):
    def nobody(_: object = None) -> Path:
        raise RuntimeError("Could not determine home directory.")

    if home is None:
        monkeypatch.setattr(Path, "home", nobody)
    else:
        monkeypatch.setenv("HOME", home)
    assert clean_text("a.b, ../x.y") == "a.b, ../x.y"
    assert clean_command(["/usr/bin/repro", "bench", "/tmp/x.jsonl"]) == ["repro", "bench", ".../x.jsonl"]
    result = repro(*BENCH, "--result-dir", tmp_path)
    assert result.code == 0, result
    (file,) = tmp_path.iterdir()
    assert "--num-prompts" in parts(file)["provenance"]["command"]


def test_a_working_folder_that_is_gone(tmp_path, monkeypatch):
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert str(ending_of(FileNotFoundError(2, "No such file or directory")).line).startswith(
        "error: the working folder, which is no longer there: "
    )
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("number", "fix"), [(27, "ulimit -f"), (17, "another name"), (40, "links"), (36, "shorter"), (28, "make room")]
)
def test_what_a_system_refuses_has_a_fix(number, fix):
    assert fix in str(ending_of(OSError(number, os.strerror(number), "x")).line)


def test_a_plug_in_that_ends_the_program(tmp_path, monkeypatch):
    (tmp_path / "ending_module.py").write_text("import sys\nsys.exit(0)\n")
    monkeypatch.syspath_prepend(tmp_path)
    refused(repro(*BENCH, "--system", "ending_module:X", "--result-dir", tmp_path / "r"), "SystemExit: 0")


def test_a_table_that_nobody_reads_is_no_fault():
    ended = SystemExit(1)
    ended.__context__ = BrokenPipeError()  # as rich ends a program
    assert "what reads the output has closed it" in str(ending_of(ended).line)


def test_input_that_is_closed_or_never_ends(monkeypatch):
    command = ("generate", "--prompt", "-", "--gen-length", 4, "--block-length", 4)
    monkeypatch.setattr(sys, "stdin", None)
    refused(repro(*command), "standard input is closed")
    with open("/dev/zero") as endless:
        monkeypatch.setattr(sys, "stdin", endless)
        refused(repro(*command), "standard input is a device")
    with open(os.devnull) as nothing:
        monkeypatch.setattr(sys, "stdin", nothing)
        refused(repro(*command), "prompt is empty")
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\xff")))
    refused(repro(*command), "not UTF-8")
