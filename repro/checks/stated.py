"""Numbers that documents state, each with the committed CSV, the rows and the formula it comes from: ``results/numbers.yaml``.

A statement is a sentence's part as it stands in a document, with a formula in braces for every number; ``check-results`` makes it again
and looks for it, word for word, and ``python -m repro.checks.quotes`` puts today's numbers into the documents. An entry::

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
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from statistics import mean, median
from typing import Any

from engines.errors import UserError, require
from repro.files import one_line, unreadable_yaml
from repro.runs.statistics import Interval, as_percent, decimals, from_logarithms, mean_interval, paired_ratio

NAME = "numbers.yaml"
TAKEN: Mapping[str, Callable[[Sequence[float]], float]] = {
    "mean": mean,
    "median": median,
    "least": min,
    "largest": max,
    "sum": sum,
    "typical": lambda values: median(map(abs, values)),
}
_OPERATORS: Mapping[type, Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.USub: operator.neg,
}
_CALLED: Mapping[str, Callable[..., float]] = {"min": min, "max": max, "abs": abs, "log": math.log, "round": round}
_KEYS = {"of", "where", "pair", "one", "other", "by", "best", "take", "times"}

Row = dict[str, str]
Number = float | Interval


@dataclass(frozen=True, kw_only=True)
class _Printed(Interval):
    """One that a table gives in words."""

    digits: int
    """Behind the point: there are no more to be had."""


@dataclass(frozen=True, kw_only=True)
class Statement:
    document: str
    parts: tuple[str, ...]
    """Words and numbers in turn, words first."""

    @property
    def text(self) -> str:
        return "".join(self.parts)


def statements(root: Path) -> Iterator[Statement]:
    """What documents have to say of the results below ``root``; nothing where there is no such file."""
    path = root / NAME
    read = cache(partial(_read_rows, root))
    for place, entry in enumerate(_read(path), start=1):
        try:
            numbers = {name: _number(read, asked) for name, asked in entry.get("from", {}).items()}
            parts = re.split(r"{([^{}]+)}", entry["says"])
            parts[1::2] = [_filled(each, numbers) for each in parts[1::2]]
            yield Statement(document=entry["in"], parts=tuple(parts))
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


def _number(read: Callable[[str], list[Row]], asked: Mapping[str, Any]) -> Number:
    ((how, column),) = [(name, value) for name, value in asked.items() if name not in _KEYS]
    names = [asked["of"]] if isinstance(asked["of"], str) else asked["of"]
    rows = _chosen([row for name in names for row in read(name)], asked.get("where", {}))
    if how == "count":
        return float(len(rows))
    if how in ("ratio", "gap"):
        return _compared(rows, how, column, asked)
    if how in ("ratios", "gaps"):
        return _taken(rows, how[:-1], column, asked)
    values = [_mean_of(row[column]) for row in rows if row[column]]
    if not values:
        raise ValueError(f"no row of {asked['of']} is as asked, or none has a {column}")
    if how == "interval":
        return mean_interval([asked.get("times", 1) * value for value in values])
    if how == "value":
        (value,) = values
        told, _, half = next(row[column] for row in rows if row[column]).partition("±")
        if not (half := half.rstrip(" %")):
            return value
        digits = max(len(each.strip().partition(".")[2]) for each in (told, half))
        return _Printed(mean=value, half_width=float(half), n=0, confidence=0.95, digits=digits)
    return float(TAKEN[how](values))


def _mean_of(text: str) -> float:
    """A number, of one with its interval the mean."""
    return float(text.partition("±")[0])


def _read_rows(root: Path, name: str) -> list[Row]:
    with (root / name).open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def _compared(rows: Sequence[Row], how: str, column: str, asked: Mapping[str, Any]) -> Interval:
    """One side over, or less, the other, paired."""
    one, other = _sides(rows, column, asked)
    if how == "ratio":
        return paired_ratio(one, other)
    return mean_interval([asked.get("times", 1) * (one[key] - other[key]) for key in one if key in other])


def _sides(rows: Sequence[Row], column: str, asked: Mapping[str, Any]) -> tuple[dict[str, float], dict[str, float]]:
    """Both sides by what pairs them; of several on the other side the one with the largest mean."""
    one, other = (_chosen(rows, asked[side]) for side in ("one", "other"))
    if best := asked.get("best"):
        rivals = [_by([row for row in other if row[best] == name], column, asked) for name in _values(other, best)]
        return _by(one, column, asked), max(rivals, key=lambda rival: mean(rival.values()))
    return _by(one, column, asked), _by(other, column, asked)


def _values(rows: Sequence[Row], column: str) -> list[str]:
    return list(dict.fromkeys(row[column] for row in rows))


def _taken(rows: Sequence[Row], how: str, column: str, asked: Mapping[str, Any]) -> Number:
    """Comparisons cell by cell: how many are outside noise to either side, their least, largest or mean, or their mean
    with an interval, over seeds (``pooled``)."""
    cells: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        cells.setdefault(tuple(row[name] for name in asked["by"]), []).append(row)
    if asked["take"] == "pooled":
        return _pooled([_sides(own, column, asked) for own in cells.values()], how, asked.get("times", 1))
    found = [_compared(own, how, column, asked) for own in cells.values()]
    even = 1 if how == "ratio" else 0
    if asked["take"] == "ahead":
        return float(sum(each.low is not None and each.low > even for each in found))
    if asked["take"] == "behind":
        return float(sum(each.high is not None and each.high < even for each in found))
    return float(TAKEN[asked["take"]]([each.mean for each in found if each.mean is not None]))


def _pooled(sides: Sequence[tuple[dict[str, float], dict[str, float]]], how: str, times: float) -> Interval:
    """The mean over cells, of logarithms where it is a ratio, seed by seed."""
    keys = [key for key in sides[0][0] if all(key in one and key in other for one, other in sides)]
    if how == "gap":
        return mean_interval([times * mean(one[key] - other[key] for one, other in sides) for key in keys])
    return from_logarithms(
        mean_interval([mean(math.log(one[key] / other[key]) for one, other in sides) for key in keys])
    )


def _chosen(rows: Sequence[Row], where: Mapping[str, Any]) -> list[Row]:
    """Rows whose columns have these values, or one of several; numbers are compared as numbers."""
    return [row for row in rows if all(_is(row[column], wanted) for column, wanted in where.items())]


def _is(text: str, wanted: Any) -> bool:
    if isinstance(wanted, list):
        return any(_is(text, each) for each in wanted)
    if isinstance(wanted, int | float) and not isinstance(wanted, bool):
        return bool(text) and math.isclose(float(text), wanted)
    return text == ("" if wanted is None else str(wanted))


def _by(rows: Sequence[Row], column: str, asked: Mapping[str, Any]) -> dict[str, float]:
    """Values by what pairs them; a single one where nothing does."""
    pair = asked.get("pair")
    found = {(row[pair] if pair else "", float(row[column])) for row in rows}
    if len(found) != len(dict(found)) or not found:
        raise ValueError(f"rows of one side are none, or several of one {pair}: {len(rows)}")
    return dict(found)


def _filled(text: str, numbers: Mapping[str, Number]) -> str:
    """A formula and its format; ``x`` is a ratio with its interval, ``%`` by how many percent it exceeds 1, ``±`` a mean
    with half its interval, ``+`` before them the sign; none is finer than its interval."""
    formula, _, form = text.rpartition(":") if ":" in text else (text, "", "")
    value = _value(ast.parse(formula.strip(), mode="eval").body, numbers)
    if not isinstance(value, Interval):
        return format(value, form or ".4g")
    sign, kind = ("+", form[1:]) if form.startswith("+") else ("", form)
    if kind == "%":
        value = as_percent(value)
    if kind not in ("x", "%", "±") or value.mean is None:
        raise ValueError(f"{formula} has an interval: give it the format x, % or ±")
    digits = decimals(value, value.digits) if isinstance(value, _Printed) else decimals(value)
    centre, *ends = (
        format(each + 0.0, f"{sign}.{digits}f") for each in (value.mean, value.low, value.high) if each is not None
    )
    if not ends:
        return centre
    return f"{centre} ± {value.half_width:.{digits}f}" if kind == "±" else f"{centre} [{', '.join(ends)}]"


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
