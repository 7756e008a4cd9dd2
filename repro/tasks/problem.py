"""Generated problems: their content, their split, and the grading of answers. Grading compares texts and runs no code."""

import hashlib
import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

from engines.errors import UserError

Split = Literal["train", "heldout"]
Span = int | tuple[int, int]
"""A fixed count, or an inclusive range to draw it from."""

_HELDOUT_PER_256 = 13  # about 5 %


@dataclass(frozen=True, kw_only=True)
class Problem:
    task: str
    kind: str
    """The form of the question, e.g. ``total-3`` or ``difference`` or ``compose-4``."""
    prompt: str
    answer: str
    """The text of the reference answer, without the end-of-text token."""
    final: str
    """The part of the answer that a lenient grader compares: the number after ``####``, or the whole function body."""
    facts: tuple[tuple[str, str], ...]
    """(name, statement) of every fact in the prompt, in prompt order."""
    used: tuple[str, ...]
    """Names of the facts that the answer needs, in answer order."""
    num_distractors: int

    @property
    def key(self) -> str:
        """The problem's identity: its facts (sorted) and its question. Distractors and order do not make a new problem."""
        body = ";".join(f"{name}={statement}" for name, statement in sorted(self.facts))
        return f"{self.task}|{self.kind}|{body}|{','.join(self.used)}"


def split_of(key: str) -> Split:
    """The split of a problem. It depends only on its content, so no seed can leak a problem from one split into the other."""
    return "heldout" if hashlib.blake2b(key.encode(), digest_size=1).digest()[0] < _HELDOUT_PER_256 else "train"


def draw(rng: random.Random, span: Span) -> int:
    return span if isinstance(span, int) else rng.randint(*span)


def check_span(name: str, span: Span, low: int, high: int) -> None:
    first, last = (span, span) if isinstance(span, int) else span
    if not low <= first <= last <= high:
        raise UserError(f"{name}={span!r} must lie within {low}..{high}: give a count or an increasing pair")


def generate_split(count: int, split: Split, make: Callable[[], Problem]) -> list[Problem]:
    """Call ``make`` until it has made ``count`` problems of the split."""
    if split not in get_args(Split):
        raise UserError(f"split={split!r} is unknown: use one of {', '.join(get_args(Split))}")
    if count < 0:
        raise UserError(f"count={count} must not be negative")
    problems: list[Problem] = []
    while len(problems) < count:
        problem = make()
        if split_of(problem.key) == split:
            problems.append(problem)
    return problems


_FINAL = re.compile(r"####\s*(-?\d+)")
_NUMBER = re.compile(r"-?\d+")


@dataclass(frozen=True, kw_only=True)
class Marks:
    exact: bool
    """Whether the whole answer equals the reference, apart from trailing white space."""
    strict: bool
    """Whether the final value is right and stands after ``####`` (for code: same as ``exact``)."""
    flexible: bool
    """Like ``strict``, but without ``####`` the last number of the text counts."""


def extract_strict(text: str) -> str | None:
    """The number after the last ``####``."""
    numbers = _FINAL.findall(text)
    return numbers[-1] if numbers else None


def extract_flexible(text: str) -> str | None:
    """The number after the last ``####``, else the last number anywhere."""
    strict = extract_strict(text)
    if strict is not None:
        return strict
    numbers = _NUMBER.findall(text)
    return numbers[-1] if numbers else None


def grade(problem: Problem, text: str) -> Marks:
    exact = text.rstrip() == problem.answer.rstrip()
    if problem.final == problem.answer:
        return Marks(exact=exact, strict=exact, flexible=exact)
    return Marks(
        exact=exact, strict=extract_strict(text) == problem.final, flexible=extract_flexible(text) == problem.final
    )
