"""Files that are whole or absent, folders a user names, checked before any work starts, and what is kept of files that were read once."""

import csv
import hashlib
import io
import json
import math
import os
import re
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, TypeVar

from engines.data import read_text
from engines.errors import UserError, require

_MOST_YAML_BYTES = 16 << 20


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yields another name, for the body to write to. It is renamed at the body's end, and removed where that fails."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # A name of this writer alone: threads, and containers that share the folder, have the same process number.
    temporary = path.with_name(f".{path.name}.partial-{os.urandom(8).hex()}")
    try:
        # What lies there is a link that somebody put there to be written through.
        temporary.unlink(missing_ok=True)
        os.close(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666))
        yield temporary
        temporary.replace(path)
    except BaseException as error:
        # A write to an open file fails without a name, and the user knows this one alone.
        if isinstance(error, OSError) and error.filename in (None, str(temporary)):
            error.filename = str(path)
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise


@contextmanager
def rewriting(path: Path) -> Iterator[Path]:
    """As ``replacing``, of a file that a user named: a link is followed, the file's mode and owner stay. Raises UserError as
    ``writable_file`` does."""
    place = writable_file("file", path)
    with replacing(place) as temporary:
        # Before there is anything in it for others to read.
        keep_mode(place, temporary)
        yield temporary


def keep_mode(before: Path, after: Path) -> None:
    """Give a file the mode of the one whose place it takes, and as far as that is allowed its owner; nothing where there is none."""
    with suppress(FileNotFoundError):
        kept = before.stat()
        with suppress(PermissionError):
            os.chown(after, kept.st_uid, kept.st_gid)
        after.chmod(stat.S_IMODE(kept.st_mode))


def csv_text(columns: Iterable[str], rows: Iterable[Iterable[object]]) -> str:
    """A row a line, under the names of its columns; None is an empty cell."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([columns, *rows])
    return text.getvalue()


def replace_text(path: Path, text: str) -> Path:
    return replace_bytes(path, text.encode())


def replace_bytes(path: Path, content: bytes) -> Path:
    replace_all({path: content})
    return path


def replace_all(contents: Mapping[Path, bytes]) -> None:
    """All of them or, where the disk is full, none."""
    with ExitStack() as files:
        for path, content in contents.items():
            files.enter_context(rewriting(path)).write_bytes(content)


def readable_folder(name: str, path: Path) -> Path:
    """May be absent: it holds nothing then."""
    try:
        list(path.iterdir())
    except FileNotFoundError:
        pass
    except OSError as error:
        raise _refusal(name, path, "read", error) from None
    return path


def writable_folder(name: str, path: Path) -> Path:
    """Created where it is absent."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        # Mode bits do not tell: a file system may be read-only, or one like /proc.
        with TemporaryFile(dir=path):
            pass
    except OSError as error:
        raise _refusal(name, path, "written", error) from None
    return path


def is_file(text: str) -> bool:
    with suppress(OSError, ValueError):
        return Path(text).is_file()
    return False


def writable_file(name: str, path: Path, *beside: Path) -> Path:
    """Where a file that a user named really lies, links followed; it need not be there yet, and its folder is made. Raises UserError
    where it is a folder, a device, a pipe or a socket, is read-only (for root too), takes what the command prints, or is one of
    those ``beside`` it that are read."""
    place = Path(os.path.realpath(path))
    said = f"{name}={str(path)!r}"
    try:
        found = path.stat()
    except FileNotFoundError:
        writable_folder(name, place.parent)
        return place
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise UserError(f"{said} cannot be written ({why}): give a file in a folder that can be written") from None
    require(not stat.S_ISDIR(found.st_mode), f"{said} is a folder: give a file in it")
    require(stat.S_ISREG(found.st_mode), f"{said} is a device, a pipe or a socket: give a plain file, or a new one")
    require(not _is_printed_to(found), f"{said} is where the command prints to: give another file")
    require(
        bool(found.st_mode & 0o222) and os.access(place, os.W_OK),
        f"{said} is read-only: make it writable (chmod u+w), or give another file",
    )
    read = next((each for each in beside if is_file(str(each)) and each.samefile(place)), None)
    require(read is None, f"{said} would take the place of {str(read)!r}, which the command reads: give another file")
    writable_folder(name, place.parent)
    return place


