"""``repro reproduce truth`` compares latencies that others measured on real servers with our simulations of the same load.

A folder has ``experiments.csv`` and ``workloads.csv``. It may have ``peers.csv``: the errors of other simulators on the same rows. Times
are in milliseconds, errors in per cent of the measured value. The constants of each campaign are fitted on the committed rows of
``FITTED_ON``; all other rows are predictions.
"""

import csv
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from random import Random
from statistics import fmean, median
from typing import Annotated, Any, NamedTuple

import numpy as np
import pandas as pd

from engines.cluster.sessions import Prefix
from engines.cost.kernels import Composed, kernels_of
from engines.cost.roofline import Gpu, Roofline, StepWork, gpu
from engines.errors import UserError, require
from engines.knobs import Checked, Count, Range, Tokens
from engines.models.shape import CATALOGUE, LLADA_8B, ModelShape, Precision, ReadShape
from repro.families.cluster.system import shape_named
from repro.files import replace_text
from repro.paths import COMMITTED
from repro.runs.cell import Cell
from repro.runs.experiment import prepare
from repro.workloads.rounds import RecordedRound, TracedSession
from repro.workloads.served import MOST_SERVED

MEASURED = COMMITTED / "truth"
METRICS = {"ttft_mean": "TTFT", "itl_mean": "ITL", "e2e_mean": "E2E"}
FITTED_ON = frozenset({"60", "64", "16", "26", "46", "53", "56", "27"})
_NUM_FIRST, _MORE_S, _SEEDS = 300, 60.0, 10
"""Requests of the scope ``first 300``, split over the stages like all requests. Seconds of load after the first stage's requests. Draws of
arrivals that we average."""
_TIMES = tuple(f"{name}_ms" for name in METRICS)
_COLUMNS: Mapping[str, tuple[str, ...]] = {
    "experiments.csv": (
        "exp",
        "model",
        "gpu",
        "precision",
        "tp",
        "max_num_batched_tokens",
        "workload",
        "scope",
        *_TIMES,
    ),
    "workloads.csv": ("workload", "stages_rate_x_seconds"),
    "peers.csv": ("simulator", "metric", "error_pct"),
}
"""Required columns of a folder's files."""

_STAGE = re.compile(r"(\d+(?:\.\d+)?)x(\d+(?:\.\d+)?)")
_BLOCK_TOKENS = 16


@dataclass(frozen=True, kw_only=True)
class SharedPrefix(Checked):
    """Questions after system prompts that users share: the load of inference-perf's shared-prefix data.

    Any run can serve it: ``--workload repro.truth:SharedPrefix --arrivals trace``. Requests cycle through the system prompts.
    """

    stages: str = "8x60"
    """Stages joined by +, each as requests/s x seconds: 8x600+20x600."""
    question_tokens: Tokens = 447
    """Tokens of each question, shared with no other question."""
    system_prompt_tokens: Tokens = 100
    """Tokens of each system prompt, in front of the question."""
    num_system_prompts: Count = 9
    """Number of system prompts."""
    output_tokens: Tokens = 248
    """Tokens of each answer."""
    num_questions: Annotated[int, Range(0, 2**20)] = 0
    """Number of questions that users cycle through; 0: each question is new."""

    def sessions(self, seed: int) -> Iterator[TracedSession]:
        prompt = self.system_prompt_tokens + self.question_tokens
        shared, names = self.system_prompt_tokens // _BLOCK_TOKENS, prompt // _BLOCK_TOKENS
        request = (RecordedRound(prompt, self.output_tokens),)
        for index, arrival_s in enumerate(self._arrivals(Random(seed))):
            question = index % self.num_questions if self.num_questions else index
            # Block names below ``base`` belong to the system prompts, each of which has ``shared`` names.
            first = question % self.num_system_prompts * shared
            base = self.num_system_prompts * shared + question * (names - shared)
            blocks = *range(first, first + shared), *range(base, base + names - shared)
            yield TracedSession(request, arrival_s, prefix=Prefix(_BLOCK_TOKENS, (blocks,)))

    def _arrivals(self, rng: Random) -> Iterator[float]:
        """Each stage has exactly its mean number of requests: Poisson arrivals of a given number are uniform."""
        start_s = 0.0
        for rate, length_s in stages_of(self.stages):
            yield from sorted(start_s + length_s * rng.random() for _ in range(round(rate * length_s)))
            start_s += length_s


