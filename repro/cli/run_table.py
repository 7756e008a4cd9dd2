"""The table of ``repro bench`` and ``repro sweep``: what each run, or group of repeats, was asked, and its results."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from repro.cli.output import number, percent, print_table
from repro.families.dllm.settings import BaselineKnobs
from repro.runs.cell import BASIS
from repro.runs.system import SYSTEMS

if TYPE_CHECKING:
    from repro.runs.family import SummaryColumn
    from repro.runs.store import StoredRun

_OF_LENGTHS = ("input_len", "gen_length", "length_scale", "model", "script", "longs", "shorts")
"""Knobs that change how long a data set's requests are."""


class Lengths(NamedTuple):
    """Mean tokens of a run's prompts and answers, and the factor on the data set's own lengths. JSON uses the same names."""

    mean_prompt_tokens: float | None
    mean_output_tokens: float | None
    length_scale: float


def lengths_of(run: StoredRun) -> Lengths:
    facts = run.manifest["facts"]
    scale = facts.get("dataset", {}).get("length_scale") or facts.get("facts", {}).get("length_scale") or 1.0
    sums = (run.sum_of(column) for column in ("prompt_len", "output_len"))
    prompt, output = (total / count if count else None for count, total in sums)
    return Lengths(prompt, output, float(scale))


def reading_of(run: StoredRun) -> str | None:
    """Return the reading that a baseline's run stands for; None for systems without readings."""
    if not getattr(SYSTEMS.get(run.cell.system), "has_readings", False):
        return None
    # Stored measured runs name no reading. A simulated run without one was made when this was the default of every cell.
    return str(run.cell.knob_values.get("reading", BaselineKnobs.reading))


def lengths_by_dataset(runs: Iterable[StoredRun]) -> Mapping[str, list[Lengths]]:
    """Return the lengths by data set, one entry for all runs whose requests are drawn alike."""
    by_draw = {
        (run.cell.dataset, *(run.cell.knob_values.get(name) for name in _OF_LENGTHS)): run for run in reversed([*runs])
    }
    by_dataset: dict[str, list[Lengths]] = {}
    for (dataset, *_), run in reversed(by_draw.items()):
        by_dataset.setdefault(str(dataset), []).append(lengths_of(run))
    return by_dataset


def lengths_json(runs: Iterable[StoredRun]) -> dict[str, list[dict[str, float | None]]]:
    return {dataset: [length._asdict() for length in lengths] for dataset, lengths in lengths_by_dataset(runs).items()}


def lengths_line(runs: Iterable[StoredRun]) -> str:
    """One line of lengths, for a table whose rows stand for many runs."""
    parts = []
    for dataset, lengths in lengths_by_dataset(runs).items():
        prompts, outputs = ([length[i] for length in lengths if length[i] is not None] for i in (0, 1))
        scales = sorted({length.length_scale for length in lengths} - {1.0})
        scaled = f" (x {', '.join(f'{scale:g}' for scale in scales)})" if scales else ""
        parts.append(f"{dataset} {_span_text(prompts)}{scaled} / {_span_text(outputs)}")
    return f"mean tokens of a prompt / of an answer: {'; '.join(parts)}"


def _span_text(means: Sequence[float | None]) -> str:
    sorted_means = sorted(mean for mean in means if mean is not None)
    texts = list(dict.fromkeys(number(mean, 0) for mean in (sorted_means[:1] + sorted_means[-1:])))
    return " to ".join(texts) or "-"


def print_runs(rows: Sequence[Sequence[StoredRun]], varied: Sequence[str] = ()) -> None:
    """Print one table per family, with the columns that its runs have. A row is a run, or the repeats of one; ``varied`` are the knobs
    that differ between rows."""
    for family in dict.fromkeys(row[0].family.name for row in rows):
        table_rows = [_Row(row, [lengths_of(run) for run in row]) for row in rows if row[0].family.name == family]
        columns = {title: [text(row) for row in table_rows] for title, text in COLUMNS.items()}
        of_family = table_rows[0].run.family
        shown = of_family.shown
        for title, default in (("reading", "-"), ("lengths", "x 1"), ("model", "-")):
            if {*columns[title]} == {default}:
                del columns[title]
        if any(column.metric == "input_len" for column in shown):
            del columns["prompt tok"], columns["output tok"]
        if of_family.ends_at_first_token:
            del columns["output tok"], columns["tok/s"]
        columns = {f"rate {of_family.unit}/s" if title == "rate" else title: cells for title, cells in columns.items()}
        if of_family.ends_at_first_token:
            columns = {f"TTFT {title}" if title.endswith(" s") else title: cells for title, cells in columns.items()}
        knob_cells = {name: [_knob_text(row.run, name) for row in table_rows] for name in varied if name != "reading"}
        columns = {"system": columns.pop("system"), **knob_cells, **columns}
        columns |= {column.title: [_column_text(row, column) for row in table_rows] for column in shown}
        if any(len(row.runs) > 1 for row in table_rows):
            columns["runs"] = [str(len(row.runs)) for row in table_rows]
        if any(row.run.ran for row in table_rows):
            columns["what ran"] = ["; ".join(dict.fromkeys(run.ran or "-" for run in row.runs)) for row in table_rows]
        columns["obtained"] = ["; ".join(sorted({run.obtained for run in row.runs})) for row in table_rows]
        columns["verdict"] = []
        for row in table_rows:
            invalid = sum(not run.validity.valid for run in row.runs)
            verdict = "INVALID" if invalid == len(row.runs) else f"{invalid} INVALID"
            columns["verdict"].append(verdict if invalid else "VALID")
        print_table("Runs", tuple(columns), list(zip(*columns.values(), strict=True)))


