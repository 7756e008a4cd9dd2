"""Provenance of a run: the code that decides its numbers, and where, when and with what it was made.

The digest of code covers the code that all runs share, the folders of the run's family, and those of the modules that its deployment
names. A plug-in adds the folder of its package, or the Python files beside its own file, and the inputs that it declares in ``reads``.
Comments do not count. Libraries do not count either: a run's provenance names them.
"""

import ast
import hashlib
import os
import platform
import re
import subprocess
import sys
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import cache
from importlib import import_module
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from engines.cache import cached_result
from engines.data import installed
from engines.errors import RunError, UserError, require
from engines.machine import machine_memory_bytes, version_of
from repro.paths import REPO
from repro.runs.cell import Cell
from repro.runs.clean import REDACTED, clean_command, clean_text, is_secret
from repro.runs.environment import instructions, numeric_variables, processor_facts, threads_set
from repro.runs.record import EVERY, Obtained, rows_in
from repro.runs.system import SYSTEMS

PACKAGES = frozenset({"engines", "baselines", "repro"})
"""Packages of this repository that decide numbers; figures only draw them."""
_PLACES = Path(__file__).with_name("code.csv")
"""A CSV of the folders and files that decide the numbers of all families, and of each family; ``/*`` stands for a folder's own files."""
IN_NO_FILE = "in no file"
"""Stands in place of the digest of code that no file holds."""
MOST_BYTES = 10**7
"""Most bytes in the folder of a plug-in."""

_HOME = Path(__file__).resolve().parents[2]
_SOURCES = frozenset({".py", ".yaml", ".json", ".csv", ".lua", ".cpp", ".hpp"})
_STRING = rb'"""(?:[^\\]|\\.)*?"""|\'\'\'(?:[^\\]|\\.)*?\'\'\'|"(?:[^"\\\n]|\\.)*"|\'(?:[^\'\\\n]|\\.)*\''
_FIELD = rb"\{(?!\{)(?:[^{}\"'\n]|" + _STRING + rb"|\{[^{}\n]*\})*\}"
_FORMATTED = (
    rb"[fF][rR]?(?:\"(?!\"\")(?:[^\\\"\n{]|\\.|\{\{|" + _FIELD + rb")*\""
    rb"|'(?!'')(?:[^\\'\n{]|\\.|\{\{|" + _FIELD + rb")*')"
)
"""An f-string of one line. Since Python 3.12, expressions in its braces may contain the string's own quotes."""
_LINE_END = rb"[ \t]*(?:#[^\n]*)?\n"
_COMMENT = re.compile(rb"(" + _FORMATTED + rb"|" + _STRING + rb")|(" + _LINE_END + rb")+|[ \t]*#[^\n]*", re.DOTALL)
"""Matches a string, which is kept; a run of line ends with blank lines and comments, which becomes one line end; or a last comment."""
_YAML_COMMENT = re.compile(rb"^[ \t]*#[^\n]*\n", re.MULTILINE)


@dataclass(frozen=True, kw_only=True)
class Code:
    digest: str
    modules: Mapping[str, str]
    """Digest of each folder, file and declared input, by name."""

    @property
    def fileless(self) -> tuple[str, ...]:
        """``module:NAME`` of classes that no file holds: we cannot tell later whether they are unchanged."""
        return tuple(name for name, digest in self.modules.items() if digest == IN_NO_FILE)

    @property
    def plug_ins(self) -> tuple[str, ...]:
        """Packages and modules from outside this repository."""
        return tuple(name for name in self.modules if name.isidentifier() and name not in PACKAGES)

    def changed_from(self, stored: Mapping[str, str]) -> tuple[str, ...]:
        """Names of modules that differ from a stored run's, or that only one side has."""
        names = sorted(self.modules.keys() | stored.keys())
        return tuple(name for name in names if self.modules.get(name) != stored.get(name))


@cache
def code_of(family: str, modules: tuple[str, ...], plug_ins: tuple[str, ...] = ()) -> Code:
    """Identity of a family's code with these modules, and with plug-ins named as ``module:NAME``. It is cached for the life of the process,
    as the imported modules are."""
    shared, family_rooms = ([row["place"] for row in rows_in(_PLACES, name)] for name in (EVERY, family))
    # For a family from outside this repository, all packages count.
    rooms = {*shared, *(family_rooms or ("engines", "baselines", "repro/families", "repro/tasks"))}
    digests: dict[str, str] = {}
    for entry in (*modules, *plug_ins):
        module, _, name = entry.partition(":")
        if module.partition(".")[0] in PACKAGES:
            rooms.add(_folder_of(module))
        elif is_fileless(module):
            digests[entry] = IN_NO_FILE
        else:
            digests |= _plug_in_digests(module, name)
    digests |= {room: _folder_digest(room) for room in rooms}
    ordered = dict(sorted(digests.items()))
    return Code(digest=_digest(f"{name} {digest}".encode() for name, digest in ordered.items()), modules=ordered)