def stages_of(text: str) -> list[tuple[float, float]]:
    """Requests/s and seconds of each stage."""
    matches = [_STAGE.fullmatch(stage.strip()) for stage in text.split("+")]
    stages = [(float(match[1]), float(match[2])) if match else (0.0, 0.0) for match in matches]
    if not all(rate * length_s >= 1 for rate, length_s in stages):
        raise UserError(f"stages={text!r} are none: write requests/s x seconds, such as 8x600+20x600")
    num = sum(rate * length_s for rate, length_s in stages)
    require(num <= MOST_SERVED, f"stages={text!r} are {num:,.0f} requests: write at most {MOST_SERVED:,}")
    return stages


CAMPAIGNS: Mapping[str, str] = {"all": "vllm-0.15", f"first {_NUM_FIRST}": "vllm-0.15-fresh"}
"""For each scope, the constants of the server's overhead per step (engines/cluster/constants.json)."""
_NUM_QUESTIONS = 100
"""Number of distinct questions: the client set no number of users, and so had ten for each of ten system prompts."""
_TOKENS_OF_TEXT = 1.044
"""Tokens that a server reads per random token, once the client has sent it as text (docs/truth.md)."""
PRECISIONS: Mapping[str, tuple[Precision, Precision]] = {
    "FP16": ("bf16", "bf16"),
    "BF16": ("bf16", "bf16"),
    "FP8": ("fp8", "fp8-dynamic"),
}
"""Precision of the kernels of dense models, and of mixtures, whose experts use CUTLASS. We take bfloat16's kernels for float16."""
_OF_NO_SIZE = frozenset({"instruct", "chat", "hf", "fp8", "dynamic"})
"""Parts of checkpoint names that do not tell the model's shape."""


@dataclass(frozen=True, kw_only=True)
class Held:
    """One experiment: its measured and its predicted times."""

    row: Mapping[str, str]
    measured: Mapping[str, float]
    predicted: Mapping[str, float]
    is_fitted: bool

    @property
    def error_pct(self) -> dict[str, float]:
        return {name: 100 * (self.predicted[name] / self.measured[name] - 1) for name in METRICS}


def simulate_all(folder: Path | None = None, advance: Callable[[], None] = lambda: None) -> list[Held]:
    """Simulates every experiment of the folder. Raises UserError, before the first simulation, for a row that cannot be simulated."""
    folder = folder or MEASURED
    loads = {row["workload"]: row for row in _rows(folder, "workloads.csv")}
    rows = _rows(folder, "experiments.csv")
    fitted = {_measured(row) for row in _rows(MEASURED, "experiments.csv") if row["exp"] in FITTED_ON}
    cells = [_cell(row, loads, folder) for row in rows]
    for row, cell in zip(rows, cells, strict=True):
        try:
            prepare(cell)
        except UserError as error:
            raise UserError(f"{folder / 'experiments.csv'}, exp={row['exp']!r}: {error}") from error
    held = []
    for row, cell in zip(rows, cells, strict=True):
        num = _num_averaged(row["scope"], loads[row["workload"]]["stages_rate_x_seconds"])
        held.append(_simulate(row, cell, num, is_fitted=_measured(row) in fitted))
        advance()
    return held


def _measured(row: Mapping[str, str]) -> tuple[str, ...]:
    """Identifies a committed row; a row of another folder may have the same ``exp`` but not the same times."""
    return tuple(row[name] for name in ("exp", *_TIMES))


def _rows(folder: Path, name: str) -> list[dict[str, str]]:
    path = folder / name
    require(
        path.is_file(), f"measured={str(folder)!r} has no {name}: give a folder with experiments.csv and workloads.csv"
    )
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.DictReader(file, restval="")
            rows = list(reader)
    except (UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"{path} cannot be read ({error}): write CSV in UTF-8") from error
    missing = [column for column in _COLUMNS.get(name, ()) if column not in (reader.fieldnames or ())]
    require(not missing, f"{path} has no column {', '.join(missing)}: add it (docs/truth.md)")
    require(bool(rows), f"{path} has no row: add one")
    return rows


