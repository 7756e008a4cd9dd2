"""Tasks by name. A task is a data set of a cell whose answers are graded."""

import csv
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from engines.errors import UserError, require
from repro.files import file_cache
from repro.runs.cell import WORKLOAD, Cell
from repro.tasks.task import Task, TaskEntry, TaskOptions


def _entry(row: Mapping[str, str]) -> TaskEntry:
    return TaskEntry(
        name=row["name"],
        title=row["title"],
        num_problems=int(row["num_problems"]),
        is_generated=row["is_generated"] == "yes",
        num_fewshot=int(row["num_fewshot"]) if row["num_fewshot"] else None,
        criterion=row["criterion"],
        strict=row["strict"] or None,
        runs_code=row["runs_code"] == "yes",
        where=row["where"],
    )


_LENGTHS = ("length_scale", "input_len", "shared_len")
"""Knobs that change the prompts of a workload."""

with Path(__file__).with_name("tasks.csv").open(encoding="utf-8", newline="") as file:
    _ENTRIES = [_entry(row) for row in csv.DictReader(file)]
TASKS: Mapping[str, TaskEntry] = MappingProxyType({entry.name: entry for entry in _ENTRIES})
"""The entry of each task by name. We read them without importing the tasks, because most cells need none."""


def task_entry(name: str) -> TaskEntry:
    if name not in TASKS:
        raise UserError(f"task={name!r} is unknown: use one of {', '.join(TASKS)}")
    return TASKS[name]


def load_task(name: str, options: TaskOptions) -> Task | None:
    entry = task_entry(name)
    num_problems, num_fewshot = options.num_problems, options.num_fewshot
    if entry.is_generated:
        require(
            options.source in ("auto", "embedded") and options.dataset_path is None,
            f"source={options.source!r} has no effect with dataset={name!r}, whose problems are generated: leave it out",
        )
    else:
        require(
            num_problems is None or num_problems <= entry.num_problems,
            f"num_problems={num_problems}: {entry.title} has {entry.num_problems} problems: ask for fewer",
        )
    require(
        num_fewshot is None or entry.num_fewshot is not None,
        f"num_fewshot={num_fewshot} has no effect with dataset={name!r}, which has no examples: leave it out",
    )
    return entry.load(options)


_load = file_cache(maxsize=4)(load_task)
"""Loads a task, which we keep for all cells of a sweep."""


def task_of_cell(cell: Cell, options: TaskOptions, missing: str | None) -> Task | None:
    """The task whose problems a cell asks; None for a workload that is only served. ``missing`` says what the cell has instead of a model.

    Without a model or without its real problems, a published task is a workload with the same lengths. Without a model, a generated task
    raises UserError.
    """
    entry = None if cell.requested.get(WORKLOAD) is not None else TASKS.get(cell.dataset)
    if entry is None:
        return None
    require(
        missing is None or not entry.is_generated,
        f"dataset={cell.dataset!r} is graded and {missing} cannot answer it: use --executor torch and a checkpoint",
    )
    task = None if missing is not None else _load(cell.dataset, options)
    if task is None:
        return None
    for name in _LENGTHS:
        require(
            name not in cell.requested,
            f"{name}={cell.requested.get(name)!r} has no effect with dataset={cell.dataset!r}, whose prompts are never changed: "
            f"leave it out",
        )
    if task.runs_code:
        from repro.tasks.sandbox.client import require_jail

        require_jail(allow_code_execution=options.allow_code_execution)
    return task