def _digest(contents: Iterable[bytes]) -> str:
    digest = hashlib.sha256()
    for content in contents:
        digest.update(content + b"\0")
    return digest.hexdigest()[:12]


# -- of this repository -------------------------------------------------------------------------------------


def _folder_of(module: str) -> str:
    """The folder of a module, one level below a package of this repository, or below its families."""
    parts = module.split(".")
    depth = 3 if parts[:2] == ["repro", "families"] else 2
    room = "/".join(parts[:depth])
    return room if (_HOME / room).is_dir() else "/".join([*parts[: depth - 1], "*"])


@cache
def _folder_digest(name: str) -> str:
    path = _HOME / name
    if name.endswith("/*"):
        files = [file for file in path.parent.iterdir() if file.is_file()]
    else:
        files = [path] if path.is_file() else list(files_below(path))
    sources = sorted(file for file in files if file.suffix in _SOURCES)
    contents = (part for file in sources for part in (file.name.encode(), file.read_bytes()))
    # Removing comments takes a hundred times as long as reading, so the digest is cached by the files' content.
    return cached_result(
        "code",
        (_COMMENT.pattern, _YAML_COMMENT.pattern, *contents),
        lambda: _digest(part for file in sources for part in (file.name.encode(), without_comments(file))).encode(),
    ).decode()


def files_below(folder: Path) -> Iterator[Path]:
    """Files of a folder and its subfolders, except hidden ones and those that Python compiles. Dangling links and pipes do not count."""
    for path, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith((".", "__pycache__")))
        files = (Path(path, name) for name in sorted(names) if not name.startswith(".") and name[-4:] != ".pyc")
        yield from (file for file in files if file.is_file())


def without_comments(file: Path) -> bytes:
    """A file's content, without comments in Python and without comment lines in YAML."""
    content = file.read_bytes()
    if file.suffix == ".py":
        return _COMMENT.sub(_without_comment, content).strip()
    return _YAML_COMMENT.sub(b"", content) if file.suffix == ".yaml" else content


def _without_comment(match: re.Match[bytes]) -> bytes:
    if match[1] is not None:
        return match[1]
    return b"" if match[2] is None else b"\n"


# -- of plug-ins --------------------------------------------------------------------------------------------


def _plug_in_digests(module: str, name: str) -> dict[str, str]:
    """Digests of the plug-in's folder, by its package's name, and of each of its ``reads``."""
    top = module.partition(".")[0]
    files = files_of_plug_in(top)
    require(
        sum(file.stat().st_size for file in files.values()) <= MOST_BYTES,
        f"{module!r} lies in a folder of more than {MOST_BYTES // 10**6} MB: move it into a folder of its own, and name the data "
        "that it reads in reads = [...]",
    )
    digests = {top: _digest(part for path, file in files.items() for part in (path.encode(), without_comments(file)))}
    plug_in = import_module(module)
    folder = Path(str(plug_in.__file__)).parent
    for reads in (getattr(plug_in, "reads", ()), getattr(getattr(plug_in, name, None), "reads", ())):
        if callable(reads):  # a method of its own
            continue
        if not isinstance(reads, list | tuple) or not all(isinstance(source, str) and source for source in reads):
            raise UserError(f"reads={reads!r} of {module}:{name} must be a list of files, folders and $VARIABLES")
        digests |= {f"{top} reads {source}": _source_digest(source, folder) for source in reads}
    return digests


def files_of_plug_in(top: str) -> dict[str, Path]:
    """The files of a package, by their names below the folder that holds it. For a single module: the Python files beside it and those of
    packages there, unless it lies in a folder of installed libraries."""
    spec = spec_of(top)
    if spec is None:
        return {}
    if spec.submodule_search_locations is not None:
        roots = list(map(Path, spec.submodule_search_locations))
        return {str(file.relative_to(root.parent)): file for root in roots for file in files_below(root)}
    origin = Path(str(spec.origin))
    if _is_installed(origin):
        return {origin.name: origin}
    neighbours = [file for file in sorted(origin.parent.glob("*.py")) if file.is_file()]
    for package in sorted(origin.parent.glob("*/__init__.py")):
        if package.parent.name not in PACKAGES:
            neighbours += [file for file in files_below(package.parent) if file.suffix == ".py"]
    return {str(file.relative_to(origin.parent)): file for file in (origin, *neighbours)}


