"""What every table says of its runs besides their numbers: how long prompts and answers were, and what a baseline stands for."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from repro.cli.output import number

if TYPE_CHECKING:
    from repro.runs.store import StoredRun

_OF_LENGTHS = ("input_len", "gen_length", "length_scale", "model", "script", "longs", "shorts")
"""Knobs by which requests of a data set differ in length."""


class Lengths(NamedTuple):
    """Mean tokens of a run's prompts and answers, and what the data set's own lengths were multiplied by; named as in JSON."""

    mean_prompt_tokens: float | None
    mean_output_tokens: float | None
    length_scale: float


def lengths_of(run: StoredRun) -> Lengths:
    facts = run.manifest["facts"]
    scale = facts.get("dataset", {}).get("length_scale") or facts.get("facts", {}).get("length_scale") or 1.0
    sums = (run.sum_of(column) for column in ("prompt_len", "output_len"))
    prompt, output = (total / num if num else None for num, total in sums)
    return Lengths(prompt, output, float(scale))


def reading_of(run: StoredRun) -> str | None:
    """What a baseline's run stands for; None of systems that are what they are."""
    from repro.runs.system import SYSTEMS
    from repro.systems.dllm.knobs import BaselineKnobs

    if not getattr(SYSTEMS.get(run.cell.system), "has_readings", False):
        return None
    # A stored measured run names none; a simulated one that names none was made while this was every cell's default.
    return str(run.cell.knob_values.get("reading", BaselineKnobs.reading))


def as_json(run: StoredRun) -> dict[str, Any]:
    return {"reading": reading_of(run), **lengths_of(run)._asdict()}


def lengths_by_dataset(runs: Iterable[StoredRun]) -> Mapping[str, list[Lengths]]:
    """By data set, one for all runs whose requests are drawn alike."""
    drawn = {
        (run.cell.dataset, *(run.cell.knob_values.get(name) for name in _OF_LENGTHS)): run for run in reversed([*runs])
    }
    found: dict[str, list[Lengths]] = {}
    for (dataset, *_), run in reversed(drawn.items()):
        found.setdefault(str(dataset), []).append(lengths_of(run))
    return found


def lengths_json(runs: Iterable[StoredRun]) -> dict[str, list[dict[str, float | None]]]:
    return {dataset: [each._asdict() for each in found] for dataset, found in lengths_by_dataset(runs).items()}


def lengths_line(runs: Iterable[StoredRun]) -> str:
    """For a table with many runs a row."""
    said = []
    for dataset, found in lengths_by_dataset(runs).items():
        prompts, outputs = ([each[i] for each in found if each[i] is not None] for i in (0, 1))
        scales = sorted({each.length_scale for each in found} - {1.0})
        scaled = f" (x {', '.join(f'{scale:g}' for scale in scales)})" if scales else ""
        said.append(f"{dataset} {_span(prompts)}{scaled} / {_span(outputs)}")
    return f"mean tokens of a prompt / of an answer: {'; '.join(said)}"


def _span(means: Sequence[float | None]) -> str:
    known = sorted(each for each in means if each is not None)
    texts = list(dict.fromkeys(number(each, 0) for each in (known[:1] + known[-1:])))
    return " to ".join(texts) or "-"
