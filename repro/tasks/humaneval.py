"""HumanEval as lm-eval asks it (its tasks ``humaneval`` and, in a conversation, ``humaneval_instruct``): pass@1."""

from collections.abc import Sequence
from pathlib import Path

from repro.tasks.sandbox.client import passes
from repro.tasks.task import Grade, Task, TaskOptions, TaskProblem
from repro.workloads.dataset import Record, load_card
from repro.workloads.dataset_rows import open_records

NAME = "humaneval"
UNTIL = ("\nclass", "\ndef", "\n#", "\nif", "\nprint")
CHAT_UNTIL = (*UNTIL, "```")
COLUMNS = ("task_id", "prompt", "canonical_solution", "test", "entry_point")


def humaneval_task(options: TaskOptions, *, data_dir: Path | None = None) -> Task | None:
    """The first problems of HumanEval; None if only the embedded lengths are available."""
    records = open_records(
        load_card(NAME), options.source, COLUMNS, dataset_path=options.dataset_path, data_dir=data_dir
    )
    if records is None:
        return None

    def grader(problems: Sequence[TaskProblem], texts: Sequence[str]) -> list[Grade]:
        verdicts = passes(problems, texts, allow_code_execution=options.allow_code_execution)
        return [Grade(correct=is_correct) for is_correct in verdicts]

    problems = tuple(_problem(row) for row in records.rows[: options.num_problems])
    return Task(
        name=NAME,
        problems=problems,
        origin=records.origin,
        description=f"HumanEval, {len(problems)} of {len(records.rows)} problems in order",
        grader=grader,
        until=CHAT_UNTIL if options.chat else UNTIL,
        runs_code=True,
        chat=options.chat,
    )


def _problem(row: Record) -> TaskProblem:
    prompt = row["prompt"]
    return TaskProblem(
        problem_id=row["task_id"],
        prompt=prompt,
        user="Write a solution to the following problem and make sure that it passes the tests:\n"
        f"```python\n{prompt}\n```\n",
        answer_start=f"Here is the completed function:\n```python\n{prompt}\n",
        reference=row["canonical_solution"],
        code=prompt,
        check=f"{row['test']}\ncheck({row['entry_point']})",
        entry=row["entry_point"],
    )