def _cell(row: Mapping[str, str], loads: Mapping[str, Mapping[str, str]], folder: Path) -> Cell:
    where = f"{folder / 'experiments.csv'}, exp={row['exp']!r}"
    for name, choices in (("workload", loads), ("scope", CAMPAIGNS), ("precision", PRECISIONS)):
        require(row[name] in choices, f"{where}: {name}={row[name]!r} is none of {', '.join(choices)}")
    load, checkpoint = loads[row["workload"]], Checkpoint.of(row["model"])
    model = checkpoint.model
    for name in _TIMES:
        _number(where, row, name)
    knobs: dict[str, Any] = {
        "workload": "repro.truth:SharedPrefix",
        "arrivals": "trace",
        "constants": CAMPAIGNS[row["scope"]] + ("-top-p" if checkpoint.cuts_draws else ""),
        "model": model,
        "deployment": f"TP{_count(where, row, 'tp')}x1",
        "num_gpus": _count(where, row, "tp"),
        "scheduling": "chunked",
        "max_num_batched_tokens": _count(where, row, "max_num_batched_tokens"),
        "max_num_seqs": 128,
        "transient": True,
    }
    dense, mixture = PRECISIONS[row["precision"]]
    if dense != "bf16":
        knobs["precision"] = mixture if _shape_named(where, model).num_experts > 1 else dense
    of_load = f"{folder / 'workloads.csv'}, workload={row['workload']!r}"
    for name in ("question_tokens", "system_prompt_tokens", "num_system_prompts", "output_tokens"):
        knobs[name] = _count(of_load, load, name.removeprefix("num_"))
        if name in ("question_tokens", "system_prompt_tokens"):
            knobs[name] = round(_TOKENS_OF_TEXT * knobs[name])
    require(knobs["output_tokens"] > 1, f"{of_load}: output_tokens=1 leaves no time between tokens: give 2 or more")
    if row.get("kv_blocks_of_16"):
        knobs["kv_tokens"] = 16 * _count(where, row, "kv_blocks_of_16")
    knobs["num_questions"] = _NUM_QUESTIONS
    stages = load["stages_rate_x_seconds"]
    num, (rate, length_s) = _num_averaged(row["scope"], stages), stages_of(stages)[0]
    if num is not None:
        require(
            rate * length_s >= _NUM_FIRST,
            f"{where}: scope={row['scope']!r} needs a first stage of as many requests, and {stages} is none: give scope=all",
        )
        stages = f"{rate:g}x{num / rate + _MORE_S:g}"
    return Cell(
        system="vllm-sim",
        dataset="SharedPrefix",
        platform=row["gpu"].lower(),
        executor="roofline",
        rate=None,
        seed=0,
        knobs=tuple({**knobs, "stages": stages}.items()),
    )


def _num_averaged(scope: str, stages: str) -> int | None:
    """Number of first requests that a row's times average; None: all. With several stages, only the first stage's share counts."""
    if scope == "all":
        return None
    nums = [rate * length_s for rate, length_s in stages_of(stages)]
    return round(_NUM_FIRST * nums[0] / sum(nums))


class Checkpoint(NamedTuple):
    """A checkpoint as described in ``models.csv``."""

    model: str
    """The name of one of our shapes, or the checkpoint itself, which may be a folder."""
    cuts_draws: bool = False
    """Whether its ``generation_config.json`` has a ``top_p`` or a ``top_k``."""
    tokens_per_text: float = 1.0
    """Tokens of an answer per token that the client counts in its text and divides by. Special tokens have no text."""

    @staticmethod
    def of(name: str) -> "Checkpoint":
        """The checkpoint as listed, or else our shape with the same name."""
        if name in _listed_checkpoints():
            return _listed_checkpoints()[name]
        parts = name.rpartition("/")[2].lower().split("-")
        bare_name = "-".join(part for part in parts if part not in _OF_NO_SIZE)
        names = {shape.name.lower(): shape.name for shape in CATALOGUE}
        return Checkpoint(names.get(bare_name, name))


@cache
def _listed_checkpoints() -> Mapping[str, Checkpoint]:
    rows = _rows(MEASURED, "models.csv")
    return {
        row["checkpoint"]: Checkpoint(row["model"], bool(row["cuts_draws"]), float(row["tokens_per_text"] or 1))
        for row in rows
    }


def _shape_named(where: str, model: str) -> ModelShape:
    try:
        return shape_named(model)
    except UserError as error:
        raise UserError(f"{where}: {error}") from error


def _number(where: str, row: Mapping[str, str], name: str) -> float:
    """Raises UserError unless the value is a number above 0."""
    value = _finite(where, row, name)
    require(value > 0, f"{where}: {name}={row[name]!r} must be a number above 0")
    return value


def _finite(where: str, row: Mapping[str, str], name: str) -> float:
    text = row.get(name) or ""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    require(math.isfinite(value), f"{where}: {name}={text!r} must be a number")
    return value


def _count(where: str, row: Mapping[str, str], name: str) -> int:
    value = _number(where, row, name)
    require(value.is_integer(), f"{where}: {name}={row[name]!r} must be a whole number")
    return int(value)


