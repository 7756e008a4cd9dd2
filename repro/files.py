"""Atomic writes of files, early checks of the folders that a user names, and a cache of what was read from files."""

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
    """Yields a temporary name for the body to write to, then renames the file to ``path``, or removes it if anything fails."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # The name must be unique to this writer: threads, and containers that share the folder, can have the same process id.
    temporary = path.with_name(f".{path.name}.partial-{os.urandom(8).hex()}")
    try:
        # A file of that name can only be a link that somebody planted for us to write through.
        temporary.unlink(missing_ok=True)
        os.close(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666))
        yield temporary
        temporary.replace(path)
    except BaseException as error:
        # A failed write to an open file names no file, and the user knows only ``path``.
        if isinstance(error, OSError) and error.filename in (None, str(temporary)):
            error.filename = str(path)
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise


@contextmanager
def rewriting(path: Path) -> Iterator[Path]:
    """Like ``replacing``, for a file that a user named: follows links, and keeps the file's mode and owner. Raises UserError as
    ``writable_file`` does."""
    target = writable_file("file", path)
    with replacing(target) as temporary:
        # Set the mode while the file is empty, so that others cannot read its content.
        keep_mode(target, temporary)
        yield temporary


def keep_mode(old: Path, new: Path) -> None:
    """Gives ``new`` the mode of ``old``, which it replaces, and its owner if permitted. Does nothing if ``old`` is absent."""
    with suppress(FileNotFoundError):
        status = old.stat()
        with suppress(PermissionError):
            os.chown(new, status.st_uid, status.st_gid)
        new.chmod(stat.S_IMODE(status.st_mode))


def csv_text(columns: Iterable[str], rows: Iterable[Iterable[object]]) -> str:
    """CSV with a header of the columns and a line per row; None becomes an empty cell."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([columns, *rows])
    return text.getvalue()


def replace_text(path: Path, text: str) -> Path:
    return replace_bytes(path, text.encode())


def replace_bytes(path: Path, content: bytes) -> Path:
    replace_all({path: content})
    return path


def replace_all(contents: Mapping[Path, bytes]) -> None:
    """Writes all files, or none of them if a write fails, as on a full disk."""
    with ExitStack() as files:
        for path, content in contents.items():
            files.enter_context(rewriting(path)).write_bytes(content)


def readable_folder(name: str, path: Path) -> Path:
    """Raises UserError if the folder cannot be read. It may be absent, which counts as empty."""
    try:
        list(path.iterdir())
    except FileNotFoundError:
        pass
    except OSError as error:
        raise _refusal(name, path, "read", error) from None
    return path