def is_alone(top: str) -> bool:
    """Whether this is a single module outside any package."""
    spec = spec_of(top)
    return spec is not None and spec.submodule_search_locations is None


def _source_digest(source: str, folder: Path) -> str:
    """Digest of a file, of a folder with all its content, or of an environment variable."""
    if source.startswith("$"):
        value = os.environ.get(source[1:])
        # We do not digest secrets, because guesses could be tried against the digest.
        return "not set" if value is None else "set" if is_secret(source[1:]) else _digest([value.encode()])
    path = folder / os.path.expanduser(source)
    if path.is_dir():
        files = {str(file.relative_to(path)): file for file in files_below(path)}
        return _digest(part for name, file in files.items() for part in (name.encode(), file.read_bytes()))
    return _digest([path.read_bytes()]) if path.is_file() else "not there"


@cache
def _is_installed(path: Path) -> bool:
    """Whether the file belongs to Python itself or to an installed library."""
    is_library = bool({"site-packages", "dist-packages"} & set(path.parts))
    return is_library or path.is_relative_to(Path(os.__file__).resolve().parent)


def is_of_a_plug_in(error: BaseException) -> bool:
    """Whether the error was raised in a file that is neither ours nor a library's."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    if not frames or frames[-1].f_code.co_filename.startswith("<"):
        return False
    path = Path(frames[-1].f_code.co_filename).resolve()
    is_ours = any(path.is_relative_to(_HOME / name) for name in (*PACKAGES, "paper_figures"))
    return not is_ours and not _is_installed(path)


def spec_of(top: str) -> ModuleSpec | None:
    try:
        return find_spec(top)
    except ValueError:  # a script, say, which is in no package
        file = getattr(sys.modules[top], "__file__", None)
        return None if file is None else ModuleSpec(top, None, origin=str(file))


def module_file(name: str) -> Path | None:
    """The file of a module, or None. We look on disk, because the import system would import the packages above it."""
    top, *rest = name.split(".")
    spec = spec_of(top)
    if spec is None:
        return None
    if spec.submodule_search_locations is None:
        return Path(spec.origin) if spec.origin is not None and not rest else None
    for root in spec.submodule_search_locations:
        folder = Path(root, *rest)
        for path in (folder / "__init__.py", folder.with_suffix(".py")):
            if path.is_file():
                return path
    return None


def fault_of(cell: Cell, error: BaseException) -> BaseException:
    """The error to report if the cell's run or its preparation raises: the code that the cell names fails, and not this program. Returns
    the error itself if the cell names no code, or if the error is already one of ours."""
    plug_ins = plugged_in(cell)
    is_ours = type(error).__module__.partition(".")[0] in PACKAGES
    if not plug_ins or is_ours or isinstance(error, ImportError | MemoryError | KeyboardInterrupt | SystemExit):
        return error
    message = " ".join(f"{type(error).__name__}: {error}".split())
    return RunError(f"{', '.join(plug_ins)} fails ({message}): correct it")


def why_unshareable(cell: Cell, *, is_remote: bool) -> str | None:
    """Says which thing that the cell names no other process can import, and why; None in most cases. With ``is_remote``: no process on
    another machine."""
    for plug_in in plugged_in(cell).values():
        module, _, name = plug_in.partition(":")
        if (reason := why_not_importable(module, name, is_remote=is_remote)) is not None:
            return f"{plug_in!r} {reason}"
    return None


def plugged_in(cell: Cell) -> dict[str, str]:
    """``module:NAME`` of each thing that the cell names in this form, keyed by where the cell names it."""
    plug_ins = {}
    system = cell.system if cell.system in SYSTEMS else installed("system").get(cell.system, cell.system)
    for option, value in (("system", system), ("platform", cell.platform), *cell.knobs):
        module, _, name = value.partition(":") if isinstance(value, str) else ("", "", "")
        is_name = name.isidentifier() and all(part.isidentifier() for part in module.split("."))
        if not is_name or module.partition(".")[0] in sys.stdlib_module_names - {"__main__"}:
            continue
        if is_fileless(module) or module_file(module):
            plug_ins[f"{option}={value!r}"] = f"{module}:{name}"
    return plug_ins


# -- in no file ---------------------------------------------------------------------------------------------


def is_fileless(module: str) -> bool:
    """Whether this process has the module from no file: a notebook's cells, or ``python -c``."""
    return module in sys.modules and getattr(sys.modules[module], "__file__", None) is None


