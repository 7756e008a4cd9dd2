"""The command line called in this process, as a user's shell would."""

import io
import re
import sys
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from typing import Any
from unittest import mock

from support.refusals import names
from typer.main import get_command

from repro.cli.main import COMMANDS, app, main


@dataclass(frozen=True, kw_only=True)
class Result:
    code: int
    out: str
    err: str


def repro(*arguments: object) -> Result:
    """The first of the arguments may be several words, as a shell would split them."""
    words = [word for each in arguments[:1] for word in str(each).split()] + [str(each) for each in arguments[1:]]
    out, err = io.StringIO(), io.StringIO()
    with mock.patch.object(sys, "argv", ["repro", *words]), redirect_stdout(out), redirect_stderr(err):
        try:
            main()
        except SystemExit as stop:
            code = stop.code
    assert isinstance(code, int)
    return Result(code=code, out=out.getvalue(), err=err.getvalue())


def table_of(out: str) -> list[dict[str, str]]:
    """Rows of the first table that was printed, and whatever lines came behind it, where a row is a line."""
    lines = out.splitlines()
    rule = next(i for i, line in enumerate(lines) if re.fullmatch("-+(  -+)*", line))
    ends = [(found.start(), found.end()) for found in re.finditer("-+", lines[rule])]
    head, *rows = ([line[slice(*each)].strip() for each in ends] for line in (lines[rule - 1], *lines[rule + 1 :]))
    return [dict(zip(head, row, strict=True)) for row in rows]


def commands() -> dict[str, Any]:
    """Every command with its options."""
    root: Any = get_command(app)
    return {name: root.get_command(None, name) for name in COMMANDS}


def instead(defaults: Sequence[object], options: Sequence[object]) -> list[object]:
    """The options behind those of the defaults, pairs of a name and a value, that they do not name themselves."""
    pairs = zip(defaults[::2], defaults[1::2], strict=True)
    return [*(word for name, value in pairs if name not in options for word in (name, value)), *options]


def refused(result: Result, *says: str, code: int = 2) -> str:
    """Exactly one line, on stderr, that says what is wrong."""
    assert result.code == code, result
    assert result.out == "", result
    lines = result.err.splitlines()
    assert len(lines) == 1, result.err
    assert lines[0].startswith("error: ")
    assert "fault of this program" not in lines[0]
    assert len(lines[0]) < 2100
    for part in says:
        assert names(lines[0], part), lines[0]
    return lines[0]
