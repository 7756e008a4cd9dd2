"""pass@1: whether the program that a prompt and its continuation make is right, found by running it."""

from collections.abc import Sequence

from repro.tasks.sandbox.client import ProgramCheck, run_many
from repro.tasks.task import TaskProblem


def passes(problems: Sequence[TaskProblem], texts: Sequence[str], *, allow_code_execution: bool = False) -> list[bool]:
    """Runs ``code`` + continuation of each problem, and ``check`` beside it, confined (or not, with the user's consent)."""
    programs = [f"{p.code}{text}\n" for p, text in zip(problems, texts, strict=True)]
    checks = [ProgramCheck(entry=p.entry, tests=f"{p.check}\n", given=p.code) for p in problems]
    results = run_many(programs, checks, allow_code_execution=allow_code_execution)
    return [result.passed for result in results]