def model_of(run: StoredRun) -> str:
    return str(run.manifest["facts"].get("model") or run.cell.knob_values.get("model") or "-")


def by_setting(runs: Sequence[StoredRun]) -> list[list[StoredRun]]:
    """Group runs that are repeats of each other."""
    groups: dict[object, list[StoredRun]] = {}
    for run in runs:
        groups.setdefault(run.cell.without(BASIS).with_seed(0), []).append(run)
    return list(groups.values())


def provenance_of(runs: Sequence[StoredRun]) -> dict[str, Any]:
    return {
        "obtained": "; ".join(sorted({run.obtained for run in runs})),
        "valid": all(run.validity.valid for run in runs),
        "reasons": sorted({reason for run in runs for reason in run.validity.reasons}),
    }


def run_json(run: StoredRun) -> dict[str, Any]:
    return {
        "cell": run.cell.written(),
        "reading": reading_of(run),
        **lengths_of(run)._asdict(),
        "obtained": run.obtained,
        "valid": run.validity.valid,
        "reasons": list(run.validity.reasons),
        "facts": run.facts,
        **({} if run.ran is None else {"ran": run.ran}),
        "file": str(run.file),
        "summary": run.summary,
    }


class _Row(NamedTuple):
    runs: Sequence[StoredRun]
    lengths: Sequence[Lengths]

    @property
    def run(self) -> StoredRun:
        return self.runs[0]

    def text_of(self, number_of: Callable[[StoredRun], float | None], digits: int = 1, *, scale: float = 1.0) -> str:
        """Format a number of the run. For repeats, format the mean over the valid ones, with its interval."""
        from repro.runs.statistics import mean_interval

        if len(self.runs) == 1:
            return number(number_of(self.run), digits, scale=scale)
        interval = mean_interval(without_none(number_of(run) for run in self.runs if run.validity.valid))
        return number(interval.mean, digits, scale=scale, half_width=interval.half_width)

    def latency(self, part: str) -> str:
        return self.text_of(lambda run: run.summary["e2el_s"][part], 2)

    def tokens(self, name: str) -> str:
        lengths = without_none(getattr(length, name) for length in self.lengths)
        return number(sum(lengths) / len(lengths) if lengths else None)


def without_none(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def rate_of(run: StoredRun) -> str:
    cell = run.cell
    if cell.rate is not None:
        return f"{cell.rate:g}"
    if cell.knob_values.get("arrivals") == "trace":
        return "the trace's"
    return "closed loop" if run.family.name == "prefill" else "inf"


COLUMNS: Mapping[str, Callable[[_Row], str]] = {
    "system": lambda row: row.run.title,
    "reading": lambda row: reading_of(row.run) or "-",
    "model": lambda row: model_of(row.run),
    "dataset": lambda row: row.run.cell.dataset,
    "lengths": lambda row: f"x {row.lengths[0].length_scale:g}",
    "prompt tok": lambda row: row.tokens("mean_prompt_tokens"),
    "output tok": lambda row: row.tokens("mean_output_tokens"),
    "platform": lambda row: row.run.cell.platform,
    "rate": lambda row: rate_of(row.run),
    "tok/s": lambda row: row.text_of(lambda run: run.summary["throughput_tok_s"]),
    "mean s": lambda row: row.latency("mean"),
    "p50 s": lambda row: row.latency("p50"),
    "p90 s": lambda row: row.latency("p90"),
    "longest s": lambda row: row.latency("max"),
}


def _knob_text(run: StoredRun, name: str) -> str:
    value = run.cell.knob_values.get(name)
    return "default" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def _column_text(row: _Row, column: SummaryColumn) -> str:
    if column.is_predicted:
        return _predicted_text(row, column)

    def value(run: StoredRun) -> Any:
        metric = run.summary[column.metric]
        return metric if column.stat is None else metric.get(column.stat)

    if column.is_share:
        return row.text_of(value, scale=100) + " %" if without_none(map(value, row.runs)) else "-"
    first = value(row.run)
    if len(row.runs) == 1 and isinstance(first, int) and column.scale == 1:
        return str(first)
    return row.text_of(value, scale=column.scale)


def _predicted_text(row: _Row, column: SummaryColumn) -> str:
    """Format what the simulator predicted for the run, or for the first of repeats."""
    if (predicted := row.run.facts["simulated"].get(column.metric)) is None:
        return "-"
    if column.is_share:
        return f"{percent(predicted['predicted'])} ({100 * predicted['error']:+.0f} points)"
    return f"{number(predicted['predicted'], scale=column.scale)} ({100 * predicted['error']:+.0f} %)"
