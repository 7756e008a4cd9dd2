"""How long a function may be, and how a docstring begins."""

import ast
from collections.abc import Iterator

from support.sources import files, statements, tree

from repro.paths import REPO

PACKAGES = ("engines", "baselines", "repro", "paper_figures")
MOST_LINES = 60


def nodes() -> Iterator[tuple[str, ast.AST]]:
    for package in PACKAGES:
        for path in files(package):
            for node in statements(tree(path)):
                yield str(path.relative_to(REPO)), node


def test_a_function_can_be_seen_at_once():
    """How many paths it has is for ruff (C901)."""
    functions = [
        (name, node.name, (node.end_lineno or 0) - node.lineno + 1)
        for name, node in nodes()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    assert [each for each in functions if each[2] > MOST_LINES] == []


def test_a_docstring_says_what_the_thing_is_or_does():
    texts = [
        (name, node.lineno, node.value.value)
        for name, node in nodes()
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
    ]
    assert [(name, line) for name, line, text in texts if text.startswith(("Of ", "Likewise"))] == []