def writable_folder(name: str, path: Path) -> Path:
    """Creates the folder if it is absent; raises UserError if it cannot be written."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        # Mode bits are not enough: the file system may be read-only, or one like /proc.
        with TemporaryFile(dir=path):
            pass
    except OSError as error:
        raise _refusal(name, path, "written", error) from None
    return path


def is_file(text: str) -> bool:
    with suppress(OSError, ValueError):
        return Path(text).is_file()
    return False


def writable_file(name: str, path: Path, *others: Path) -> Path:
    """Return the real path of a file that a user named, with links followed. It may be absent; its folder is created. Raises UserError for
    a folder, a device, a pipe or a socket. Also for a read-only file (even for root), for the file that the command prints to, and for one
    of ``others``, which the command reads."""
    target = Path(os.path.realpath(path))
    text = f"{name}={str(path)!r}"
    try:
        status = path.stat()
    except FileNotFoundError:
        writable_folder(name, target.parent)
        return target
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise UserError(f"{text} cannot be written ({reason}): give a file in a folder that can be written") from None
    require(not stat.S_ISDIR(status.st_mode), f"{text} is a folder: give a file in it")
    require(stat.S_ISREG(status.st_mode), f"{text} is a device, a pipe or a socket: give a plain file, or a new one")
    require(not _is_printed_to(status), f"{text} is where the command prints to: give another file")
    require(
        bool(status.st_mode & 0o222) and os.access(target, os.W_OK),
        f"{text} is read-only: make it writable (chmod u+w), or give another file",
    )
    used = next((source for source in others if is_file(str(source)) and source.samefile(target)), None)
    require(used is None, f"{text} would take the place of {str(used)!r}, which the command reads: give another file")
    writable_folder(name, target.parent)
    return target


def _is_printed_to(status: os.stat_result) -> bool:
    for stream in (1, 2):
        with suppress(OSError):
            if os.path.samestat(status, os.fstat(stream)):
                return True
    return False


def _refusal(name: str, path: Path, use: str, error: OSError) -> UserError:
    is_file = isinstance(error, FileExistsError | NotADirectoryError)
    problem = "is not a directory" if is_file else f"cannot be {use} ({error.strerror})"
    return UserError(f"{name}={str(path)!r} {problem}: give a folder that can be {use}")


def yaml_loader() -> type[Any]:
    """The C parser, which is ten times as fast, if PyYAML has it."""
    import yaml

    return getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def read_yaml(path: Path, name: str = "file") -> Any:
    """Raises UserError if the file is absent or unreadable, and otherwise one of ``unreadable_yaml``. A repeated key is an error."""
    import yaml

    class Strict(yaml_loader()):  # type: ignore[misc]
        def construct_yaml_float(self, node: Any) -> float:
            number: float = super().construct_yaml_float(node)
            if math.isinf(number) and "inf" not in node.value.lower():
                problem = f"the number {node.value[:60]} is larger than any that is taken"
                raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark)
            return number

        def construct_mapping(self, node: Any, deep: bool = False) -> Any:
            seen: set[tuple[str, str]] = set()
            for key, _ in node.value if isinstance(node, yaml.MappingNode) else ():
                if isinstance(key, yaml.ScalarNode) and (key.tag, key.value) in seen:
                    problem = f"the key {key.value[:60]!r} is given twice, keep one"
                    raise yaml.constructor.ConstructorError(None, None, problem, key.start_mark)
                seen.add((key.tag, str(key.value)))
            return super().construct_mapping(node, deep)

    Strict.add_constructor("tag:yaml.org,2002:float", Strict.construct_yaml_float)
    return yaml.load(read_text(name, path, max_bytes=_MOST_YAML_BYTES), Loader=Strict)


def unreadable_yaml() -> tuple[type[Exception], ...]:
    """Exceptions that reading a YAML file can raise: absent file, no text, no YAML, too deep nesting, or malformed numbers and dates."""
    import yaml

    return yaml.YAMLError, OSError, RecursionError, ValueError


def one_line(error: Exception) -> str:
    return " ".join(str(error).split())


T = TypeVar("T")

_KEPT: list[Any] = []


def file_cache(maxsize: int) -> Callable[[Callable[..., T]], Callable[..., T]]:
    """Like ``lru_cache``, but ``forget`` empties it."""

    def keep(read: Callable[..., T]) -> Callable[..., T]:
        cached = lru_cache(maxsize=maxsize)(read)
        _KEPT.append(cached)
        return cached

    return keep


def forget() -> None:
    """Empties all caches of ``file_cache``, because files may have changed between two calls from Python."""
    for cache in _KEPT:
        cache.cache_clear()


# -- sizes and seals ----------------------------------------------------------------------------------------

_UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def size_of(name: str, text: str) -> int:
    """Bytes of a size such as '24GB' (10^9), '64MiB' (2^20) or a plain number of bytes."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(B|KB|MB|GB|KIB|MIB|GIB)?", text.strip(), re.IGNORECASE)
    size = 0 if match is None else float(match[1]) * _UNITS[(match[2] or "B").upper()]
    if not 1 <= size < float("inf"):
        raise UserError(f"{name}={text!r} is not a size: write it like 24GB or 64MiB")
    return int(size)


SEAL = "seal"
"""Key of the digest in a sealed file."""


def sealed(value: Mapping[str, Any]) -> dict[str, Any]:
    return {**value, SEAL: _digest(value)}


def is_whole(value: Mapping[str, Any]) -> bool:
    """Whether a sealed value is unchanged since it was written."""
    return value.get(SEAL) == _digest({name: part for name, part in value.items() if name != SEAL})


def _digest(value: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
