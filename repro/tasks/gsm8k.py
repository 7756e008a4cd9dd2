"""GSM8K as lm-eval asks and grades it (its task ``gsm8k``, version 3): few-shot, two ways of finding the number."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from engines.errors import UserError
from repro.tasks.task import Grade, Origin, Task, TaskProblem
from repro.workloads.card import load_card
from repro.workloads.records import Record, Records, hub_records, open_records, read_records
from repro.workloads.source import HubLoader, SourceKind

NAME = "gsm8k"
NUM_PROBLEMS = 1319
NUM_FEWSHOT = 5
UNTIL = ("Question:", "</s>", "<|im_end|>")
COLUMNS = ("question", "answer")
TRAIN_FILE = "gsm8k_train.jsonl"
"""Beside the test file; its first rows are the examples."""

EXAMPLES: tuple[Record, ...] = (
    {
        "question": "A baker fills 6 trays with 12 rolls each and sells 50 rolls. How many rolls are left?",
        "answer": "The baker makes 6*12=<<6*12=72>>72 rolls.\nThere are 72-50=<<72-50=22>>22 rolls left.\n#### 22",
    },
    {
        "question": "Nora reads 15 pages a day from Monday to Friday and 30 pages on each day of the weekend. How many "
        "pages does she read in a week?",
        "answer": "From Monday to Friday she reads 15*5=<<15*5=75>>75 pages.\nOn the weekend she reads "
        "30*2=<<30*2=60>>60 pages.\nIn a week she reads 75+60=<<75+60=135>>135 pages.\n#### 135",
    },
    {
        "question": "A jacket costs $80. It is sold with 25% off, and a coupon takes off another $10. What is paid for it?",
        "answer": "The discount is 80*25/100=$<<80*25/100=20>>20.\nAfter it the jacket costs 80-20=$<<80-20=60>>60.\n"
        "With the coupon 60-10=$<<60-10=50>>50 is paid.\n#### 50",
    },
    {
        "question": "Tim is 4 years older than Rosa, and Rosa is twice as old as Ivo, who is 7. How old is Tim?",
        "answer": "Rosa is 7*2=<<7*2=14>>14 years old.\nTim is 14+4=<<14+4=18>>18 years old.\n#### 18",
    },
    {
        "question": "A tank holds 240 litres. A pump fills it with 8 litres a minute while a leak loses 2 litres a minute. "
        "How many minutes does it take to fill the empty tank?",
        "answer": "Each minute the tank gains 8-2=<<8-2=6>>6 litres.\nFilling it takes 240/6=<<240/6=40>>40 minutes.\n"
        "#### 40",
    },
)
"""Written for this project, in GSM8K's format, for machines that have its test split only."""

_STRICT = re.compile(r"#### (\-?[0-9\.\,]+)")
_FLEXIBLE = re.compile(r"(-?[$0-9.,]{2,})|(-?[0-9]+)")
_IGNORED = (re.compile(","), re.compile(r"\$"), re.compile(r"(?s).*#### "), re.compile(r"\.$"))
_NONE = "[invalid]"


def gsm8k_task(
    num_problems: int,
    *,
    num_fewshot: int = NUM_FEWSHOT,
    chat: bool = False,
    source: SourceKind = "auto",
    dataset_path: str | None = None,
    data_dir: Path | None = None,
    hub_loader: HubLoader | None = None,
) -> Task | None:
    """The first problems of the test split; None where only the embedded lengths are there.

    Examples are the first rows of the training split (lm-eval draws others for each problem), or ``EXAMPLES``
    where it is not at hand.
    """
    records = open_records(
        load_card(NAME), source, COLUMNS, dataset_path=dataset_path, data_dir=data_dir, hub_loader=hub_loader
    )
    if records is None:
        return None
    examples, whose = _examples(records, hub_loader)
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
        for index, row in enumerate(records.rows[:num_problems])
    )
    shots = f"{num_fewshot} examples {whose}" if num_fewshot else "no examples"
    origin = Origin(
        used=records.used,
        location=records.location,
        revision=records.revision,
        description=f"GSM8K test split, {len(problems)} of {len(records.rows)} problems in order, {shots}",
    )
    return Task(name=NAME, problems=problems, origin=origin, grader=_grade, until=UNTIL, chat=chat)


def find_number(text: str) -> tuple[str, str]:
    """(strict, flexible): the first number behind ``#### ``, and the last number anywhere; ``[invalid]`` if none."""
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
        strict, flexible = (normalize(found) for found in find_number(text))
        target = normalize(problem.reference)
        verdicts.append(Grade(correct=flexible == target, strict=strict == target))
    return verdicts


def _question(row: Record) -> str:
    return f"Question: {row['question']}\nAnswer:"


def _examples(records: Records, hub_loader: HubLoader | None) -> tuple[tuple[Record, ...], str]:
    if records.used == "hub":
        return hub_records(load_card(NAME), COLUMNS, split="train", hub_loader=hub_loader).rows, "of the training split"
    assert records.path is not None
    train = records.path.with_name(TRAIN_FILE)
    if train.is_file():
        return read_records(train, train.name, COLUMNS).rows, f"of {TRAIN_FILE}"
    return EXAMPLES, "written for this project"
