"""The command tree and the one place where errors become messages and exit codes."""

import atexit
import csv
import logging
import os
import re
import signal
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from importlib import import_module
from pathlib import Path
from types import FrameType
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command

from engines.errors import UserError
from repro.cli.endings import DONE, FAILED, INTERRUPTED, STORED, TERMINATED, Ending, ending_of
from repro.cli.options import PANELS, RUNS, spread
from repro.cli.output import say, terminal_size_of
from repro.runs.clean import CleanFormatter
from repro.runs.environment import settle

# -- help -------------------------------------------------------------------------------------------------

ARGUMENTS = "Arguments"
FIRST = "Needed first"
"""The first panel, of commands with many options."""
OTHERS = "Options"
"""What is in none of the panels, or alone in one: ``--help``, of commands that write nothing."""
_MAY_BE_EMPTY = ("prompt", "system_prompt")
_UNBROKEN = "\u2011"
"""Stands for a hyphen while lines are broken: a name is not to end in the middle."""
NEEDED: Mapping[str, Sequence[str]] = STORED["needed"]
"""Options that a command shows first, where all are too many for one list."""


def examples_of(command: str) -> list[tuple[str, str]]:
    with Path(__file__).with_name("examples.csv").open(encoding="utf-8", newline="") as file:
        return [(row["line"], row["does"]) for row in csv.DictReader(file) if row["command"] == command]


class _HelpOff:
    def get_help_option(self, ctx: Any) -> Any:
        """Off where it is not given: of no value the library would ask pydantic what it is, which takes longer to load than all
        else that a help needs."""
        option: Any = super().get_help_option(ctx)  # type: ignore[misc]
        if option is not None:
            option.default = False
        return option


class PanelCommand(_HelpOff, TyperCommand):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.help = held(self.help or "")

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        _check_given(self, ctx, args)
        return super().parse_args(ctx, args)

    def get_help(self, ctx: Any) -> str:
        texts = self.callback.helps()  # type: ignore[union-attr]
        for param in self.params:
            param.help = param.help or texts.get(param.name)  # type: ignore[attr-defined]
        return released(super().get_help(ctx))

    def format_options(self, ctx: Any, formatter: Any) -> None:
        shown = [
            (param, record) for param in self.get_params(ctx) if (record := param.get_help_record(ctx)) is not None
        ]
        panels: dict[str, list[Any]] = {panel: [] for panel in (ARGUMENTS, FIRST, *PANELS, OTHERS)}
        needed = NEEDED.get(self.name or "", ())

        def place(each: Any) -> int:
            name = each[0].name
            return needed.index(name) if name in needed else len(needed)

        for param, (name, text) in sorted(shown, key=place):
            panel = getattr(param, "rich_help_panel", None) or (RUNS if param.name == "help" else OTHERS)
            if param.param_type_name == "argument":
                panel = ARGUMENTS
            elif not needed:
                panel = OTHERS
            elif param.name in needed:
                panel = FIRST
            panels[panel].append((name, held(_told(text))))
        if [name for name, _ in panels[RUNS]] == ["--help"]:
            panels[OTHERS] += panels.pop(RUNS)
        for panel, records in panels.items():
            if records:
                with formatter.section(panel):
                    formatter.write_dl(records)

    def format_help_text(self, ctx: Any, formatter: Any) -> None:
        super().format_help_text(ctx, formatter)
        if examples := examples_of(self.name or ""):
            with formatter.section("Examples"):
                for line, does in examples:
                    formatter.write(f"  # {does}\n  {line}\n")


def _check_given(command: TyperCommand, ctx: Any, args: list[str]) -> None:
    """Refuse what is empty, which as a path would be the working directory and as a name be passed over, and an option that is given
    twice and takes one value, of which the library keeps the last without a word."""
    values, _, given = command.make_parser(ctx).parse_args(args=list(args))
    options: list[Any] = [each for each in given if each.param_type_name == "option"]
    for option in options:
        value = values.get(option.name)
        told = value if isinstance(value, list | tuple) else (value,)
        is_empty = any(isinstance(each, str) and not each.strip() for each in told)
        if is_empty and option.name not in _MAY_BE_EMPTY:
            raise UserError(f"{max(option.opts, key=len)}='' is empty: give a value, or leave it out")
    for name in command.callback.paths:  # type: ignore[union-attr]
        if values.get(name) == "":
            raise UserError(f"{name}='' is empty: give a path")
    for option in dict.fromkeys(options):
        # Once more the same switch says nothing else; on and off, or two values, do.
        may_come_again = option.multiple or option.count or (option.is_flag and not option.secondary_opts)
        if not may_come_again and (num := given.count(option)) > 1:
            raise UserError(f"{max(option.opts, key=len)} is given {num} times and takes one value: keep one")


def _told(text: str) -> str:
    """Defaults that the library appends, as those that a help names itself: in its sentence."""
    return re.sub(r"\.?  (\[[^\[\]]*\])$", r" \1.", text)


def held(text: str) -> str:
    return text.replace("-", _UNBROKEN)


def released(text: str) -> str:
    return text.replace(_UNBROKEN, "-")


# -- commands ---------------------------------------------------------------------------------------------

GROUPS: Mapping[str, Mapping[str, str]] = STORED["groups"]
"""Where the function of each command is, below ``repro.cli``; it is loaded, and its options are made, when it is asked for."""
COMMANDS: Mapping[str, str] = {name: where for group in GROUPS.values() for name, where in group.items()}


@cache
def _built(name: str) -> Any:
    module, _, function = COMMANDS[name].partition(":")
    alone = typer.Typer(add_completion=False, rich_markup_mode=None)
    alone.command(name=name, cls=PanelCommand)(spread(getattr(import_module(f"repro.cli.{module}"), function)))
    command: Any = get_command(alone)
    for param in command.params:
        param._runtime_param = _Late()
    return command


