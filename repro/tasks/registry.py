"""Tasks by name: data sets of a cell whose answers are graded."""

from collections.abc import Mapping
from types import MappingProxyType

from engines.errors import UserError, require
from repro.tasks.task import Task, TaskEntry, TaskOptions

_NUMBER, _BEHIND = "last number", "number behind ####"
_ENTRIES = (
    TaskEntry(
        name="mini-gsm",
        title="mini-gsm",
        num_problems=500,
        is_generated=True,
        criterion=_NUMBER,
        strict=_BEHIND,
        where="repro.tasks.mini:mini_gsm_task",
    ),
    TaskEntry(
        name="mini-code",
        title="mini-code",
        num_problems=500,
        is_generated=True,
        criterion="pass@1",
        strict="the reference's text",
        runs_code=True,
        where="repro.tasks.mini:mini_code_task",
    ),
    TaskEntry(
        name="mini-chain",
        title="mini-chain",
        num_problems=500,
        is_generated=True,
        criterion=_NUMBER,
        strict=_BEHIND,
        where="repro.tasks.mini:mini_chain_task",
    ),
    TaskEntry(
        name="gsm8k",
        title="GSM8K",
        num_problems=1319,
        is_generated=False,
        num_fewshot=5,
        criterion="flexible extract",
        strict="strict match",
        where="repro.tasks.gsm8k:gsm8k_task",
    ),
    TaskEntry(
        name="humaneval",
        title="HumanEval",
        num_problems=164,
        is_generated=False,
        criterion="pass@1",
        strict=None,
        runs_code=True,
        where="repro.tasks.humaneval:humaneval_task",
    ),
)
TASKS: Mapping[str, TaskEntry] = MappingProxyType({entry.name: entry for entry in _ENTRIES})
"""What is told of each without importing it: most cells are graded by none."""


def task_entry(name: str) -> TaskEntry:
    if name not in TASKS:
        raise UserError(f"task={name!r} is unknown: use one of {', '.join(TASKS)}")
    return TASKS[name]


def load_task(name: str, options: TaskOptions) -> Task | None:
    entry = task_entry(name)
    wanted, num_fewshot = options.num_problems, options.num_fewshot
    if entry.is_generated:
        require(
            options.source in ("auto", "embedded") and options.dataset_path is None,
            f"source={options.source!r} has no effect with dataset={name!r}, whose problems are generated: leave it out",
        )
    else:
        require(
            wanted is None or wanted <= entry.num_problems,
            f"num_problems={wanted}: {entry.title} has {entry.num_problems} problems: ask for fewer",
        )
    require(
        num_fewshot is None or entry.num_fewshot is not None,
        f"num_fewshot={num_fewshot} has no effect with dataset={name!r}, which has no examples: leave it out",
    )
    return entry.load(options)
