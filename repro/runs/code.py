"""Code identity: a digest of the source that decides a run's numbers.

It covers the modules a system names and all they import, from this repository or, where a plug-in does, from anywhere but the
standard library and installed packages; a module that is imported by name at run time (an executor) is named by the system.
What else a plug-in reads is apart (repro.runs.inputs). Comments, docstrings and formatting do not count: what is digested is
the syntax tree without docstrings. A YAML file beside a module that has the module's name counts with it. Libraries are named in
a run's provenance instead.
"""

from __future__ import annotations

import ast
import hashlib
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from itertools import accumulate
from pathlib import Path

PACKAGES = frozenset({"engines", "baselines", "repro"})
"""Packages of this repository that decide numbers; figures only draw them."""
OFFERED = "repro"
"""What this package's own module offers to Python decides none."""

DIGEST_LENGTH = 12


@dataclass(frozen=True, kw_only=True)
class Code:
    digest: str
    modules: Mapping[str, str]
    """Module -> digest of its own source."""

    @cached_property
    def plugged_in(self) -> tuple[str, ...]:
        """Those that are none of ours."""
        return tuple(name for name in self.modules if name.partition(".")[0] not in PACKAGES)

    def with_parts(self, parts: Mapping[str, str]) -> Code:
        """With what lies in no module of a file, by name."""
        return _code({**self.modules, **parts}) if parts else self

    def changed_from(self, stored: Mapping[str, str]) -> tuple[str, ...]:
        """Modules that differ from those of a stored run, or are on one side only."""
        names = sorted(self.modules.keys() | stored.keys())
        return tuple(name for name in names if self.modules.get(name) != stored.get(name))


@cache
def code_of(modules: tuple[str, ...]) -> Code:
    """Identity of these modules and all they import."""
    named = PACKAGES | {name.partition(".")[0] for name in modules}
    found: dict[str, str] = {}
    waiting = list(modules)
    while waiting:
        name = waiting.pop()
        top = name.partition(".")[0]
        if name in found or name == OFFERED or not (top in named or _is_loose(top)):
            continue
        source = _source(name)
        if source is None:
            continue
        found[name], imported = source
        is_ours = top in PACKAGES
        waiting += [each for each in imported if not is_ours or each.partition(".")[0] in named]
    return _code(found)


def _code(found: Mapping[str, str]) -> Code:
    ordered = dict(sorted(found.items()))
    whole = "\n".join(f"{name} {digest}" for name, digest in ordered.items())
    return Code(digest=hashlib.sha256(whole.encode()).hexdigest()[:DIGEST_LENGTH], modules=ordered)


@cache
def _source(name: str) -> tuple[str, tuple[str, ...]] | None:
    """Digest of a module's own source, and the names it imports; None where there is no such module."""
    path = place(name)
    if path is None:
        return None
    digest, tree = digested(path.read_bytes())
    if (data := path.with_suffix(".yaml")).is_file():
        digest = hashlib.sha256(f"{digest} {_data(data)}".encode()).hexdigest()[:DIGEST_LENGTH]
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    return digest, tuple(dict.fromkeys(_imported(tree.body, package)))


def _data(path: Path) -> str:
    """The lines of a YAML file that are neither empty nor a comment; a text in quotes may hold a ``#``."""
    lines = (line.rstrip() for line in path.read_text(encoding="utf-8").splitlines())
    return "\n".join(line for line in lines if line and not line.lstrip().startswith("#"))


def digested(content: bytes) -> tuple[str, ast.Module]:
    """A digest of the syntax tree, and the tree; of what Python cannot read, a module in machine code say, as it is, and an
    empty one."""
    text: list[str] = []
    try:
        tree = ast.parse(content)
        _canonical(tree, text)
        content = "\n".join(text).encode()
    except (SyntaxError, ValueError, RecursionError):
        tree = ast.Module(body=[], type_ignores=[])
    return hashlib.sha256(content).hexdigest()[:DIGEST_LENGTH], tree


@cache
def _is_loose(top: str) -> bool:
    """Whether a package is neither Python's own nor installed, but somebody's source."""
    if top in (*sys.stdlib_module_names, "paper_figures"):  # which draw numbers and decide none
        return False
    spec = spec_of(top)
    places = [] if spec is None else spec.submodule_search_locations or [str(spec.origin)]
    return any(not {"site-packages", "dist-packages"} & set(Path(each).parts) for each in places)


def spec_of(top: str) -> ModuleSpec | None:
    try:
        return find_spec(top)
    except ValueError:  # a script, say, which is in no package
        file = getattr(sys.modules[top], "__file__", None)
        return None if file is None else ModuleSpec(top, None, origin=str(file))


def place(name: str) -> Path | None:
    """Where a module lies. Found on disk: asking the import system would import the packages above."""
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


def _imported(statements: Iterable[ast.AST], package: str) -> Iterator[str]:
    """Every name that may be a module, where not for type checkers alone: packages on the way count too, and what is imported
    from one."""
    for statement in statements:
        match statement:
            case ast.If(test=ast.Name(id="TYPE_CHECKING")):
                continue
            case ast.Import(names=names):
                for alias in names:
                    yield from accumulate(alias.name.split("."), "{}.{}".format)
            case ast.ImportFrom(module=base, names=names, level=level):
                parents = package.split(".")
                above = parents[: len(parents) - level + 1] if level else []
                base = ".".join([*above, *filter(None, [base])])
                yield from accumulate(base.split("."), "{}.{}".format)
                yield from (f"{base}.{alias.name}" for alias in names)
        for name in _BLOCKS:
            yield from _imported(getattr(statement, name, ()), package)


_BLOCKS = ("body", "orelse", "finalbody", "handlers", "cases")
"""Where a statement, a handler or a case has others."""
_LEFT_OUT = frozenset({"ctx", "kind", "type_comment", "type_ignores"})


def _canonical(node: ast.AST, text: list[str]) -> None:
    """Append the tree as words that are the same for every Python: absent fields are left out, so that a field that a
    newer one has added changes nothing."""
    text.append(type(node).__name__)
    for field in node._fields:
        value = getattr(node, field, None)
        if field in _LEFT_OUT or value is None or value == []:
            continue
        text.append(field)
        for each in value if isinstance(value, list) else (value,):
            match each:
                case ast.Expr(value=ast.Constant(value=str())):
                    pass  # a docstring, or what is said of the line above
                case ast.AST():
                    _canonical(each, text)
                case _:
                    text.append(repr(each))
    text.append(")")