class _Late:
    """In place of the library's conversion of a value, for which it loads pydantic: longer than most else of a command. What is
    of its kind already, or not there, needs none."""

    def coerce(self, value: Any, *, param: Any, ctx: Any) -> Any:
        takes_many = param.multiple or param.nargs != 1
        if not takes_many and (value is None or type(value) is param.type_descriptor.annotation):
            return value
        param._runtime_param = None
        return param.get_runtime_param().coerce(value, param=param, ctx=ctx)


class Root(_HelpOff, TyperGroup):
    """Lists the whole first sentence of every command's help, by what the commands are for."""

    def list_commands(self, ctx: Any) -> list[str]:
        return [*COMMANDS]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        return _built(cmd_name) if cmd_name in COMMANDS else None

    def get_help(self, ctx: Any) -> str:
        return released(super().get_help(ctx))

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        longest = max(map(len, COMMANDS))
        for title, names in GROUPS.items():
            with formatter.section(title):
                formatter.write_dl([(name.ljust(longest), held(_summary(name))) for name in names])


def _summary(name: str) -> str:
    """First sentence of the command's function, read off the source: no module of a command is loaded for a list of all."""
    module, _, function = COMMANDS[name].partition(":")
    source = Path(__file__).with_name(f"{module}.py").read_text(encoding="utf-8")
    told = re.search(rf'^def {function}\(.*?^    """(.*?)"""', source, re.DOTALL | re.MULTILINE)
    paragraph = "" if told is None else " ".join(told[1].partition("\n\n")[0].split())
    return re.split(r"(?<=\.) ", paragraph, maxsplit=1)[0]


app = typer.Typer(
    name="repro",
    cls=Root,
    help="Reproduce, benchmark and extend LLM-serving research. Every number says how it was obtained: "
    "measured, simulated or paper.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


def _say_version(is_asked: bool) -> None:
    if is_asked:
        from repro import __version__

        print(f"repro {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    verbose: bool = typer.Option(False, "--verbose", "-v", help="Log what is reused and why."),
    version: bool = typer.Option(
        False, "--version", help="Say the version, and exit.", is_eager=True, callback=_say_version
    ),
) -> None:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(CleanFormatter("%(message)s"))
    logging.basicConfig(level=logging.INFO if verbose else logging.WARNING, handlers=[handler], force=True)


def main() -> None:
    """Exit codes: 0 done, 1 a run failed or is INVALID, 2 bad input (one sentence), 130 interrupted, 143 terminated."""
    _settle_environment()
    with _streams(), _sigterm_as_interrupt() as terminated:
        try:
            ending = Ending(code=_command(sys.argv[1:]))
            sys.stdout.flush()
        except BaseException as error:
            ending = ending_of(error, is_terminated=bool(terminated))
        code = _say(ending)
    if code in (INTERRUPTED, TERMINATED):
        # Nobody is left to whom another one could be told.
        atexit.register(signal.signal, signal.SIGINT, signal.SIG_DFL)
    # An interrupt that passed through an exec of text (dataclasses are made by one) makes ``python -m`` end as SIGINT does,
    # whatever its code; until the next exec.
    exec("")
    sys.exit(code)


def _settle_environment() -> None:
    """Figures go to files alone, whatever a shell says of windows; libraries fail at sizes of a terminal that are none. What
    decides numbers is settled for every door (repro.runs.environment)."""
    settle()
    os.environ["MPLBACKEND"] = "agg"
    for name in ("COLUMNS", "LINES"):
        if (told := os.environ.get(name)) is not None and terminal_size_of(told) is None:
            del os.environ[name]


def _command(arguments: list[str]) -> int:
    for argument in arguments:
        # Bytes that are no text, which Python holds as half characters, end up in messages, file names and stored runs.
        if argument.encode("utf-8", "ignore").decode() != argument or "\0" in argument:
            raise UserError(f"argument {argument!r} is not UTF-8 text: write it as UTF-8, or rename the file")
    # Not ``app()``, which has its own ideas of interrupts and closed pipes.
    command = _tree()
    with command.make_context("repro", arguments) as context:
        command.invoke(context)
    return DONE


@cache
def _tree() -> Any:
    return get_command(app)


@contextmanager
def _streams() -> Iterator[None]:
    """What a stream's encoding lacks is written escaped; a closed stderr is silence."""
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115 - until the process ends
    if sys.stdout is None:
        print("error: standard output is closed: give it somewhere to go", file=sys.stderr)
        sys.exit(FAILED)
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    yield


@contextmanager
def _sigterm_as_interrupt() -> Iterator[list[int]]:
    """The first SIGTERM ends as Ctrl-C does. Yields what fills once it came."""
    received: list[int] = []

    def interrupt(number: int, _: FrameType | None) -> None:
        received.append(number)
        if len(received) == 1:  # `timeout` sends it to the process and to its group
            raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():
        yield received
        return
    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield received
    finally:
        signal.signal(signal.SIGTERM, before)


def _say(ending: Ending) -> int:
    """The code to end with: a help that nobody gets is no success."""
    try:
        if ending.help is not None:
            print(ending.help)
        sys.stdout.flush()
    except (OSError, ValueError) as error:
        if ending.help is not None:
            ending = ending_of(error)
        # Nobody reads it: what is still buffered must not fail again when Python ends.
        with suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    if ending.line is not None:
        with suppress(OSError, ValueError):
            # One line in a log, whole words on a terminal.
            (say if sys.stderr.isatty() else print)(ending.line, file=sys.stderr)
            sys.stderr.flush()
    return ending.code