def why_not_importable(module: str, name: str, *, is_remote: bool) -> str | None:
    """Why no other process (with ``is_remote``: none on another machine) can import it, as a clause that also says how to fix it."""
    others = "machines" if is_remote else "processes"
    if is_fileless(module):
        return f"is in no file, which other {others} could read: put it into one"
    if module != "__main__":
        return None
    if is_remote:
        return "is in the script that is run, which is not what workers elsewhere run: put it into a module, and import that"
    if _is_guarded(name):
        return 'stands under if __name__ == "__main__":, which other processes leave out: put it above'
    return None


def _is_guarded(name: str) -> bool:
    """Whether the script defines the name only under ``if __name__ == "__main__":``."""
    try:
        tree = ast.parse(Path(str(sys.modules["__main__"].__file__)).read_bytes())
    except (OSError, SyntaxError, ValueError):
        return False
    guards = [node for node in tree.body if isinstance(node, ast.If) and "__name__" in ast.unparse(node.test)]
    within = {symbol for guard in guards for node in guard.body for symbol in _defined_names(node)}
    outside = {symbol for node in tree.body if node not in guards for symbol in _defined_names(node)}
    return name in within - outside


def _defined_names(statement: ast.AST) -> Iterator[str]:
    """Names that a statement defines, with its nested ones: classes, functions, imports and assigned variables."""
    for node in ast.walk(statement):
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.alias):
            yield node.asname or node.name


LIBRARIES = ("torch", "numpy", "pandas", "pyarrow")
COMMIT_VARIABLE = "REPRO_COMMIT"


@dataclass(frozen=True, kw_only=True)
class GitState:
    """Both are None outside a checkout of this repository. ``commit`` is None before the first commit."""

    commit: str | None
    dirty: bool | None


@dataclass(frozen=True, kw_only=True)
class Load:
    """How busy the machine was while a run was measured, in seconds."""

    cpu_s: float
    """Processor seconds of this process, over all its threads."""
    wall_s: float
    loop_before_s: float
    loop_after_s: float
    best_loop_s: float
    """Seconds of the fastest loop of the sitting so far."""


def utc_now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")


def collect(
    *,
    obtained: Obtained,
    started_utc: str | None = None,
    elapsed_s: float = 0.0,
    load: Load | None = None,
    git: GitState | None = None,
    calibration: str | None = None,
    dataset: Any = None,
    argv: Sequence[str] | None = None,
    sitting: str | None = None,
    busy_s: float | None = None,
) -> dict[str, Any]:
    """Collect the provenance of a run that ends now. ``calibration`` is the id of a simulated run's calibration; None means it has none. For
    a measured run, ``load`` says how busy the machine was, ``sitting`` is the id of its sitting, and ``busy_s`` the seconds of its steps if
    the CPU computed them."""
    state, now = git or git_state(), utc_now()
    return {
        "obtained": obtained,
        **({"calibration": calibration} if obtained != "measured" else {}),
        **({} if load is None else {"sitting": sitting, "load": {**asdict(load), "busy_s": busy_s}}),
        "dataset": dataset,
        "command": clean_command(sys.argv if argv is None else argv),
        "git": asdict(state),
        "started_utc": started_utc or now,
        "finished_utc": now,
        "elapsed_s": elapsed_s,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "libraries": {name: version_of(name) for name in LIBRARIES},
        "cpu": _cpu(),
        "memory_bytes": machine_memory_bytes(),
        "gpu": _gpu(sys.modules["torch"]) if sys.modules.get("torch") is not None else None,
    }


def machine_identity(device: str) -> dict[str, Any]:
    """Identity of the machine, equal for two runs on one machine with one setup, whose times are comparable. For ``device`` cpu it needs no
    torch, so looking up a run is fast. ``torch_threads`` is None unless a script has set it."""
    cpu = _cpu()
    identity: dict[str, Any] = {
        "cpu": cpu["model"],
        "cores": cpu["usable"],
        "threads": os.environ.get("OMP_NUM_THREADS") or str(cpu["usable"]),
        "torch": version_of("torch"),
        "instructions": instructions(),
        "torch_threads": threads_set(),
        "environment": {
            name: REDACTED if is_secret(name) else clean_text(value) for name, value in numeric_variables().items()
        },
    }
    if device.startswith("cuda"):
        import torch

        identity["gpu"] = torch.cuda.get_device_name(device) if torch.cuda.is_available() else None
    return identity