def _simulate(row: Mapping[str, str], cell: Cell, num: int | None, *, is_fitted: bool) -> Held:
    runs = [_times(cell.with_seed(seed), num) for seed in range(1 if num is None else _SEEDS)]
    predicted = {name: fmean(run[name] for run in runs) for name in METRICS}
    predicted["itl_mean"] *= Checkpoint.of(row["model"]).tokens_per_text
    return Held(
        row=row, measured={name: float(row[f"{name}_ms"]) for name in METRICS}, predicted=predicted, is_fitted=is_fitted
    )


def _times(cell: Cell, num: int | None) -> dict[str, float]:
    requests = prepare(cell).run().requests
    arrival_s, first_s, end_s, tokens = (
        np.array(requests[name][:num], dtype=float)
        for name in ("arrival_s", "first_output_s", "finished_s", "output_len")
    )
    times = {
        "ttft_mean": first_s - arrival_s,
        "itl_mean": (end_s - first_s) / (tokens - 1),
        "e2e_mean": end_s - arrival_s,
    }
    return {name: 1e3 * float(times_s.mean()) for name, times_s in times.items()}


class Error(NamedTuple):
    """Median, 90th percentile and number of absolute errors, in per cent."""

    median: float
    p90: float
    num: int


def _error(errors_pct: Sequence[float]) -> Error:
    sizes = [abs(error) for error in errors_pct]
    return Error(median(sizes), float(np.percentile(sizes, 90)), len(sizes))


def by_group(held: Sequence[Held]) -> dict[str, dict[str, Error]]:
    """Our errors on all rows, on the predicted rows, and on the rows fitted on."""
    groups = {
        "all": held,
        "predicted": [result for result in held if not result.is_fitted],
        "fitted": [result for result in held if result.is_fitted],
    }
    return {
        f"ours, {name}": {metric: _error([result.error_pct[metric] for result in group]) for metric in METRICS}
        for name, group in groups.items()
        if group
    }


def peers(folder: Path | None = None) -> dict[str, dict[str, Error]]:
    """Errors of each simulator on the rows that it published; empty if the folder has no ``peers.csv``."""
    folder = folder or MEASURED
    if not (folder / "peers.csv").is_file():
        return {}
    sizes: dict[str, dict[str, list[float]]] = {}
    for row in _rows(folder, "peers.csv"):
        if row["metric"] in METRICS:
            where = f"{folder / 'peers.csv'}, simulator={row['simulator']!r}"
            errors = sizes.setdefault(row["simulator"], {}).setdefault(row["metric"], [])
            errors.append(_finite(where, row, "error_pct"))
    return {
        name: {metric: _error(by_metric[metric]) for metric in METRICS if metric in by_metric}
        for name, by_metric in sorted(sizes.items())
    }


# -- numbers that others state ----------------------------------------------------------------------------

STATED_BY = ("vllm", "trtllm")
"""Frameworks whose tabled kernel times we compare a stated number with."""
_NEAR = 1.15
"""A stated speed may be this many times ours, because prompts and lengths are not always stated."""


def _gemma(precision: str) -> list[tuple[int, ModelShape]]:
    """Sliding and full layers of DiffusionGemma 26B-A4B: how many tokens before a canvas each kind sees, and its shape."""
    content = json.loads((MEASURED / "diffusion-gemma.json").read_text(encoding="utf-8"))
    shared = content["all"] | {"precision": precision}
    return [(layer.pop("sees"), ReadShape(**shared, **layer)) for layer in content["layers"]]


def _forwards(row: Mapping[str, str]) -> Iterator[tuple[float, ModelShape, StepWork]]:
    """How often each forward runs on a card, and its work in the layers of one shape."""
    names = ("gpus", "answers", "requests", "prompt", "canvas", "canvases", "forwards")
    gpus, answers, requests, prompt, canvas, canvases, forwards = (int(row[name]) for name in names)
    if row["model"] == "llada":
        # LLaDA has no cache: every forward computes all rows and their logits.
        rows = prompt + canvas
        yield answers / gpus * forwards, LLADA_8B, _packed(requests, rows, 0, 1.0, heads=1)
        return
    for index, (window, shape) in enumerate(_gemma(row["precision"])):
        yield 1, shape, _packed(1, prompt, 0, min(0.5, window / max(1, prompt)))
        for earlier in range(canvases):
            seen = min(prompt + earlier * canvas, window)
            # Logits, and the embedding of what they predict: two equally large products.
            yield forwards, shape, _packed(1, canvas, seen, 1.0, heads=0 if index else 2)
            yield 1, shape, _packed(1, canvas, seen, 0.5)


