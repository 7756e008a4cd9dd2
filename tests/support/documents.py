"""Code blocks of documents: found, taken apart into what can be run, and run in a folder of their own."""

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple
from unittest import mock

from support.command import Result, commands, repro

from engines.cost.roofline import GPUS
from engines.knobs import knobs_of
from repro.cli.figure import TRUTH
from repro.families.platforms import PLATFORMS
from repro.paths import REPO
from repro.reports.figures import figure
from repro.runs.system import SYSTEMS, settings_of

OPERATORS = re.compile(r"[|<>;&]+")
SHIM = '#!/bin/sh\nPYTHONPATH="{root}:$PYTHONPATH" exec "{python}" {module} "$@"\n'
SCRIPT = """
import sys
from pathlib import Path
import repro.paths
repro.paths.LOCAL = Path("local")
exec(compile(sys.stdin.read(), "block", "exec"), {"__name__": "__main__"})
"""
"""Runs that are not told where to go go into the folder."""


class Unit(NamedTuple):
    """What is run, or not, as a whole: a line of a shell with those that continue it, or the block of any other language."""

    page: str
    kind: str
    text: str
    file: str | None
    """The name that stands above the block: it is a file."""

    @property
    def first(self) -> str:
        return self.text.strip().partition("\n")[0]


def units(page: str) -> list[Unit]:
    text = (REPO / page).read_text(encoding="utf-8")
    found = []
    for block in re.finditer(r"(?:^`([\w./]+)`:\n\n)?^( *)```(\w*)\n(.*?)^ *```", text, re.DOTALL | re.MULTILINE):
        name, indent, kind, content = block.groups()
        content = re.sub(f"^{indent}", "", content, flags=re.MULTILINE)
        found += [Unit(page, kind, each, name) for each in (_lines(content) if kind == "sh" else [content])]
    return found


def files_of(page: str) -> dict[str, str]:
    return {unit.file: unit.text for unit in units(page) if unit.file is not None}


def lines_of(page: str) -> list[str]:
    return [unit.text for unit in units(page) if unit.kind == "sh"]


def _lines(script: str) -> Iterator[str]:
    """Continued ones whole, a quotation that goes over several too; no comments."""
    held = ""
    for line in script.splitlines():
        held = f"{held}\n{line}" if held else line
        try:
            words = shlex.split(held, comments=True)
        except ValueError:
            continue
        if held.endswith("\\"):
            continue
        if words:
            yield held
        held = ""
    assert not held, held


def calls_in(line: str) -> Iterator[list[str]]:
    """The words behind ``repro`` of each call in a line of a shell."""
    lexer = shlex.shlex(line.replace("\\\n", " "), posix=True, punctuation_chars="|<>;&")
    lexer.whitespace_split = True
    words = [*lexer]
    for place, word in enumerate(words):
        is_module = words[max(place - 1, 0)] == "-m" and word == "repro"
        is_program = word == "repro" or word.endswith("/repro")
        if is_module or (
            is_program and (place == 0 or OPERATORS.fullmatch(words[place - 1]) or "=" in words[place - 1])
        ):
            behind = words[place + 1 :]
            end = next((i for i, each in enumerate(behind) if OPERATORS.fullmatch(each)), len(behind))
            yield behind[:end]


def parsed(name: str, words: Sequence[str]) -> dict[str, object]:
    """What a command is given by these words; nothing runs. Fails where there is no such command, option, system, platform,
    figure, knob, or word to choose."""
    command = commands()[name]
    with command.make_context(name, [*words]) as context:
        given = dict(context.params)
    knobs = [knob for system in SYSTEMS for kind in settings_of(system) for knob in knobs_of(kind).values()]
    known = {option: set[str]() for option in ("system", "platform", "knob")}
    known["system"] |= {*SYSTEMS, "ar"}
    known["platform"] |= {*PLATFORMS, *(each.name for each in GPUS)}
    known["knob"] |= {knob.name for knob in knobs}
    for option in {knob.name for knob in knobs} - {*known}:
        own = [knob.choices for knob in knobs if knob.name == option]
        if all(own):
            known[option] = {word for choices in own for word in choices}
    for option, names in known.items():
        values = given.get(option)
        for value in [values] if isinstance(values, str) else values or ():
            told = value.partition("=")[0] if option == "knob" else value
            assert told in names or ":" in told or (option == "knob" and ":" in str(given.get("system"))), (
                name,
                option,
                value,
            )
    drawn = None if name not in ("reproduce", "figure") or given.get("tier") else str(given["name"])
    if drawn not in (None, TRUTH) and not str(drawn).endswith(":"):
        figure(str(drawn))
    return given


def resized(words: Sequence[str], sizes: Mapping[str, str]) -> list[str]:
    """With these options in place of those that are there, or behind them."""
    left = [*words]
    for name, value in sizes.items():
        if name in left:
            left[left.index(name) + 1] = value
        else:
            left += [name, value]
    return left


def run_line(line: str, folder: Path, sizes: Mapping[str, str]) -> Result:
    """A line of a shell in a folder: a call of ``repro`` by itself, with or without a variable, in this process, with sizes of a test."""
    (words, *others) = [*calls_in(line)] or [[]]
    plain = re.sub(r"'[^']*'|\s#.*", "", line)
    alone = None if others or OPERATORS.search(plain) else re.match(r"(?:(\w+)=(\S+) )?[\w/.]*repro ", line)
    if words and alone:
        own = {param.name for param in commands()[words[0]].params}
        stored = {"--result-dir": "runs"} if "result_dir" in own and "--result-dir" not in words else {}
        with mock.patch.dict(os.environ, {alone[1]: str(Path(alone[2]).expanduser())} if alone[1] else {}):
            return repro(words[0], *resized(words[1:], {**stored, **sizes}))
    assert not sizes, line
    for name, module in (("repro", "-m repro"), ("python", "")):
        program = folder / ".venv" / "bin" / name
        program.parent.mkdir(parents=True, exist_ok=True)
        program.write_text(SHIM.format(root=REPO, python=sys.executable, module=module))
        program.chmod(0o755)
    return _ran(["bash", "-c", f"set -o pipefail; {line}"], folder)


def run_script(text: str, folder: Path) -> Result:
    return _ran([sys.executable, "-c", SCRIPT], folder, text)


def _ran(command: Sequence[str], folder: Path, given: str = "") -> Result:
    path = f"{folder / '.venv' / 'bin'}{os.pathsep}{os.environ['PATH']}"
    own = {**os.environ, "PYTHONPATH": str(REPO), "PATH": path}
    done = subprocess.run(command, cwd=folder, env=own, input=given, capture_output=True, text=True, check=False)
    return Result(code=done.returncode, out=done.stdout, err=done.stderr)