_TOLD_LATELY = ("instructions", "torch_threads", "environment")
"""Facts that older stored runs may lack. A missing fact is unknown and counts as equal."""


def differing_facts(machines: Sequence[Mapping[str, Any]]) -> dict[str, list[str]]:
    """Return how machines differ: the values, as text, of each fact that is not the same on all. For the environment, the values of each
    variable that differs."""
    differences: dict[str, list[str]] = {}
    for name in dict.fromkeys(name for machine in machines for name in machine):
        reporting = [machine for machine in machines if name in machine or name not in _TOLD_LATELY]
        values: list[Any] = [machine.get(name) for machine in reporting]
        if all(value == values[0] for value in values):
            continue
        if name != "environment":
            differences[name] = [str(value) for value in values]
            continue
        for variable in sorted({key for value in values for key in value}):
            settings = [value.get(variable, "not set") for value in values]
            if len(set(settings)) > 1:
                differences[variable] = settings
    return differences


def git_state(root: Path = REPO) -> GitState:
    """The environment's commit has priority over git's, because a copied checkout may have a ``.git`` of another time."""
    commit = os.environ.get(COMMIT_VARIABLE, "")
    if re.fullmatch(r"[0-9a-f]{7,40}", commit):
        return GitState(commit=commit, dirty=None)
    top = _git(root, "rev-parse", "--show-toplevel")
    if top is None or Path(top).resolve() != root.resolve():
        # This package lies in another project's checkout, whose commit says nothing about us.
        return GitState(commit=None, dirty=None)
    changes = _git(root, "status", "--porcelain")
    return GitState(
        commit=_git(root, "rev-parse", "--verify", "HEAD"), dirty=None if changes is None else bool(changes)
    )


def _git(root: Path, *arguments: str) -> str | None:
    try:
        result = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True, check=False)
    except FileNotFoundError:  # no git on this machine
        return None
    return result.stdout.strip() if result.returncode == 0 else None


def _cpu() -> dict[str, Any]:
    """``usable`` counts the CPUs that this process may run on now, which a container often limits, and a script may change."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    model = processor_facts().get("model name") or platform.processor() or None
    return {"model": model, "count": os.cpu_count(), "usable": usable}


def _gpu(torch: Any) -> dict[str, Any] | None:
    """Facts of the GPU, by the torch that the run has already imported: looking up must not import torch."""
    if not torch.cuda.is_available():
        return None
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    return {
        "name": properties.name,
        "count": torch.cuda.device_count(),
        "memory_bytes": properties.total_memory,
        "capability": f"{properties.major}.{properties.minor}",
        "cuda": torch.version.cuda,
        "driver": _driver(),
    }


@cache
def _driver() -> str | None:
    """Version of the NVIDIA driver."""
    return nvidia_smi("driver_version")


def nvidia_smi(fields: str, *options: str) -> str | None:
    """The driver's answer for its first card, separated by commas, with sizes in MiB; None if it cannot tell."""
    command = ["nvidia-smi", *options, f"--query-gpu={fields}", "--format=csv,noheader,nounits"]
    try:
        result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return result.stdout.splitlines()[0].strip() if result.returncode == 0 and result.stdout.strip() else None


# -- whether the machine was busy besides ---------------------------------------------------------------------

MIN_CPU_SHARE = 0.9
"""With fewer processor seconds per second of steps, a run on a CPU was kept waiting. A step never sleeps, so a free machine gives it at
least one. With several threads it gets more, which makes this bound generous."""
MAX_SLOWDOWN = 1.25
"""Largest time of the calibration loop over the fastest of its sitting. Frequency and caches move it by a few percent on a quiet machine. A
neighbour that takes a quarter of a core or more moves it by 25 % and more. A larger disturbance also outgrows the differences between
systems that the figures show."""


def contention(load: Mapping[str, Any] | None) -> tuple[str, ...]:
    """Signs that the machine was busy with something else, a clause each. ``load`` is a stored run's: the fields of ``Load``, and
    ``busy_s``, the seconds of its steps if the CPU computed them."""
    if load is None:
        return ()
    signs = []
    slowest = max(load["loop_before_s"], load["loop_after_s"])
    if slowest > MAX_SLOWDOWN * load["best_loop_s"]:
        signs.append(
            f"contended: the calibration loop took {slowest / load['best_loop_s']:.2f} times the sitting's best"
        )
    busy_s = load.get("busy_s")
    if busy_s and load["cpu_s"] < MIN_CPU_SHARE * busy_s:
        signs.append(f"contended: {load['cpu_s'] / busy_s:.2f} processor seconds per second of steps")
    return tuple(signs)
