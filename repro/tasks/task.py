"""Tasks of an evaluation: problems with their prompts, and a grader that gives one verdict per answer."""

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
    """A problem. ``prompt`` is the text that a model continues. Instruct models may get it as a conversation instead: ``user`` is
    the user's turn, and ``answer_start`` the beginning of the answer, which the model continues."""

    problem_id: str
    prompt: str
    user: str
    answer_start: str = ""
    reference: str
    """A correct continuation of the prompt."""
    code: str = ""
    """For tasks that run code: the part of the program before the continuation."""
    check: str = ""
    """For tasks that run code: tests that raise unless the program's function ``entry`` is right. They know only this function."""
    entry: str = ""


@dataclass(frozen=True, kw_only=True)
class Grade:
    """The verdict on an answer. ``strict`` is the task's harder second criterion; None if the task has only one."""

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
    """An answer ends before the first of these texts, like lm-eval's ``until``."""
    runs_code: bool = False
    """Whether grading runs programs that the model wrote (``repro.tasks.sandbox``)."""
    chat: bool = False

    @property
    def digest(self) -> str:
        graded = [[p.problem_id, p.reference, p.code, p.check] for p in self.problems]
        return hashlib.sha256(json.dumps([graded, self.until]).encode()).hexdigest()[:12]

    def prompts(self) -> list[str]:
        """The raw prompts, in problem order. In a conversation, use ``user`` and ``answer_start`` of the problems instead."""
        return [problem.prompt for problem in self.problems]

    def grade(self, problem: TaskProblem, text: str) -> Grade:
        return self.grade_all([problem], [text])[0]

    def grade_all(self, problems: Sequence[TaskProblem], texts: Sequence[str]) -> list[Grade]:
        """Grade ``texts`` as generated, up to the end of text. If answers are programs, this is much faster than grading one by one."""
        return self.grader(problems, [cut_at(text, self.until) for text in texts])


@dataclass(frozen=True, kw_only=True)
class TaskOptions(Checked):
    """The options of a task. ``seed`` only picks the problems of a generated task. None means a task's own default."""

    num_problems: Count | None = None
    seed: Seed = 0
    num_fewshot: Annotated[int, Range(0, 64)] | None = None
    chat: bool = False
    source: SourceKind = "auto"
    dataset_path: str | None = None
    allow_code_execution: bool = False
    """Run programs that a model wrote even if they cannot be confined."""


@dataclass(frozen=True, kw_only=True)
class TaskEntry:
    name: str
    title: str
    num_problems: int
    """All problems of a published task; for a generated one, how many are asked by default."""
    is_generated: bool
    num_fewshot: int | None = None
    """Examples before each question by default; None for a task without examples."""
    criterion: str
    strict: str | None
    """The meaning of ``correct`` (in ``criterion``) and of ``strict``."""
    runs_code: bool = False
    """Whether grading runs programs that a model wrote."""
    where: str
    """The function that loads the task, as module:NAME."""

    def load(self, options: TaskOptions) -> Task | None:
        """Load the task; None if a published task has no real problems here (``source`` auto without a file, or embedded)."""
        task: Task | None = load_named("task", self.where)(options)
        return task


def cut_at(text: str, until: Sequence[str]) -> str:
    """``text`` up to the first of the strings in ``until``."""
    ends = [position for stop in until if (position := text.find(stop)) >= 0]
    return text[: min(ends)] if ends else text
