"""Opens files that a user names: only regular files, up to a size limit, and every failure is one sentence.

We refuse JSON with a repeated key, because nobody can tell which value was meant. ``load_named`` finds classes and values
that a user names as ``module:NAME``, or by a name that an installed package declares.
"""

import errno
import io
import json
import os
import re
import stat
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar

from engines.errors import RunError, UserError, require

_LONGEST_KEY = 60


class RepeatedKeyError(json.JSONDecodeError):
    """A JSON object has a key twice. ``msg`` names the key; its position in the text is not known."""

    def __str__(self) -> str:
        return self.msg


def unique(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """Return the pairs as a dict, for ``object_pairs_hook``. Raises RepeatedKeyError for a repeated key."""
    values: dict[str, Any] = {}
    for key, value in pairs:
        if key in values:
            shown = key if len(key) <= _LONGEST_KEY else f"{key[: _LONGEST_KEY - 3]}..."
            raise RepeatedKeyError(f"the key {shown!r} is given twice", "", 0)
        values[key] = value
    return values


DECODER = json.JSONDecoder(object_pairs_hook=unique)


def json_object(name: str, text: str, *, example: str) -> dict[str, Any]:
    """Parse a setting's text as a JSON object. Raises UserError with the setting's ``name`` if it is none, or repeats a key."""
    try:
        value = json.loads(text, object_pairs_hook=unique)
        json.dumps(value, allow_nan=False)
    except RepeatedKeyError as error:
        raise UserError(f"{name}={text!r}: {error}: keep one") from None
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise UserError(f"{name}={text!r} is no JSON object: write it like '{example}'")
    return value


MOST_BYTES = 64 << 30
"""Size of the largest file that we read piece by piece."""
MOST_HELD_BYTES = 256 << 20
"""Size of the largest file that we read into memory as a whole."""


def open_file(name: str, path: Path, *, max_bytes: int = MOST_BYTES) -> io.BufferedReader:
    """Open a file to read its bytes. Errors name it by ``name``, an option or a kind of file.

    Raises UserError if it is absent, a folder, a device, a pipe or a socket, larger than ``max_bytes``, or unreadable.
    """
    label = _label(name, path)
    try:
        # We refuse a pipe before we open it: opening may wait for a writer, or take data that another reader waits for.
        _check(os.stat(path), label, max_bytes)
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except UserError:
        raise
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG):
            reason = "" if error.errno == errno.ENOENT else f" ({error.strerror})"
            raise UserError(f"{label} does not exist{reason}: check the path") from None
        raise UserError(f"{label} cannot be read ({error.strerror}): check the path and its permissions") from error
    except ValueError as error:
        raise UserError(f"{label} is no path ({error}): check it") from None
    try:
        _check(os.fstat(descriptor), label, max_bytes)
    except BaseException:
        os.close(descriptor)
        raise
    return os.fdopen(descriptor, "rb")


def _check(status: os.stat_result, label: str, max_bytes: int) -> None:
    require(not stat.S_ISDIR(status.st_mode), f"{label} is a directory: give a file")
    require(
        stat.S_ISREG(status.st_mode), f"{label} is a device or a pipe: write what it holds into a file, and give that"
    )
    require(
        status.st_size <= max_bytes,
        f"{label} has {status.st_size:,} bytes, and {max_bytes:,} are the most that are read: give a smaller file",
    )


def read_bytes(name: str, path: Path, *, max_bytes: int = MOST_HELD_BYTES) -> bytes:
    """Read a whole file, with the checks of ``open_file``."""
    with open_file(name, path, max_bytes=max_bytes) as file:
        try:
            return file.read()
        except OSError as error:
            raise UserError(f"{_label(name, path)} cannot be read ({error.strerror}): get the file again") from error


def read_text(name: str, path: Path, *, max_bytes: int = MOST_HELD_BYTES) -> str:
    """Read a file of UTF-8 text, with or without a byte order mark. Line ends are translated as in Python's text mode."""
    content = read_bytes(name, path, max_bytes=max_bytes)
    try:
        return io.TextIOWrapper(io.BytesIO(content), encoding="utf-8-sig").read()
    except UnicodeDecodeError as error:
        raise UserError(f"{_label(name, path)} is not UTF-8 text ({error.reason}): convert it") from error


def _label(name: str, path: Path) -> str:
    return f"file {str(path)!r}" if name == "file" else f"{name}={str(path)!r}"


T = TypeVar("T")

