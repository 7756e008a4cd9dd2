"""Grading by text only; no generated code is executed."""

from __future__ import annotations

import re
from dataclasses import dataclass

from repro.tasks.problem import Problem

_FINAL = re.compile(r"####\s*(-?\d+)")
_NUMBER = re.compile(r"-?\d+")


@dataclass(frozen=True, kw_only=True)
class Marks:
    exact: bool
    """The whole answer equals the reference, trailing white space aside."""
    strict: bool
    """The final value, in the place the format prescribes, is right (for code: same as ``exact``)."""
    flexible: bool
    """Like ``strict``; without ``####`` the last number of the text counts."""


def extract_strict(text: str) -> str | None:
    """The number behind the last ``####``."""
    found = _FINAL.findall(text)
    return found[-1] if found else None


def extract_flexible(text: str) -> str | None:
    """The number behind the last ``####``, else the last number anywhere."""
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
