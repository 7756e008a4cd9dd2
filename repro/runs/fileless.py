"""Classes that lie in no file: of a notebook's cell, or ``python -c``. They are known by their source, and work in this process; and
those of a script, which other processes of this machine read again, but for what stands under its ``if __name__ == "__main__":``.

A class's identity is that of its own text, of the functions, classes and values of its module that the text names, and of the
modules that it names, which are in files.
"""

from __future__ import annotations

import ast
import hashlib
import linecache
import pickle
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

from engines.errors import UserError
from repro.runs.code import DIGEST_LENGTH, digested

_DYNAMIC = "<string>"
"""The file of ``python -c``, and of what dataclasses write."""
_PLAIN = (bool, int, float, str, bytes, type(None))


def is_fileless(module: str) -> bool:
    """Whether it is a module of this process that was read from no file."""
    return module in sys.modules and getattr(sys.modules[module], "__file__", None) is None


def why_here(module: str, name: str, *, elsewhere: bool) -> str | None:
    """Why no other process can import it, or with ``elsewhere`` none on another machine: a clause, with what mends it."""
    others = "machines" if elsewhere else "processes"
    if is_fileless(module):
        return f"is in no file, which other {others} could read: put it into one"
    if module != "__main__":
        return None
    if elsewhere:
        return "is in the script that is run, which is not what workers elsewhere run: put it into a module, and import that"
    if _is_guarded(name):
        return 'stands under if __name__ == "__main__":, which other processes leave out: put it above'
    return None


def _is_guarded(name: str) -> bool:
    """Whether the script makes it only where it is run."""
    try:
        tree = ast.parse(Path(str(sys.modules["__main__"].__file__)).read_bytes())
    except (OSError, SyntaxError, ValueError):
        return False
    guards = [each for each in tree.body if isinstance(each, ast.If) and "__name__" in _named(each.test)]
    within = {found for guard in guards for each in guard.body for found in _made(each)}
    outside = {found for each in tree.body if each not in guards for found in _made(each)}
    return name in within - outside


def _made(statement: ast.AST) -> Iterator[str]:
    """Names of classes and functions, and of what is assigned, in a statement and those inside of it."""
    for each in ast.walk(statement):
        if isinstance(each, ast.ClassDef | ast.FunctionDef):
            yield each.name
        elif isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store):
            yield each.id
        elif isinstance(each, ast.alias):
            yield each.asname or each.name


@dataclass(frozen=True, kw_only=True)
class Told:
    """What ``module:NAME`` rests on."""

    parts: dict[str, str] = field(default_factory=dict)
    """``module:NAME`` of each thing in no file -> digest."""
    modules: tuple[str, ...] = ()
    """Those in files."""


def told_of(module: str, name: str) -> Told:
    """Raise UserError where its source cannot be read."""
    found, modules = dict[str, str](), dict[str, None]()
    waiting = [name]
    while waiting:
        name = waiting.pop()
        where, value = f"{module}:{name}", vars(sys.modules[module]).get(name)
        if where in found:
            continue
        if isinstance(value, ModuleType):
            modules[value.__name__] = None
        elif isinstance(value, type | FunctionType) and value.__module__ == module:
            node = _definition(value, where)
            found[where], _ = digested(ast.unparse(node).encode())
            waiting += sorted(_named(node) & vars(sys.modules[module]).keys())
        elif isinstance(value, type | FunctionType):
            modules[value.__module__] = None
        else:
            found[where] = _digest_of(value, where)
            if type(value).__module__ == module:
                waiting.append(type(value).__name__)
    return Told(parts=found, modules=tuple(modules))


def _named(node: ast.AST) -> set[str]:
    names = {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}
    for each in ast.walk(node):  # an annotation as text
        if isinstance(each, ast.Constant) and isinstance(each.value, str) and each.value.isidentifier():
            names.add(each.value)
    return names


def _definition(value: type | FunctionType, where: str) -> ast.stmt:
    """The statement that made it, as it was run."""
    for text in _texts(value):
        try:
            tree = ast.parse(text)
        except SyntaxError:
            continue
        for node in reversed(tree.body):
            if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == value.__name__:
                return node
    raise UserError(
        f"{where!r} is in no file, and its source cannot be read: put it into a file, and name it as module:NAME"
    )


def _texts(value: type | FunctionType) -> Iterator[str]:
    """Sources that it may have come from, the surest first."""
    functions = [value] if isinstance(value, FunctionType) else list(vars(value).values())
    functions = [getattr(each, "fget", None) or getattr(each, "__func__", each) for each in functions]
    codes = [
        each.__code__ for each in functions if isinstance(each, FunctionType) and each.__module__ == value.__module__
    ]
    for file in dict.fromkeys(code.co_filename for code in codes):
        if file != _DYNAMIC and (lines := linecache.getlines(file)):
            yield "".join(lines)
    if value.__module__ == "__main__" and "-c" in sys.orig_argv:
        yield sys.orig_argv[sys.orig_argv.index("-c") + 1]
    # What IPython has run, the latest first.
    cells = getattr(sys.modules[value.__module__], "In", None)
    yield from filter(lambda text: isinstance(text, str), reversed(cells if isinstance(cells, list) else []))


def _digest_of(value: Any, where: str) -> str:
    """The digest of a value that the source names."""
    try:
        content = repr(value).encode() if type(value) in _PLAIN else pickle.dumps(value)
    except Exception as error:
        said = " ".join(str(error).split())
        raise UserError(
            f"{where!r} is in no file and is no value that can be told from another ({type(error).__name__}: {said}): put what "
            "names it into a file, and name that as module:NAME"
        ) from None
    return hashlib.sha256(content).hexdigest()[:DIGEST_LENGTH]
