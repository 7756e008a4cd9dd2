"""Tasks by name: data sets of a cell whose answers are graded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from engines.errors import UserError
from repro.tasks import gsm8k, humaneval, mini_code, mini_gsm
from repro.tasks.mini import mini_code_task, mini_gsm_task
from repro.tasks.task import Task
from repro.workloads.source import SourceKind, check_source


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


@dataclass(frozen=True, kw_only=True)
class TaskOptions:
    """``seed`` picks the problems of a generated task and does nothing else; None is a task's own default."""

    num_problems: int | None = None
    seed: int = 0
    num_fewshot: int | None = None
    chat: bool = False
    source: SourceKind = "auto"
    dataset_path: str | None = None


TASKS: Mapping[str, TaskEntry] = MappingProxyType(
    {
        entry.name: entry
        for entry in (
            TaskEntry(
                name=mini_gsm.TASK,
                title="mini-gsm",
                num_problems=500,
                is_generated=True,
                criterion="last number",
                strict="number behind ####",
            ),
            TaskEntry(
                name=mini_code.TASK,
                title="mini-code",
                num_problems=500,
                is_generated=True,
                criterion="pass@1",
                strict="the reference's text",
                runs_code=True,
            ),
            TaskEntry(
                name=gsm8k.NAME,
                title="GSM8K",
                num_problems=gsm8k.NUM_PROBLEMS,
                is_generated=False,
                num_fewshot=gsm8k.NUM_FEWSHOT,
                criterion="flexible extract",
                strict="strict match",
            ),
            TaskEntry(
                name=humaneval.NAME,
                title="HumanEval",
                num_problems=humaneval.NUM_PROBLEMS,
                is_generated=False,
                criterion="pass@1",
                strict=None,
                runs_code=True,
            ),
        )
    }
)


def task_entry(name: str) -> TaskEntry:
    if name not in TASKS:
        raise UserError(f"task={name!r} is unknown: use one of {', '.join(TASKS)}")
    return TASKS[name]


def load_task(name: str, options: TaskOptions) -> Task | None:
    """The task, or None where a published one has no real problems here (``source`` auto without a file, or embedded)."""
    entry = task_entry(name)
    wanted = entry.num_problems if options.num_problems is None else options.num_problems
    _check(entry, options, wanted)
    if name == mini_gsm.TASK:
        return mini_gsm_task(wanted, options.seed, chat=options.chat)
    if name == mini_code.TASK:
        return mini_code_task(wanted, options.seed, chat=options.chat)
    if name == gsm8k.NAME:
        shots = gsm8k.NUM_FEWSHOT if options.num_fewshot is None else options.num_fewshot
        return gsm8k.gsm8k_task(
            wanted, num_fewshot=shots, chat=options.chat, source=options.source, dataset_path=options.dataset_path
        )
    return humaneval.humaneval_task(wanted, chat=options.chat, source=options.source, dataset_path=options.dataset_path)


def _check(entry: TaskEntry, options: TaskOptions, wanted: int) -> None:
    check_source(options.source, options.dataset_path)
    if wanted < 1:
        raise UserError(f"num_problems={wanted} must be at least 1")
    if entry.is_generated:
        if options.source not in ("auto", "embedded") or options.dataset_path is not None:
            raise UserError(
                f"source={options.source!r} has no effect with dataset={entry.name!r}, whose problems are generated: leave it out"
            )
    elif wanted > entry.num_problems:
        raise UserError(f"num_problems={wanted}: {entry.title} has {entry.num_problems} problems: ask for fewer")
    if options.num_fewshot is not None and entry.num_fewshot is None:
        raise UserError(
            f"num_fewshot={options.num_fewshot} has no effect with dataset={entry.name!r}, which has no examples: leave it out"
        )
