"""Seeded generators and graders of the tasks the embedded tiny model is trained on. No torch here."""

from __future__ import annotations

from collections.abc import Callable

from repro.tasks import mini_code, mini_gsm
from repro.tasks.grading import Grade, grade
from repro.tasks.problem import Problem, Span, Split

GENERATORS: dict[str, Callable[..., list[Problem]]] = {
    mini_gsm.TASK: mini_gsm.generate,
    mini_code.TASK: mini_code.generate,
}

__all__ = ["GENERATORS", "Grade", "Problem", "Span", "Split", "grade"]
