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
from contextlib import contextmanager, nullcontext, suppress
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
from repro.cli.output import json_alone, say, terminal_size_of
from repro.runs.clean import CleanFormatter
from repro.runs.environment import settle

# -- help -------------------------------------------------------------------------------------------------

ARGUMENTS = "Arguments"
FIRST = "Needed first"
"""The first panel, for commands with many options."""
OTHERS = "Options"
"""The panel for all options that have no panel, and for ``--help`` if it would be alone in its panel."""
_MAY_BE_EMPTY = ("prompt", "system_prompt")
_UNBROKEN = "\u2011"
"""Replaces hyphens while lines are wrapped, so that no name breaks at one."""
NEEDED: Mapping[str, Sequence[str]] = STORED["needed"]
"""Options that a command's help shows first, if it has too many for one list."""


def examples_of(command: str) -> list[tuple[str, str]]:
    with Path(__file__).with_name("examples.csv").open(encoding="utf-8", newline="") as file:
        return [(row["line"], row["does"]) for row in csv.DictReader(file) if row["command"] == command]


class _HelpOff:
    def get_help_option(self, ctx: Any) -> Any:
        """Return the option with default False. Without a default, the library asks pydantic for its type, and loading pydantic takes
        longer than all else of a help."""
        option: Any = super().get_help_option(ctx)  # type: ignore[misc]
        if option is not None:
            option.default = False
        return option


class PanelCommand(_HelpOff, TyperCommand):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.help = with_unbroken_hyphens(self.help or "")

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        _check_options(self, ctx, args)
        return super().parse_args(ctx, args)

    def get_help(self, ctx: Any) -> str:
        texts = self.callback.helps()  # type: ignore[union-attr]
        for param in self.params:
            param.help = param.help or texts.get(param.name)  # type: ignore[attr-defined]
        return with_plain_hyphens(super().get_help(ctx))

    def format_options(self, ctx: Any, formatter: Any) -> None:
        visible = [
            (param, record) for param in self.get_params(ctx) if (record := param.get_help_record(ctx)) is not None
        ]
        panels: dict[str, list[Any]] = {panel: [] for panel in (ARGUMENTS, FIRST, *PANELS, OTHERS)}
        needed = NEEDED.get(self.name or "", ())

        def rank(record: Any) -> int:
            name = record[0].name
            return needed.index(name) if name in needed else len(needed)

        for param, (name, text) in sorted(visible, key=rank):
            panel = getattr(param, "rich_help_panel", None) or (RUNS if param.name == "help" else OTHERS)
            if param.param_type_name == "argument":
                panel = ARGUMENTS
            elif not needed:
                panel = OTHERS
            elif param.name in needed:
                panel = FIRST
            panels[panel].append((name, with_unbroken_hyphens(_with_default_in_sentence(text))))
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
                for line, purpose in examples:
                    formatter.write(f"  # {purpose}\n  {line}\n")


def _check_options(command: TyperCommand, ctx: Any, args: list[str]) -> None:
    """Refuse an empty value: a path would mean the working directory, and a name would be ignored. Also refuse an option that takes one
    value but is given twice, as the library silently keeps the last."""
    values, _, parsed = command.make_parser(ctx).parse_args(args=list(args))
    options: list[Any] = [option for option in parsed if option.param_type_name == "option"]
    for option in options:
        value = values.get(option.name)
        items = value if isinstance(value, list | tuple) else (value,)
        is_empty = any(isinstance(value, str) and not value.strip() for value in items)
        if is_empty and option.name not in _MAY_BE_EMPTY:
            raise UserError(f"{max(option.opts, key=len)}='' is empty: give a value, or leave it out")
    for name in command.callback.paths:  # type: ignore[union-attr]
        if values.get(name) == "":
            raise UserError(f"{name}='' is empty: give a path")
    for option in dict.fromkeys(options):
        # Repeating a switch changes nothing, but giving it both on and off, or two values, is refused.
        may_come_again = option.multiple or option.count or (option.is_flag and not option.secondary_opts)
        if not may_come_again and (count := parsed.count(option)) > 1:
            raise UserError(f"{max(option.opts, key=len)} is given {count} times and takes one value: keep one")


def _with_default_in_sentence(text: str) -> str:
    """Move a default that the library appended into the sentence, as in our own help texts."""
    return re.sub(r"\.?  (\[[^\[\]]*\])$", r" \1.", text)


def with_unbroken_hyphens(text: str) -> str:
    return text.replace("-", _UNBROKEN)


def with_plain_hyphens(text: str) -> str:
    return text.replace(_UNBROKEN, "-")


# -- commands ---------------------------------------------------------------------------------------------

GROUPS: Mapping[str, Mapping[str, str]] = STORED["groups"]
"""The function of each command, below ``repro.cli``. Its module is loaded, and its options are made, only when needed."""
COMMANDS: Mapping[str, str] = {name: where for group in GROUPS.values() for name, where in group.items()}


