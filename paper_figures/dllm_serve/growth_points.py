"""What the growth figure varies, the runs behind each of its points, and what is read off them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from paper_figures.common.runs import Runs
from paper_figures.dllm_serve.comparison import OURS
from repro.reports.figures import View
from repro.runs.cell import Cell, Scalar
from repro.runs.statistics import Interval
from repro.runs.store import StoredRun, over_repeats
from repro.systems.dllm.part import DllmPart
from repro.systems.platforms import Platform

DATASET = "burst"
"""Only its texts are used: lengths are fixed."""
INPUT, OUTPUT = 300, 128
"""Tokens of every request where the axis is another one; a platform scales both. A short output keeps a run of
256 requests on a card below two minutes."""

CONCURRENCY = (1, 2, 4, 8, 16, 32, 64, 128, 256)
TOTAL_LEN = (256, 512, 1024, 2048)
RETENTION = (0.1, 0.25, 0.5, 0.75, 1.0)
MAX_NUM_LOGITS = (256, 512, 1024, 2048, 4096)

SMALL = {"total_len": 8, "retention_ratio": 16, "max_num_logits": 16}
LARGE = {"total_len": 8, "retention_ratio": 64, "max_num_logits": 64}
"""Requests at once on an axis, of the embedded model and of a card."""
RETENTION_LEN = 1024
"""Long enough for retained rows to weigh."""


@dataclass(frozen=True, kw_only=True)
class Varied:
    """One table: what is varied, at which values, and what each run is asked for there."""

    name: str
    title: str
    label: str
    values: Callable[[Platform], tuple[float, ...]]
    knobs: Callable[[Platform, float], dict[str, Scalar]]


@dataclass(frozen=True, kw_only=True)
class GrowthPoint:
    """The repeats of one value of an axis, by seed."""

    axis: Varied
    value: float
    runs: tuple[StoredRun, ...]

    @property
    def throughput(self) -> Interval:
        return over_repeats(self.runs, "throughput_tok_s")

    @property
    def cost(self) -> float | None:
        """Seconds per generated token."""
        mean = self.throughput.mean
        return 1 / mean if mean else None


def scaled(where: Platform, length: int) -> int:
    return round(length * where.part(DllmPart).length_scale)


def _counts(where: Platform) -> Mapping[str, int]:
    return SMALL if where.gpu is None else LARGE


def _lengths(where: Platform) -> tuple[float, ...]:
    return tuple(
        scaled(where, length) for length in TOTAL_LEN if scaled(where, length) <= where.part(DllmPart).max_model_len
    )


def _shape(where: Platform, total_len: int) -> dict[str, Scalar]:
    output = scaled(where, OUTPUT)
    return {"input_len": total_len - output, "gen_length": output, "steps": output, "length_scale": 1.0}


def _usual(where: Platform) -> dict[str, Scalar]:
    return _shape(where, scaled(where, INPUT) + scaled(where, OUTPUT))


AXES = (
    Varied(
        name="concurrency",
        title="concurrency",
        label="requests at once",
        values=lambda where: tuple(n for n in CONCURRENCY if n <= where.part(DllmPart).max_num_seqs),
        knobs=lambda where, n: {**_usual(where), "num_prompts": int(n), "max_num_seqs": int(n)},
    ),
    Varied(
        name="total_len",
        title="request length",
        label="tokens of a request",
        values=_lengths,
        knobs=lambda where, n: {**_shape(where, int(n)), "num_prompts": _counts(where)["total_len"]},
    ),
    Varied(
        name="retention_ratio",
        title="retention",
        label="retention ratio",
        values=lambda where: RETENTION,
        knobs=lambda where, share: {
            **_shape(where, scaled(where, RETENTION_LEN)),
            "num_prompts": _counts(where)["retention_ratio"],
            "retention_ratio": share,
        },
    ),
    Varied(
        name="max_num_logits",
        title="memory by logit budget",
        label="logit rows at once",
        values=lambda where: tuple(
            n
            for n in (scaled(where, rows) for rows in MAX_NUM_LOGITS)
            if n <= where.part(DllmPart).max_num_batched_tokens
        ),
        knobs=lambda where, rows: {
            **_usual(where),
            "num_prompts": _counts(where)["max_num_logits"],
            "max_num_logits": int(rows),
        },
    ),
)


def cell_of(view: View, axis: Varied, value: float) -> Cell:
    knobs = (*axis.knobs(view.platform, value).items(), *view.together("growth"))
    return view.cell(None, OURS, DATASET, knobs=knobs)


def points_of(runs: Runs) -> list[GrowthPoint]:
    """Every point asked for, by axis and value; without runs where none is stored. Axes may share a run."""
    return [
        GrowthPoint(axis=axis, value=value, runs=runs.of(cell_of(runs.view, axis, value)))
        for axis in AXES
        for value in axis.values(runs.view.platform)
    ]


def memory_of(run: StoredRun) -> Mapping[str, int]:
    """Bytes by part: planned from shapes, activations and logits measured where the run was; nothing without a plan."""
    facts: Mapping[str, Any] = run.facts
    plan = facts.get("memory_plan")
    if plan is None:
        return {}
    return {
        "weights": plan["weights_bytes"],
        "activations": facts.get("measured_activation_bytes", plan["activation_bytes"]),
        "logits": facts.get("measured_logits_bytes", plan["logits_bytes"]),
        "kv": plan["kv_bytes"],
    }


def exponent(first: tuple[float, float | None], last: tuple[float, float | None]) -> float | None:
    """x of y ~ value^x through two points (value, y); None for one point, or a y that is not positive."""
    (x0, y0), (x1, y1) = first, last
    if not y0 or not y1 or x0 == x1 or min(y0, y1) <= 0:
        return None
    return math.log(y1 / y0) / math.log(x1 / x0)