def _is_printed_to(found: os.stat_result) -> bool:
    for stream in (1, 2):
        with suppress(OSError):
            if os.path.samestat(found, os.fstat(stream)):
                return True
    return False


def _refusal(name: str, path: Path, use: str, error: OSError) -> UserError:
    is_file = isinstance(error, FileExistsError | NotADirectoryError)
    problem = "is not a directory" if is_file else f"cannot be {use} ({error.strerror})"
    return UserError(f"{name}={str(path)!r} {problem}: give a folder that can be {use}")


def yaml_loader() -> type[Any]:
    """The parser in C, which is ten times as fast, where there is one."""
    import yaml

    return getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def read_yaml(path: Path, name: str = "file") -> Any:
    """Raises one of ``unreadable_yaml``, or UserError where there is no such file, or none that can be read; a key that is given twice
    is none of YAML's."""
    import yaml

    class Strict(yaml_loader()):  # type: ignore[misc]
        def construct_yaml_float(self, node: Any) -> float:
            found: float = super().construct_yaml_float(node)
            if math.isinf(found) and "inf" not in node.value.lower():
                problem = f"the number {node.value[:60]} is larger than any that is taken"
                raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark)
            return found

        def construct_mapping(self, node: Any, deep: bool = False) -> Any:
            seen: set[tuple[str, str]] = set()
            for key, _ in node.value if isinstance(node, yaml.MappingNode) else ():
                if isinstance(key, yaml.ScalarNode) and (key.tag, key.value) in seen:
                    problem = f"the key {key.value[:60]!r} is given twice, keep one"
                    raise yaml.constructor.ConstructorError(None, None, problem, key.start_mark)
                seen.add((key.tag, str(key.value)))
            return super().construct_mapping(node, deep)

    Strict.add_constructor("tag:yaml.org,2002:float", Strict.construct_yaml_float)
    return yaml.load(read_text(name, path, most=_MOST_YAML_BYTES), Loader=Strict)


def unreadable_yaml() -> tuple[type[Exception], ...]:
    """What reading a YAML file can raise: not there, no text, no YAML, nested too deeply, numbers and dates that are none."""
    import yaml

    return yaml.YAMLError, OSError, RecursionError, ValueError


def one_line(error: Exception) -> str:
    return " ".join(str(error).split())


T = TypeVar("T")

_KEPT: list[Any] = []


def kept(maxsize: int) -> Callable[[Callable[..., T]], Callable[..., T]]:
    """As ``lru_cache``, until ``forget``."""

    def keep(read: Callable[..., T]) -> Callable[..., T]:
        cached = lru_cache(maxsize=maxsize)(read)
        _KEPT.append(cached)
        return cached

    return keep


def forget() -> None:
    """The next call from Python reads anew what the cells of a sweep shared of files: they may be others."""
    for each in _KEPT:
        each.cache_clear()


# -- sizes and seals ----------------------------------------------------------------------------------------

_UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def size_of(name: str, text: str) -> int:
    """'24GB' (10^9), '64MiB' (2^20) or plain bytes."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(B|KB|MB|GB|KIB|MIB|GIB)?", text.strip(), re.IGNORECASE)
    size = 0 if match is None else float(match[1]) * _UNITS[(match[2] or "B").upper()]
    if not 1 <= size < float("inf"):
        raise UserError(f"{name}={text!r} is not a size: write it like 24GB or 64MiB")
    return int(size)


SEAL = "seal"
"""Its name in a file."""


def sealed(value: Mapping[str, Any]) -> dict[str, Any]:
    return {**value, SEAL: _digest(value)}


def is_whole(value: Mapping[str, Any]) -> bool:
    """Whether a sealed value is as it was written."""
    return value.get(SEAL) == _digest({name: part for name, part in value.items() if name != SEAL})


def _digest(value: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
