"""GSM8K as lm-eval asks and grades it (its task ``gsm8k``, version 3): few-shot, with two ways to find the number."""

import json
import re
from collections.abc import Sequence
from pathlib import Path

from engines.errors import UserError
from repro.tasks.task import Grade, Task, TaskOptions, TaskProblem
from repro.workloads.card import Local
from repro.workloads.dataset import Record, Records, load_card
from repro.workloads.dataset_rows import hub_records, open_records, read_records

NAME = "gsm8k"
NUM_FEWSHOT = 5
UNTIL = ("Question:", "</s>", "<|im_end|>")
COLUMNS = ("question", "answer")
TRAIN_FILE = "gsm8k_train.jsonl"
"""The file of the training split, beside the test file. Its first rows are the examples."""

EXAMPLES: tuple[Record, ...] = tuple(
    json.loads(Path(__file__).with_name("gsm8k_examples.json").read_text(encoding="utf-8"))
)
"""Examples written for this project in GSM8K's format, for machines that have only its test split."""

_STRICT = re.compile(r"#### (\-?[0-9\.\,]+)")
_FLEXIBLE = re.compile(r"(-?[$0-9.,]{2,})|(-?[0-9]+)")
_IGNORED = (re.compile(","), re.compile(r"\$"), re.compile(r"(?s).*#### "), re.compile(r"\.$"))
_NONE = "[invalid]"


def gsm8k_task(options: TaskOptions, *, data_dir: Path | None = None) -> Task | None:
    """The first problems of the test split; None if only the embedded lengths are available.

    Examples are the first rows of the training split (lm-eval draws others for each problem), or ``EXAMPLES``
    if it is not available.
    """
    records = open_records(
        load_card(NAME), options.source, COLUMNS, dataset_path=options.dataset_path, data_dir=data_dir
    )
    if records is None:
        return None
    examples, source = _examples(records)
    num_fewshot = NUM_FEWSHOT if options.num_fewshot is None else options.num_fewshot
    if not 0 <= num_fewshot <= len(examples):
        raise UserError(f"num_fewshot={num_fewshot} must be between 0 and {len(examples)}, the examples there are")
    head = "".join(f"{_question(row)} {row['answer']}\n\n" for row in examples[:num_fewshot])
    problems = tuple(
        TaskProblem(
            problem_id=f"{NAME}/{index}",
            prompt=head + _question(row),
            user=head + _question(row),
            reference=f" {row['answer']}",
        )
        for index, row in enumerate(records.rows[: options.num_problems])
    )
    shots = f"{num_fewshot} examples {source}" if num_fewshot else "no examples"
    return Task(
        name=NAME,
        problems=problems,
        origin=records.origin,
        description=f"GSM8K test split, {len(problems)} of {len(records.rows)} problems in order, {shots}",
        grader=_grade,
        until=UNTIL,
        chat=options.chat,
    )


def find_number(text: str) -> tuple[str, str]:
    """Return (strict, flexible): the first number after ``#### ``, and the last number anywhere. Each is ``[invalid]`` if there is none."""
    strict, flexible = _STRICT.findall(text), _FLEXIBLE.findall(text)
    last = next(group for group in flexible[-1] if group) if flexible else _NONE
    return (strict[0].strip() if strict else _NONE), last.strip()


def normalize(text: str) -> str:
    for pattern in _IGNORED:
        text = pattern.sub("", text)
    return text.lower()


def _grade(problems: Sequence[TaskProblem], texts: Sequence[str]) -> list[Grade]:
    verdicts = []
    for problem, text in zip(problems, texts, strict=True):
        strict, flexible = (normalize(number) for number in find_number(text))
        target = normalize(problem.reference)
        verdicts.append(Grade(correct=flexible == target, strict=strict == target))
    return verdicts


def _question(row: Record) -> str:
    return f"Question: {row['question']}\nAnswer:"


def _examples(records: Records) -> tuple[tuple[Record, ...], str]:
    if records.origin.source == "hub":
        return hub_records(load_card(NAME), COLUMNS, split="train").rows, "of the training split"
    assert records.path is not None
    train = records.path.with_name(TRAIN_FILE)
    if train.is_file():
        return read_records(Local(paths=(train,), entry=None, location=train.name), COLUMNS).rows, f"of {TRAIN_FILE}"
    return EXAMPLES, "written for this project"
