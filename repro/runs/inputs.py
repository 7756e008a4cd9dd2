"""What the code of plug-ins rests on besides its modules: files and folders that it reads, modules that it finds at run time,
versions of packages, and variables of the environment.

Files are seen by an audit hook as they are opened, from the first ``import repro`` on, so that what a module has read and kept
is known whoever imported it first. What a process cannot see is found by name: files beside a source, or in the working
directory, and variables, that a source names as text, whole or as the beginning or end of a name. Not seen: a file that a library's
native code opens, and a variable, under a name that is made of smaller parts; what a script has changed in memory.
"""

from __future__ import annotations

import ast
import hashlib
import os
import re
import stat
import sys
import threading
import time
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache, lru_cache
from importlib.util import source_from_cache
from pathlib import Path
from types import FrameType

from repro.runs.clean import REDACTED, hidden, is_secret
from repro.runs.code import PACKAGES, Code, digested, place

Inputs = Mapping[str, str | None]
"""Name -> digest of what it stood for; None where it was not there."""

TWO = "two versions"
"""Instead of a digest, of what one process saw changing, or did not see: what a number rests on cannot be told."""
FOREIGN, LIBRARY, STANDARD, OURS, HARNESS = "foreign", "library", "standard", "ours", "harness"

_HOME = Path(__file__).resolve().parents[2]
_HARNESS = tuple(str(_HOME / "repro" / name) for name in ("runs", "cli", "api.py"))
_OURS = tuple(f"{_HOME / name}{os.sep}" for name in (*sorted(PACKAGES), "paper_figures"))
_STANDARD = tuple(f"{os.path.dirname(each)}{os.sep}" for each in (os.__file__, os.path.realpath(os.__file__)))
_LIBRARIES = re.compile(r"[\\/](site|dist)-packages[\\/]")
_NO_FILES = ("/dev/", "/proc/", "/sys/")
_VARIABLE = re.compile(r"[A-Z0-9_]{3,}")
_EXPANDED = re.compile(r"\$\{?([A-Z0-9_]{3,})")
_SETTLED_S = 2.0
"""Age of a file from which its size and times tell that it is the same."""

_READING = frozenset({"open", "import", "ctypes.dlopen", "sqlite3.connect"})
_LISTING = frozenset({"os.listdir", "os.scandir"})


class _Seen:
    """By this process, for as long as it lives, as are the modules that keep what they have read."""

    def __init__(self) -> None:
        self.digests: dict[str, str | None] = {}
        self.owners: dict[str, set[str]] = {}
        """Path -> files of the code that read it; ``HARNESS`` among them where that was for a run."""
        self.writers: dict[str, set[str]] = {}
        self.made: dict[str, set[str]] = {}
        """As ``owners``: of files written; and of those that had been written before they were read."""
        self.variables: dict[str, str | None] = {}
        self.is_on = False
        self.before: set[str] = set()
        """Files of modules that were imported before."""
        self.own = threading.local()

    def hear(self, event: str, args: tuple[object, ...]) -> None:
        if (event in _READING or event in _LISTING) and not getattr(self.own, "is_busy", False):
            self.own.is_busy = True
            try:
                # Whatever cannot be looked at is refused, or not, by what was asked for it.
                with suppress(OSError, ValueError):
                    self._hear(event, args)
            finally:
                self.own.is_busy = False

    def _hear(self, event: str, args: tuple[object, ...]) -> None:
        told = args[1] if event == "import" else args[0]
        told = "." if told is None and event in _LISTING else told
        if not isinstance(told, str | bytes | os.PathLike):
            return
        path = _whole(os.fsdecode(told))
        frame = _caller()
        is_import = frame is not None and frame.f_code.co_filename.startswith("<frozen importlib")
        if path.startswith(_NO_FILES) or (is_import and event in _LISTING):
            return
        owners = _owners(frame)
        if event == "open" and isinstance(args[2], int) and _is_written(args[2]):
            self.writers.setdefault(path, set()).update(owners)
            return
        if is_import and path.endswith(".pyc") and "__pycache__" in path:
            path = source_from_cache(path)
        kind = _kind(path)
        if is_import and kind == FOREIGN:
            owners.add(path)
        if owners and (kind == FOREIGN or (kind == OURS and not is_import)):
            found = _content(path)
            if path not in self.digests and path in self.writers:
                self.made[path] = set(self.writers[path])
            self.owners.setdefault(path, set()).update(owners)
            self.digests[path] = found if self.digests.get(path, found) == found else TWO

    def rested_on(self, sources: Iterable[str]) -> set[str]:
        """Files and folders that these sources have read, or code that they have loaded, have read. None that they made."""
        known = {HARNESS, *sources}
        while True:
            more = {path for path, owners in list(self.owners.items()) if owners & known} - known
            if not more:
                return {path for path in known & self.digests.keys() if not self.made.get(path, set()) & known}
            known |= more


