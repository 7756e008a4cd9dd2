"""How a command ends: every exception becomes one line and an exit code."""

import errno
import json
import logging
import os
import re
import sys
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import typer

try:  # typer carries its own copy of click in newer releases
    from typer._click.exceptions import ClickException, NoArgsIsHelpError
except ImportError:
    from click.exceptions import ClickException, NoArgsIsHelpError  # type: ignore[assignment]

from engines.errors import OUT_OF_MEMORY, RunError, UserError, is_out_of_memory
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
    from repro.runs.code import PACKAGES

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
