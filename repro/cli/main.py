"""The command tree, and the one place where errors become messages and exit codes."""

import atexit
import csv
import errno
import json
import logging
import os
import re
import signal
import sys
import threading
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from types import FrameType
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command

from engines.errors import UserError
from repro.cli.options import PANELS, RUNS, spread
from repro.cli.output import json_alone, say, terminal_size_of
from repro.runs.clean import CleanFormatter
from repro.runs.environment import settle

try:  # typer carries its own copy of click in newer releases
    from typer._click.exceptions import ClickException, NoArgsIsHelpError
except ImportError:
    from click.exceptions import ClickException, NoArgsIsHelpError  # type: ignore[assignment]

from engines.errors import OUT_OF_MEMORY, RunError, is_out_of_memory
from repro.runs.clean import without_secrets

DONE, FAILED, REFUSED, INTERRUPTED, TERMINATED = 0, 1, 2, 130, 143
"""Exit codes: all done; something failed during the run, or a run is INVALID; bad input, found before any work; Ctrl-C; SIGTERM."""

MOST_SHOWN = 2000
"""The most characters of a printed line, as a user's input may be of any length."""

STORED = json.loads(Path(__file__).with_name("commands.json").read_text(encoding="utf-8"))
EXTRAS: Mapping[str, str] = STORED["extras"]
"""Package -> the extra of this project that installs it."""

_LOOK = "check the disk, the device or the network behind it"
_OF_THE_INPUT, _OF_THE_MACHINE = (
    {getattr(errno, name): fix for name, fix in STORED["errors"][f"of the {what}"].items()}
    for what in ("input", "machine")
)
_OF_THE_INPUT[errno.EINVAL] = _LOOK
_INSTALLED = {"site-packages", "dist-packages"}
_KINDS = {"int": "a whole number", "float": "a number"}
"""The beginning of a pydantic error type -> the kind of value that was expected."""
_KEPT = "finished runs are kept, measured ones where all of their comparison is finished; the same command continues"
_PLAIN = (
    (
        re.compile(
            r"Exceeds the limit \(\d+ digits\) for integer string conversion.*?sys\.set_int_max_str_digits\(\) to increase the limit"
        ),
        "a number has too many digits",
    ),
    (re.compile(r"utf[-_]8[-_]sig", re.IGNORECASE), "UTF-8"),
)
"""Pattern of a library's message -> plain words for a user."""


@dataclass(frozen=True, kw_only=True)
class Ending:
    code: int
    line: str | None = None
    """The line for stderr; None if there is nothing left to say."""
    help: str | None = None
    """The help text for stdout."""


def ending_of(error: BaseException, *, is_terminated: bool = False) -> Ending:
    """Return the ending for an exception. ``is_terminated``: a KeyboardInterrupt comes from SIGTERM, not from Ctrl-C."""
    if isinstance(error, typer.Exit):
        return Ending(code=error.exit_code)
    if isinstance(error, KeyboardInterrupt):
        cause = "terminated" if is_terminated else "interrupted"
        return Ending(code=TERMINATED if is_terminated else INTERRUPTED, line=f"{cause}: {_KEPT}")
    if isinstance(error, NoArgsIsHelpError):
        return Ending(code=DONE, help=error.format_message())
    if isinstance(error, ClickException):
        command = getattr(getattr(error, "ctx", None), "command_path", "repro")
        return _refusal(f"{_usage_message(error)}: see '{command} --help'")
    if isinstance(error, UserError):
        return _refusal(str(error))
    if isinstance(error, RunError):
        return _failure(str(error))
    if isinstance(error, SystemExit) and isinstance(error.__context__, BrokenPipeError):
        return ending_of(error.__context__)  # rich, which prints tables, ends a broken pipe so
    if isinstance(error, SystemExit):
        # This program never exits so; only code in a module that a user named does.
        return _refusal(f"code of a module that was named ends the program (SystemExit: {error}): take that out of it")
    return _machine_ending(error) or _program_ending(error)


def _usage_message(error: ClickException) -> str:
    """The message for an unknown command or option, a missing argument, or a value of the wrong type."""
    errors = getattr(error.__cause__, "errors", None)
    for detail in errors() if callable(errors) else ():
        kind = _KINDS.get(str(detail.get("type")).partition("_")[0])
        if kind is not None and (option := getattr(error, "param", None)) is not None:
            return f"{option.name}={detail.get('input')!r} must be {kind}"
    return error.format_message().rstrip(".")