_seen = _Seen()


def watch() -> None:
    """From now on; once a process. A hook cannot be taken away again, and costs what opens a file some microseconds."""
    if not _seen.is_on:
        _seen.is_on = True
        _seen.before = set(_imported())
        sys.addaudithook(_seen.hear)


def _imported() -> Iterator[str]:
    """Files of modules that are imported whole. A script is at work, and so is a module that is about to import us."""
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        is_at_work = name in ("__main__", "__mp_main__") or getattr(
            getattr(module, "__spec__", None), "_initializing", False
        )
        if isinstance(file, str) and not is_at_work and _kind(file) == FOREIGN:
            yield file


def inputs_of(code: Code) -> dict[str, str | None]:
    """What the plug-ins among the modules of this code rest on so far."""
    sources = {str(path) for name in code.plugged_in if (path := place(name)) is not None}
    if not sources:
        return {}
    roots = _roots(code)
    read = _seen.rested_on(sources)
    found = {_name(path, roots): _settled(path, _seen.digests[path]) for path in read}
    own = {*sources, *(path for path in read if path.endswith(".py") and _kind(path) == FOREIGN)}
    for unseen in own & _seen.before:
        found[f"{_name(unseen, roots)}, imported before repro"] = TWO
    for told in sorted({told for source in own for told in _told(source)}):
        if _seen.writers.get(told, set()) & {HARNESS, *own}:
            continue
        name = _name(told, roots) if os.path.isabs(told) else told
        if name not in found:
            now = _state(name, roots)
            first = _seen.variables.setdefault(name, now) if name.startswith("$") else now
            found[name] = now if now == first else TWO
    return dict(sorted(found.items()))


def merged(one: Inputs, other: Inputs) -> dict[str, str | None]:
    """Inputs of two processes that had a part in a run."""
    both = {name: one[name] if one[name] == other[name] else TWO for name in one.keys() & other.keys()}
    return dict(sorted({**one, **other, **both}.items()))


def changed(inputs: Inputs, code: Code) -> tuple[str, ...]:
    """Names of what is not as it was when a run was made by this code."""
    roots = _roots(code) if inputs else ()
    return tuple(name for name, before in inputs.items() if _state(name, roots) != before)


