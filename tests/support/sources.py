"""The sources of this repository, parsed once for every test that looks into them."""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from repro.paths import REPO


@cache
def text(path: Path) -> str:
    return path.read_text(encoding="utf-8")


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(text(path))


@cache
def files(package: str) -> tuple[Path, ...]:
    return tuple(sorted((REPO / package).rglob("*.py")))


def statements(node: ast.AST) -> Iterator[ast.AST]:
    """All inside ``node``, however deep, with the arms they are in; expressions, nine tenths of a tree, are passed over."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.stmt | ast.excepthandler | ast.match_case):
            yield child
            yield from statements(child)
