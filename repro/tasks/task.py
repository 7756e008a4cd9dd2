"""What an evaluation asks and how it grades: problems with their prompts, and one verdict per answer."""

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated

from engines.data import load_named
from engines.knobs import Checked, Count, Range, Seed
from repro.workloads.card import Origin
from repro.workloads.knobs import SourceKind


@dataclass(frozen=True, kw_only=True)
class TaskProblem:
    """``prompt`` is the text a model continues. Instruct models may be asked in a conversation instead: ``user`` is
    the user's turn, ``answer_start`` the opening of the answer, which the model continues."""

    problem_id: str
    prompt: str
    user: str
    answer_start: str = ""
    reference: str
    """A right continuation of the prompt."""
    code: str = ""
    """For tasks that run code: what comes before the continuation in the program ..."""
    check: str = ""
    """... and what is run beside it: raises unless the function ``entry`` of the program, all it knows of that, is right."""
    entry: str = ""


@dataclass(frozen=True, kw_only=True)
class Grade:
    """``strict`` is the task's harder second criterion, None where it has one criterion only."""

    correct: bool
    strict: bool | None = None


Grader = Callable[[Sequence[TaskProblem], Sequence[str]], list[Grade]]


@dataclass(frozen=True, kw_only=True)
class Task:
    name: str
    problems: tuple[TaskProblem, ...]
    origin: Origin
    description: str
    """Which problems these are, in one clause."""
    grader: Grader
    until: tuple[str, ...] = ()
    """An answer ends before the first of these, as lm-eval's ``until``."""
    runs_code: bool = False
    """Whether grading executes what the model wrote (``repro.tasks.sandbox``)."""
    chat: bool = False

    @property
    def digest(self) -> str:
        graded = [[p.problem_id, p.reference, p.code, p.check] for p in self.problems]
        return hashlib.sha256(json.dumps([graded, self.until]).encode()).hexdigest()[:12]

    def prompts(self) -> list[str]:
        """Raw prompts, in problem order; in a conversation use ``user`` and ``answer_start`` of the problems."""
        return [problem.prompt for problem in self.problems]

    def grade(self, problem: TaskProblem, text: str) -> Grade:
        return self.grade_all([problem], [text])[0]

    def grade_all(self, problems: Sequence[TaskProblem], texts: Sequence[str]) -> list[Grade]:
        """``texts`` as generated, up to the end of text; much faster for many answers where they are programs."""
        return self.grader(problems, [cut_at(text, self.until) for text in texts])


@dataclass(frozen=True, kw_only=True)
class TaskOptions(Checked):
    """``seed`` picks the problems of a generated task and does nothing else; None is a task's own default."""

    num_problems: Count | None = None
    seed: Seed = 0
    num_fewshot: Annotated[int, Range(0, 64)] | None = None
    chat: bool = False
    source: SourceKind = "auto"
    dataset_path: str | None = None
    allow_code_execution: bool = False
    """Run what a model wrote also where it cannot be confined."""


@dataclass(frozen=True, kw_only=True)
class TaskEntry:
    name: str
    title: str
    num_problems: int
    """All there are of a published task; how many are asked of a generated one by default."""
    is_generated: bool
    num_fewshot: int | None = None
    """Examples before each question by default; None for a task without."""
    criterion: str
    strict: str | None
    """What ``correct`` and ``strict`` mean."""
    runs_code: bool = False
    """Whether grading runs what a model wrote."""
    where: str
    """What loads it, as module:NAME."""

    @property
    def module(self) -> str:
        return self.where.partition(":")[0]

    def load(self, options: TaskOptions) -> Task | None:
        """None where a published task has no real problems here (``source`` auto without a file, or embedded)."""
        found: Task | None = load_named("task", self.where)(options)
        return found


def cut_at(text: str, until: Sequence[str]) -> str:
    """``text`` up to the first of the strings."""
    ends = [place for stop in until if (place := text.find(stop)) >= 0]
    return text[: min(ends)] if ends else text