def is_of_a_plug_in(error: BaseException) -> bool:
    """Whether it was raised in a file that is neither ours nor a library's."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return bool(frames) and _kind(frames[-1].f_code.co_filename) == FOREIGN


# -- by whom -------------------------------------------------------------------------------------------------


def _caller() -> FrameType | None:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename == __file__:
        frame = frame.f_back
    return frame


def _owners(frame: FrameType | None) -> set[str]:
    """Files of the code at work that is none of ours, up to where we called it; libraries, of which a plug-in may be one, with
    others, or where we did call them."""
    found: dict[str, str] = {}
    is_ours = False
    while frame is not None and (kind := _kind(frame.f_code.co_filename)) != HARNESS:
        if kind in (FOREIGN, LIBRARY):
            found[frame.f_code.co_filename] = kind
        frame = frame.f_back
        is_ours = is_ours or kind == OURS
    if not found and not is_ours and frame is None and threading.current_thread() is not threading.main_thread():
        return {HARNESS}  # a thread that somebody started with a function of Python's own
    is_foreign = FOREIGN in found.values()
    called = {HARNESS} if is_foreign and frame is not None else set()
    return {*found, *called} if is_foreign or frame is not None else set()


@cache
def _kind(name: str) -> str:
    if name.startswith(_HARNESS):
        return HARNESS
    if _LIBRARIES.search(name) and not name.startswith(_OURS):
        return LIBRARY
    if name.startswith(_OURS):
        return OURS
    return STANDARD if name.startswith(("<", *_STANDARD)) else FOREIGN


def _is_written(flags: int) -> bool:
    way = flags & (os.O_RDONLY | os.O_WRONLY | os.O_RDWR)
    return way == os.O_WRONLY or (way == os.O_RDWR and bool(flags & (os.O_TRUNC | os.O_EXCL)))


# -- what it is ----------------------------------------------------------------------------------------------


def _whole(path: str) -> str:
    path = os.path.join(os.getcwd(), path)
    return os.path.realpath(path) if ".." in Path(path).parts else str(Path(path))


def _state(name: str, roots: Sequence[Path]) -> str | None:
    if name.startswith("$"):
        # Of a secret no more than that there is one: a digest tells it to whoever tries a few.
        told = (f"{each}={REDACTED if is_secret(each) else hidden(os.environ[each])}" for each in _variables(name))
        return _hash("\0".join(told).encode()) or None
    if name.startswith("package "):
        return _distribution(name.removeprefix("package "))
    return _digest(_find(name, roots))


@cache
def _distribution(package: str) -> str | None:
    """Name and version of what an installed package came with."""
    from importlib.metadata import version

    return ", ".join(f"{each} {version(each)}" for each in sorted(set(_distributions().get(package, [])))) or None


@cache
def _distributions() -> Mapping[str, Sequence[str]]:
    from importlib.metadata import packages_distributions

    return packages_distributions()


def _variables(name: str) -> list[str]:
    """Those that ``$NAME``, ``$NAME_*`` or ``$*_NAME`` stands for."""
    pattern = re.compile(re.escape(name[1:]).replace(r"\*", ".*"))
    return sorted(each for each in os.environ if pattern.fullmatch(each))


def _hash(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16] if content else ""


_kept: dict[str, tuple[tuple[int, ...], str]] = {}


def _digest(path: str) -> str | None:
    """A digest of a file's content, a module's as in a code identity, or the names in a folder; None where there is nothing to read."""
    if not path.endswith(".py"):
        return _content(path)
    try:
        return digested(Path(path).read_bytes())[0] if os.path.isfile(path) else _content(path)
    except OSError:
        return None


def _settled(path: str, seen: str | None) -> str | None:
    """The digest of what was seen, which has another form for a module: it takes longer, and is for few of all that are seen."""
    if not path.endswith(".py") or seen is None:
        return seen
    return _digest(path) if _content(path) == seen else TWO


def _content(path: str) -> str | None:
    try:
        status = os.stat(path)
        if stat.S_ISDIR(status.st_mode):
            names = sorted(name for name in os.listdir(path) if not name.startswith((".", "__pycache__")))
            return _hash("\0".join(["", *names]).encode(errors="surrogateescape"))
        if not stat.S_ISREG(status.st_mode):
            return None
        signature = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
        if path in _kept and _kept[path][0] == signature:
            return _kept[path][1]
        content = Path(path).read_bytes()
    except (OSError, ValueError):
        return None
    found = f"{len(content)} {_hash(content)}"
    if time.time() - max(status.st_mtime, status.st_ctime) > _SETTLED_S:
        _kept[path] = signature, found
    return found


# -- what it is called ---------------------------------------------------------------------------------------


def _roots(code: Code) -> tuple[Path, ...]:
    """Folders that its plug-ins are found in, ours and the working directory: names of files in them are the same on another
    machine."""
    found = {
        path.parents[name.count(".") + (path.name == "__init__.py")]: None
        for name in code.plugged_in
        if (path := place(name)) is not None
    }
    return (*found, _HOME, Path.cwd())


def _name(path: str, roots: Sequence[Path]) -> str:
    for root in roots:
        if Path(path).is_relative_to(root):
            name = str(Path(path).relative_to(root))
            if _find(name, roots) == path:
                return name
    home = Path.home()
    return f"~/{Path(path).relative_to(home)}" if Path(path).is_relative_to(home) else path


def _find(name: str, roots: Sequence[Path]) -> str:
    places = [str(root / name) for root in roots]
    return os.path.expanduser(name) if name.startswith("~/") else next(filter(os.path.exists, places), places[0])


def _told(source: str) -> list[str]:
    """What a source names as text, and the installed packages that it imports."""
    try:
        texts, packages = _words(Path(source).read_bytes())
    except (OSError, SyntaxError, ValueError, RecursionError):
        return []
    found = [f"package {each}" for each in packages if _distribution(each) is not None]
    for text in texts:
        if _VARIABLE.fullmatch(text):
            found.append(f"${'*' * text.startswith('_')}{text}{'*' * text.endswith('_')}")
        found += [f"${name}" for name in _EXPANDED.findall(text)]
        found += _files_named(text, Path(source).parent)
    return found


@lru_cache(maxsize=256)
def _words(content: bytes) -> tuple[list[str], list[str]]:
    tree = ast.parse(content)
    constants = [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)]
    texts = {value for value in constants if isinstance(value, str)}
    texts |= {value.decode(errors="ignore") for value in constants if isinstance(value, bytes)}
    names = [alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module]
    tops = {name.partition(".")[0] for name in names} - PACKAGES - sys.stdlib_module_names
    return sorted(texts), sorted(tops)


def _files_named(text: str, beside: Path) -> Iterator[str]:
    module = getattr(sys.modules.get(text), "__file__", None)
    if module is not None and _kind(module) == FOREIGN:
        yield module
    if 0 < len(text) < 256 and "\0" not in text:
        for folder in (beside, Path.cwd()):
            path = os.path.expanduser(folder / text)
            if os.path.isfile(path) and not path.startswith(_NO_FILES):
                yield path