@cache
def _build_command(name: str) -> Any:
    module, _, function = COMMANDS[name].partition(":")
    alone = typer.Typer(add_completion=False, rich_markup_mode=None)
    alone.command(name=name, cls=PanelCommand)(spread(getattr(import_module(f"repro.cli.{module}"), function)))
    command: Any = get_command(alone)
    for param in command.params:
        param._runtime_param = _Late()
    return command


class _Late:
    """Replaces the library's conversion of values, which loads pydantic and so takes longer than most commands. A value that already has
    its type, or is missing, needs no conversion."""

    def coerce(self, value: Any, *, param: Any, ctx: Any) -> Any:
        takes_many = param.multiple or param.nargs != 1
        if not takes_many and (value is None or type(value) is param.type_descriptor.annotation):
            return value
        param._runtime_param = None
        return param.get_runtime_param().coerce(value, param=param, ctx=ctx)


class Root(_HelpOff, TyperGroup):
    """Lists the first sentence of every command's help, grouped by what commands are for."""

    def list_commands(self, ctx: Any) -> list[str]:
        return [*COMMANDS]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        return _build_command(cmd_name) if cmd_name in COMMANDS else None

    def get_help(self, ctx: Any) -> str:
        return with_plain_hyphens(super().get_help(ctx))

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        longest = max(map(len, COMMANDS))
        for title, names in GROUPS.items():
            with formatter.section(title):
                formatter.write_dl([(name.ljust(longest), with_unbroken_hyphens(_summary(name))) for name in names])


def _summary(name: str) -> str:
    """Return the first sentence of a command's docstring, read from the source, so that listing commands loads no module."""
    module, _, function = COMMANDS[name].partition(":")
    source = Path(__file__).with_name(f"{module}.py").read_text(encoding="utf-8")
    match = re.search(rf'^def {function}\(.*?^    """(.*?)"""', source, re.DOTALL | re.MULTILINE)
    paragraph = "" if match is None else " ".join(match[1].partition("\n\n")[0].split())
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


def _say_version(is_requested: bool) -> None:
    if is_requested:
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
    """Run the command. Exit codes: 0 done, 1 a run failed or is INVALID, 2 bad input (one sentence), 130 interrupted, 143 terminated."""
    _settle_environment()
    with _safe_streams(), _sigterm_as_interrupt() as terminated:
        try:
            ending = Ending(code=_run_command(sys.argv[1:]))
            sys.stdout.flush()
        except BaseException as error:
            ending = ending_of(error, is_terminated=bool(terminated))
        code = _print_ending(ending)
    if code in (INTERRUPTED, TERMINATED):
        # Nobody is left to read another message.
        atexit.register(signal.signal, signal.SIGINT, signal.SIG_DFL)
    # If an interrupt passed through an exec of text (dataclasses are made by one), ``python -m`` ends as SIGINT does, whatever its code.
    # Another exec resets that.
    exec("")
    sys.exit(code)


def _settle_environment() -> None:
    """Draw figures only to files, whatever display the shell names. Drop terminal sizes that are invalid, as libraries fail on them.
    Settings that change numbers are made for every entry point (repro.runs.environment)."""
    settle()
    os.environ["MPLBACKEND"] = "agg"
    for name in ("COLUMNS", "LINES"):
        if (size := os.environ.get(name)) is not None and terminal_size_of(size) is None:
            del os.environ[name]


def _run_command(arguments: list[str]) -> int:
    for argument in arguments:
        # Python holds bytes that are no text as surrogates, which would end up in messages, file names and stored runs.
        if argument.encode("utf-8", "ignore").decode() != argument or "\0" in argument:
            raise UserError(f"argument {argument!r} is not UTF-8 text: write it as UTF-8, or rename the file")
    # Not ``app()``, which handles interrupts and closed pipes in its own way.
    command = _command_tree()
    with json_alone() if "--json" in arguments else nullcontext(), command.make_context("repro", arguments) as context:
        command.invoke(context)
    return DONE


@cache
def _command_tree() -> Any:
    return get_command(app)


@contextmanager
def _safe_streams() -> Iterator[None]:
    """Escape characters that a stream's encoding lacks, and write to nowhere if stderr is closed."""
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
    """Treat the first SIGTERM like Ctrl-C. Yields a list that fills when it arrives."""
    received: list[int] = []

    def interrupt(number: int, _: FrameType | None) -> None:
        received.append(number)
        if len(received) == 1:  # `timeout` sends it to the process and also to its group
            raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():
        yield received
        return
    previous = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield received
    finally:
        signal.signal(signal.SIGTERM, previous)


def _print_ending(ending: Ending) -> int:
    """Print the ending and return the exit code. If the help could not be written, that is a failure."""
    try:
        if ending.help is not None:
            print(ending.help)
        sys.stdout.flush()
    except (OSError, ValueError) as error:
        if ending.help is not None:
            ending = ending_of(error)
        # Nobody reads it, so what is still buffered must not fail again when Python ends.
        with suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    if ending.line is not None:
        with suppress(OSError, ValueError):
            # One line in a log, wrapped between words on a terminal.
            (say if sys.stderr.isatty() else print)(ending.line, file=sys.stderr)
            sys.stderr.flush()
    return ending.code
