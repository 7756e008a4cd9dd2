"""Numbers that documents state, each with the committed CSV, the rows and the formula it comes from: ``results/numbers.yaml``.

A statement is a sentence's part as it stands in a document, with a formula in braces for every number; ``check-results`` makes it again
and looks for it, word for word. An entry::

    - in: README.md
      says: 'on Burst dLLM-Serve makes {100 * (ours / fast - 1):.0f} % more, paired {gain:x}'
      from:
        ours: {mean: throughput_tok_s, of: cpu-tiny/fig3-cpu-tiny.csv, where: {system: dllm-serve, dataset: burst, rate_req_s: 20}}
        fast: {mean: throughput_tok_s, of: cpu-tiny/fig3-cpu-tiny.csv, where: {system: fast-dllm, dataset: burst, rate_req_s: 20}}
        gain: {ratio: throughput_tok_s, of: cpu-tiny/fig3-cpu-tiny.csv, where: {dataset: burst, rate_req_s: 20},
               one: {system: dllm-serve}, other: {system: fast-dllm}, pair: seed}
"""

from __future__ import annotations

import ast
import csv
import math
import operator
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import mean, median
from typing import Any

from engines.errors import UserError, require
from repro.files import one_line, unreadable_yaml
from repro.runs.statistics import Interval, decimals, paired_ratio

NAME = "numbers.yaml"
TAKEN: Mapping[str, Callable[[Sequence[float]], float]] = {
    "mean": mean,
    "median": median,
    "least": min,
    "largest": max,
    "sum": sum,
}
_OPERATORS: Mapping[type, Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.USub: operator.neg,
}
_CALLED: Mapping[str, Callable[..., float]] = {"min": min, "max": max, "abs": abs, "log": math.log, "round": round}
_KEYS = {"of", "where", "pair", "one", "other"}

Row = dict[str, str]
Number = float | Interval


def statements(root: Path) -> Iterator[tuple[str, str]]:
    """Document and what it has to say, of the results below ``root``; nothing where there is no such file."""
    path = root / NAME
    for place, entry in enumerate(_read(path), start=1):
        try:
            numbers = {name: _number(root, asked) for name, asked in entry.get("from", {}).items()}
            parts = re.split(r"{([^{}]+)}", entry["says"])
            parts[1::2] = [_filled(each, numbers) for each in parts[1::2]]
            yield entry["in"], "".join(parts)
        except (LookupError, ValueError, TypeError, ArithmeticError, SyntaxError, OSError) as error:
            known = f"{type(error).__name__}: {error}"
            raise UserError(
                f"{path.name}: entry {place} ({str(entry)[:60]}) cannot be computed ({known}): fix it"
            ) from error


def _read(path: Path) -> list[dict[str, Any]]:
    if not path.is_file():
        return []
    import yaml

    try:
        entries = yaml.safe_load(path.read_text(encoding="utf-8")) or []
    except unreadable_yaml() as error:
        raise UserError(f"{path.name} is not valid YAML ({one_line(error)}): fix it") from error
    require(
        isinstance(entries, list) and all(isinstance(each, dict) for each in entries), f"{path.name} must be a list"
    )
    return entries


def _number(root: Path, asked: Mapping[str, Any]) -> Number:
    ((how, column),) = [(name, value) for name, value in asked.items() if name not in _KEYS]
    with (root / asked["of"]).open(encoding="utf-8", newline="") as file:
        rows = _chosen(list(csv.DictReader(file)), asked.get("where", {}))
    if how == "count":
        return float(len(rows))
    if how == "ratio":
        sides = [_by(rows, asked[side], column, asked["pair"]) for side in ("one", "other")]
        return paired_ratio(*sides)
    values = [float(row[column]) for row in rows if row[column]]
    if not values:
        raise ValueError(f"no row of {asked['of']} is as asked, or none has a {column}")
    if how == "value":
        (value,) = values
        return value
    return float(TAKEN[how](values))


def _chosen(rows: Sequence[Row], where: Mapping[str, Any]) -> list[Row]:
    """Rows whose columns have these values, or one of several; numbers are compared as numbers."""
    return [row for row in rows if all(_is(row[column], wanted) for column, wanted in where.items())]


def _is(text: str, wanted: Any) -> bool:
    if isinstance(wanted, list):
        return any(_is(text, each) for each in wanted)
    if isinstance(wanted, int | float) and not isinstance(wanted, bool):
        return bool(text) and math.isclose(float(text), wanted)
    return text == ("" if wanted is None else str(wanted))


def _by(rows: Sequence[Row], where: Mapping[str, Any], column: str, pair: str) -> dict[int, float]:
    found = {int(row[pair]): float(row[column]) for row in _chosen(rows, where)}
    if len(found) != len(_chosen(rows, where)) or not found:
        raise ValueError(f"rows with {dict(where)} are none, or several of one {pair}")
    return found


def _filled(text: str, numbers: Mapping[str, Number]) -> str:
    """A formula and its format; ``x`` is a ratio with its interval, no finer than that."""
    formula, _, form = text.rpartition(":") if ":" in text else (text, "", "")
    value = _value(ast.parse(formula.strip(), mode="eval").body, numbers)
    if not isinstance(value, Interval):
        return format(value, form or ".4g")
    digits = decimals(value)
    if form != "x" or value.mean is None or value.low is None or value.high is None:
        raise ValueError(f"{formula} is a ratio with an interval: give it the format x")
    return f"{value.mean:.{digits}f} [{value.low:.{digits}f}, {value.high:.{digits}f}]"


def _value(node: ast.AST, numbers: Mapping[str, Number]) -> Number:
    """Arithmetic and a few functions of the numbers, nothing else; a ratio in arithmetic is its mean."""
    if isinstance(node, ast.Name):
        return numbers[node.id]
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        return node.value
    if isinstance(node, ast.UnaryOp) and type(node.op) in _OPERATORS:
        return float(_OPERATORS[type(node.op)](_plain(node.operand, numbers)))
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        return float(_OPERATORS[type(node.op)](_plain(node.left, numbers), _plain(node.right, numbers)))
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and not node.keywords:
        return _CALLED[node.func.id](*(_plain(each, numbers) for each in node.args))
    raise ValueError(f"{ast.unparse(node)} is no arithmetic on numbers")


def _plain(node: ast.AST, numbers: Mapping[str, Number]) -> float:
    value = _value(node, numbers)
    if isinstance(value, Interval):
        if value.mean is None:
            raise ValueError("a ratio has no value")
        return value.mean
    return value