def _machine_ending(error: BaseException) -> Ending | None:
    if is_out_of_memory(error):
        return _failure(OUT_OF_MEMORY)
    if isinstance(error, BrokenPipeError):
        return _failure("what reads the output has closed it before all was written: rerun with the output to a file")
    if isinstance(error, OSError) and error.errno is not None:
        # A failed write does not name its file.
        source = "standard output or a file being written" if error.filename is None else str(error.filename)
        if error.filename is None and error.errno == errno.ENOENT:
            try:
                os.getcwd()
            except OSError:
                source = "the working folder, which is no longer there"
        line = f"{source}: {error.strerror or type(error).__name__}"
        if (fix := _OF_THE_INPUT.get(error.errno)) is not None:
            return _refusal(f"{line}: {fix}")
        return _failure(f"{line}: {_OF_THE_MACHINE.get(error.errno, _LOOK)}")
    if isinstance(error, UnicodeError):
        encoding = getattr(error, "encoding", "text")
        return _refusal(f"a text cannot be read or written as {encoding}: use UTF-8 (LC_ALL=C.UTF-8)")
    if isinstance(error, RecursionError):
        return _refusal("what was given is nested too deeply to be read: flatten it")
    if isinstance(error, ImportError) and _is_ours(error.name or ""):
        return _missing_name_ending(error)
    if isinstance(error, ImportError) and (name := (error.name or "").partition(".")[0]):
        extra = EXTRAS.get(name)
        package = name if extra is None else f"'dllm-serve-repro[{extra}]'"
        return _refusal(f"package {name!r} cannot be imported ({error}): pip install {package}")
    return None


def _is_ours(module: str) -> bool:
    from repro.runs.provenance import PACKAGES

    return module.partition(".")[0] in (*PACKAGES, "paper_figures")


def _missing_name_ending(error: ImportError) -> Ending | None:
    """The ending for a plug-in written for another version; None if one of our own modules does the import."""
    frames = [(frame, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    importing = [(frame, line) for frame, line in frames if not frame.f_code.co_filename.startswith("<")]
    if not importing or _is_ours(str(importing[-1][0].f_globals.get("__name__"))):
        return None
    frame, line = importing[-1]
    match = re.search(r"cannot import name '([^']+)'", str(error))
    missing = (
        f"module {error.name}, which is not there"
        if match is None
        else f"{match[1]} from {error.name}, which has no such name"
    )
    return _refusal(f"plug-in {frame.f_code.co_filename} imports {missing} (line {line}): correct it for this version")


def _program_ending(error: BaseException) -> Ending:
    if logging.getLogger().isEnabledFor(logging.INFO):
        logging.getLogger(__name__).info("where it happened:", exc_info=error)
    message = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    if (location := _location_in_user_code(error)) is not None:
        return _failure(f"{location} fails ({message}): correct it")
    return _failure(f"{message}: a fault of this program, 'repro --verbose ...' shows where; please report it")


def _location_in_user_code(error: BaseException) -> str | None:
    """The line that raised the error, if it is in a module that the user wrote."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    if not frames:
        return None
    module, path = str(frames[-1].f_globals.get("__name__")), frames[-1].f_code.co_filename
    is_installed = (
        module.partition(".")[0] in sys.stdlib_module_names or {*Path(path).parts} & _INSTALLED or path.startswith("<")
    )
    return None if _is_ours(module) or is_installed else f"line {frames[-1].f_lineno} of {path}"


def _refusal(sentence: str) -> Ending:
    return Ending(code=REFUSED, line=f"error: {_one_line(sentence)}")


def _failure(sentence: str) -> Ending:
    return Ending(code=FAILED, line=f"error: {_one_line(sentence)}")


def _one_line(sentence: str) -> str:
    """Return the sentence as printable text without secrets, of at most ``MOST_SHOWN`` characters or so."""
    sentence = without_secrets(sentence)
    for pattern, plain in _PLAIN:
        sentence = pattern.sub(plain, sentence)
    line = "".join(c if c.isprintable() else "?" for c in " ".join(sentence.split()))
    return line if len(line) <= MOST_SHOWN else f"{line[: MOST_SHOWN // 2]} ... {line[-MOST_SHOWN // 2 :]}"


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