_GROUPS = "repro."
"""Prefix of entry-point groups. A kind follows it: one of ``KINDS``, or as in ``repro.system``, ``repro.platform``, ``repro.gpu``."""
POLICIES = ("scheduler", "refresh_rule", "router", "batcher", "queue", "binder")
"""Kinds of policies. Each is also the name of the knob that chooses a policy of this kind."""
KINDS = (*POLICIES, "workload")
"""Kinds of classes that a user can choose by a knob."""
PLACE = re.compile(r"[A-Za-z_][\w.]*:([A-Za-z_]\w*)")
"""Pattern of ``module:NAME``."""


def installed(kind: str) -> Mapping[str, str]:
    """Return the names that installed packages declare for a kind, each with its ``module:NAME``."""
    return _installed(tuple(sys.path)).get(_field(kind), {})


@lru_cache(maxsize=4)
def _installed(path: tuple[str, ...]) -> Mapping[str, Mapping[str, str]]:
    """Return the declared names by kind. ``path`` is the ``sys.path`` that is searched for packages."""
    from importlib.metadata import distributions

    names: defaultdict[str, dict[str, str]] = defaultdict(dict)
    for entry in (entry for package in distributions() for entry in package.entry_points):
        if entry.group.startswith(_GROUPS):
            names[entry.group.removeprefix(_GROUPS)].setdefault(entry.name, entry.value)
    return names


def _field(kind: str) -> str:
    return kind.replace(" ", "_")


def import_path_of(kind: str, name: str, built_in: Iterable[str] = ()) -> str:
    """Return ``name`` if it is a ``module:NAME``, or else the one that an installed package declares for it. Raises UserError for
    an unknown name; the error also lists the ``built_in`` names."""
    if ":" in name:
        return name
    declared = installed(kind)
    if name in declared:
        return declared[name]
    names = ", ".join((*built_in, *declared))
    fix = f"use one of {names}, or module:NAME" if names else "name a class as module:NAME"
    raise UserError(f"{_field(kind)}={name!r} is unknown: {fix}")


def load_module(kind: str, import_path: str, module: str) -> Any:
    """Import ``module``. UserErrors cite ``kind`` and ``import_path``. Raises ImportError if a package that it imports is missing."""
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise
        raise UserError(f"{kind}={import_path!r}: there is no module {error.name}: correct it or install it") from None
    except (ImportError, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        if not all(part.isidentifier() for part in module.split(".")):
            raise UserError(f"{kind}={import_path!r}: {module!r} is no module: write module:NAME") from None
        raise UserError(
            f"{kind}={import_path!r}: module {module!r} fails on import ({type(error).__name__}: {error}): correct it"
        ) from error


def load_named(kind: str, import_path: str, *, attributes: tuple[str, ...] = ()) -> Any:
    """Return the object that ``import_path`` names. Raises UserError if there is none, or if it lacks one of ``attributes``."""
    module, _, name = import_path_of(kind, import_path).partition(":")
    loaded = load_module(kind, import_path, module)
    if not hasattr(loaded, name):
        raise UserError(f"{kind}={import_path!r}: module {module!r} has no {name!r}: write module:NAME")
    target = getattr(loaded, name)
    for attribute in attributes:
        if not hasattr(target, attribute):
            raise UserError(f"{kind}={import_path!r} is no {kind}, it has no {attribute!r}: name one")
    return target


def name_of(policy: Any) -> str:
    """Return ``module:NAME`` of a class or function. Raises UserError if this process cannot find it again by that name."""
    module, name = policy.__module__, policy.__qualname__
    if getattr(sys.modules.get(module), name, None) is not policy:
        raise UserError(f"{module}.{name} is not what is called {name!r} in its module: define it at the top, and once")
    return f"{module}:{name}"


def unwrapped(policy: Any) -> Any:
    """Return the policy behind our wrappers, which set ``passes_on``."""
    while getattr(type(policy), "passes_on", False):
        policy = policy.batching
    return policy


def ask(call: Callable[..., T], *args: Any, **options: Any) -> T:
    """Return a policy's answer. The policy may be a user's own, so we turn its exceptions into a RunError of one sentence."""
    try:
        return call(*args, **options)
    except (UserError, RunError, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        owner = unwrapped(getattr(call, "__self__", None))
        method = getattr(call, "__name__", "a call") if owner is None else f"{type(owner).__name__}.{call.__name__}"
        message = " ".join(str(error).split())
        raise RunError(f"policy {method} fails ({type(error).__name__}: {message}): correct it") from error
