"""The command tree and the one place where errors become messages and exit codes."""

import atexit
import logging
import os
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache
from importlib import import_module
from pathlib import Path
from types import FrameType
from typing import Any

import typer
from typer.core import TyperGroup
from typer.main import get_command

from engines.errors import UserError
from repro.cli.endings import DONE, FAILED, INTERRUPTED, TERMINATED, Ending, ending_of
from repro.cli.help import PanelCommand, first_sentence, held, released
from repro.cli.options import spread
from repro.cli.output import say, terminal_size_of
from repro.runs.clean import CleanFormatter
from repro.runs.environment import settle

GROUPS: Mapping[str, Mapping[str, str]] = {
    "Run and compare": {
        "bench": "bench:bench",
        "sweep": "bench:sweep",
        "compare": "compare:compare",
        "export": "compare:export",
        "ablate": "ablate:ablate",
        "eval": "evaluate:evaluate",
        "generate": "generate:generate",
    },
    "Figures and claims of the papers": {
        "reproduce": "figure:reproduce",
        "figure": "figure:figure",
        "claims": "figure:claims",
        "check-results": "check:check_results",
    },
    "Serve": {"serve": "serve:serve", "install": "serve:install"},
    "Plan": {"plan": "plan:plan", "plan-cluster": "plan:plan_cluster", "capacity": "plan:capacity"},
    "What there is": {"list": "list_command:list_command", "trace": "trace:trace", "doctor": "list_command:doctor"},
    "Check and calibrate": {
        "verify-baselines": "check:verify_baselines",
        "gpu-suite": "check:gpu_suite",
        "calibrate": "calibrate:calibrate",
        "train-tiny": "check:train_tiny",
    },
}
"""Where the function of each command is, below ``repro.cli``; it is loaded, and its options are made, when it is asked for."""
COMMANDS: Mapping[str, str] = {name: where for group in GROUPS.values() for name, where in group.items()}


def _function(name: str) -> Callable[..., None]:
    module, _, function = COMMANDS[name].partition(":")
    found: Callable[..., None] = getattr(import_module(f"repro.cli.{module}"), function)
    return found


@cache
def _built(name: str) -> Any:
    alone = typer.Typer(add_completion=False, rich_markup_mode=None)
    alone.command(name=name, cls=PanelCommand)(spread(_function(name)))
    return get_command(alone)


class Root(TyperGroup):
    """Lists the whole first sentence of every command's help, by what the commands are for."""

    def list_commands(self, ctx: Any) -> list[str]:
        return [*COMMANDS]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        return _built(cmd_name) if cmd_name in COMMANDS else None

    def get_help(self, ctx: Any) -> str:
        return released(super().get_help(ctx))

    def get_help_option(self, ctx: Any) -> Any:
        """Off where it is not given: of no value the library would ask pydantic what it is, which takes longer to load than all
        else that a help needs."""
        option: Any = super().get_help_option(ctx)
        if option is not None:
            option.default = False
        return option

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        longest = max(map(len, COMMANDS))
        for title, names in GROUPS.items():
            with formatter.section(title):
                formatter.write_dl([(name.ljust(longest), held(_summary(name))) for name in names])


def _summary(name: str) -> str:
    """Read off the source: no module of a command is loaded for a list of all."""
    module, _, function = COMMANDS[name].partition(":")
    source = Path(__file__).with_name(f"{module}.py").read_text(encoding="utf-8")
    told = re.search(rf'^def {function}\(.*?^    """(.*?)"""', source, re.DOTALL | re.MULTILINE)
    return first_sentence("" if told is None else told[1])


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
