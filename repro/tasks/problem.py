"""What a generated problem is, and which split it belongs to."""

from __future__ import annotations

import hashlib
import random
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
    """Shape of the question, e.g. ``total-3`` or ``difference`` or ``compose-4``."""
    prompt: str
    answer: str
    """Reference answer text, without the end-of-text token."""
    final: str
    """What a lenient grader compares: the number after ``####``, or the whole function body."""
    facts: tuple[tuple[str, str], ...]
    """(name, statement) of every fact in the prompt, in prompt order."""
    used: tuple[str, ...]
    """Names of the facts the answer needs, in answer order."""
    num_distractors: int

    @property
    def num_facts(self) -> int:
        return len(self.facts)

    @property
    def key(self) -> str:
        """Canonical identity: facts (sorted) and question. Distractors and order do not make a new problem."""
        return canonical_key(self.task, self.kind, self.facts, self.used)


def canonical_key(task: str, kind: str, facts: tuple[tuple[str, str], ...], used: tuple[str, ...]) -> str:
    body = ";".join(f"{name}={statement}" for name, statement in sorted(facts))
    return f"{task}|{kind}|{body}|{','.join(used)}"


def split_of(key: str) -> Split:
    """A problem's split is a property of its content, so no seed can leak one into the other."""
    return "heldout" if hashlib.blake2b(key.encode(), digest_size=1).digest()[0] < _HELDOUT_PER_256 else "train"


def draw(rng: random.Random, span: Span) -> int:
    return span if isinstance(span, int) else rng.randint(*span)


def check_span(name: str, span: Span, low: int, high: int) -> None:
    first, last = (span, span) if isinstance(span, int) else span
    if not low <= first <= last <= high:
        raise UserError(f"{name}={span!r} must lie within {low}..{high}: give a count or an increasing pair")


def generate_split(count: int, split: Split, make: Callable[[], Problem]) -> list[Problem]:
    """Draw from ``make`` until ``count`` problems of the split are found."""
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