def _packed(requests: int, rows: int, num_cached: int, share: float, heads: int = 0) -> StepWork:
    """The work if the ``rows`` of each request attend to ``num_cached`` cached tokens and to a ``share`` of each other."""
    return StepWork(
        query_rows=requests * rows,
        attention_pairs=round(requests * rows * (num_cached + share * rows)),
        logit_rows=heads * requests * rows,
        logit_chunks=max(1, heads),
        kv_read_rows=requests * (num_cached + rows),
        kv_written_rows=requests * rows,
        num_sequences=requests,
    )


def _kernels_s(shape: ModelShape, card: Gpu, framework: str, work: StepWork) -> float:
    """Attention of head sizes without a table takes the datasheet's time."""
    untabled_s = 0.0
    if shape.head_dim > 128:
        untabled_s = work.attention_pairs * shape.attention_flops_per_pair / card.peak_flops
        work = work._replace(attention_pairs=0)
    return math.fsum(Composed(kernels_of(shape, card, framework)).parts(work)) + untabled_s


@dataclass(frozen=True, kw_only=True)
class Stated:
    """A published number, with our estimate at the datasheet's peaks and by each framework's tabled kernels."""

    row: Mapping[str, str]
    datasheet: float
    kernels: Mapping[str, float]

    def speed_over(self, ours: float) -> float:
        """The stated speed over ours. For times, the inverse ratio."""
        value = float(self.row["value"])
        return value / ours if self.row["unit"] == "tok/s" else ours / value

    @property
    def of_kernels(self) -> float:
        """The stated speed over the speed of the fastest kernels."""
        return min(map(self.speed_over, self.kernels.values()))

    @property
    def shown(self) -> dict[str, str]:
        """A row of ``stated.csv``."""
        facts = {name: self.row[name] for name in ("claim", "source", "condition", "value", "unit")}
        ours = {name: f"{value:.4g}" for name, value in {"datasheet": self.datasheet, **self.kernels}.items()}
        judged = {"of_kernels": f"{self.of_kernels:.2f}", "role": self.row["role"], "verdict": self.verdict}
        return facts | ours | judged

    @property
    def verdict(self) -> str:
        if self.speed_over(self.datasheet) > 1:
            return "cannot be"
        return "can be" if self.of_kernels <= _NEAR else "not by these kernels"


def stated_claims() -> list[Stated]:
    """Every committed claim. We fitted nothing to these claims."""
    return [_parse_stated(row) for row in _rows(MEASURED, "claims.csv")]


def _parse_stated(row: Mapping[str, str]) -> Stated:
    card, forwards = gpu(row["gpu"]), [forward for forward in _forwards(row) if forward[2].query_rows]
    # FP8 arithmetic is twice as fast.
    fastest = card if row["precision"] == "bf16" else replace(card, bf16_tflops=2 * card.bf16_tflops)
    tokens = int(row["requests"]) * int(row["canvas"]) * int(row["canvases"])

    def value(seconds: Iterable[float]) -> float:
        total_s = math.fsum(seconds)
        return {"tok/s": tokens / total_s, "h": total_s / 3600, "ms": 1e3 * total_s}[row["unit"]]

    return Stated(
        row=row,
        datasheet=value(num * Roofline(shape, fastest).lower_bound_s(work) for num, shape, work in forwards),
        kernels={
            name: value(num * _kernels_s(shape, card, name, work) for num, shape, work in forwards)
            for name in STATED_BY
        },
    )


def save(
    held: Sequence[Held], groups: Mapping[str, Mapping[str, Error]], claims: Sequence[Stated], folder: Path
) -> list[Path]:
    """Writes ``truth.csv`` with a row per experiment, ``errors.csv`` per simulator and metric, and ``stated.csv`` per claim."""
    rows = []
    for result in held:
        role = "fitted" if result.is_fitted else "predicted"
        row: dict[str, object] = {name: result.row[name] for name in ("exp", "model", "tp", "workload", "scope")}
        for name in METRICS:
            row[f"{name}_ms"] = result.row[f"{name}_ms"]
            row[f"{name}_predicted_ms"] = f"{result.predicted[name]:.5g}"
            row[f"{name}_error_pct"] = f"{result.error_pct[name]:.1f}"
        rows.append({**row, "role": role})
    sums = [
        {
            "simulator": name,
            "metric": metric,
            "median_pct": f"{error.median:.1f}",
            "p90_pct": f"{error.p90:.1f}",
            "rows": error.num,
        }
        for name, errors in groups.items()
        for metric, error in errors.items()
    ]
    contents: dict[Path, Sequence[Mapping[str, object]]] = {folder / "truth.csv": rows, folder / "errors.csv": sums}
    if claims:
        contents[folder / "stated.csv"] = [claim.shown for claim in claims]
    return [replace_text(path, pd.DataFrame(table).to_csv(index=False)) for path, table in contents.items()]
