"""The cost of one packed forward on a GPU, from its FLOPs and its memory traffic.

A step has three parts that run one after the other: the matrices of the layers, attention, and
the LM head. Each takes the longer of its arithmetic and its traffic; the step is their sum plus a
fixed overhead. Traffic counts weights (streamed once per forward, the head once per chunk of
logits), K/V rows read and written, and logits. Activations between kernels are not counted.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, Self

from engines.cost.cards import Gpu
from engines.errors import UserError, require
from engines.knobs import Checked, Proportion, Range
from engines.models.shape import ModelShape
from engines.user_file import read_text

Bound = Literal["compute", "memory"]

LOGIT_PASSES = 2
"""Logits are written by the head and read by the commit rule."""


class StepWork(NamedTuple):
    """One packed forward over ``num_sequences`` sequences. A plain tuple: every step of a simulation makes one."""

    query_rows: int
    attention_pairs: int
    """Sum over sequences of query length times key length."""
    logit_rows: int
    kv_read_rows: int
    """Cached or fresh K/V rows that attention reads back, per layer (all layers have the same)."""
    kv_written_rows: int
    num_sequences: int
    logit_chunks: int = 1
    """Serial passes over the LM head (dLLM-Serve §4.3); each streams the head's weights again."""
    extra_linear_flops: int = 0
    """FLOPs of rows that pass some layers or some matrices only; ``query_rows`` pass all. So the next three."""
    extra_weight_bytes: int = 0
    """Layer weights streamed for such rows alone."""
    extra_attention_flops: int = 0
    extra_cache_bytes: int = 0
    """Cached state read or written beyond the K/V rows; charged together with them."""
    new_layout: int = 0
    """1 where the rows lie otherwise than those of the step before, as far as that is noted."""
    builds: int = 0
    """1 where a sequence chooses the rows that it keeps, as far as that is noted."""


@dataclass(frozen=True, kw_only=True)
class Calibration(Checked):
    """The constants of a GPU, the same for every system. Efficiencies are fractions of the datasheet peaks; fits give
    matrix products and attention one share, and assume the rest."""

    gpu: str
    matmul_efficiency: Proportion
    attention_efficiency: Proportion
    bandwidth_efficiency: Proportion
    step_overhead_s: Annotated[float, Range(0)]
    """What every step takes that hardware does not explain (launches, Python)."""
    fitted_on: tuple[str, ...]
    """Names of the measured or published cells the constants were fitted on; empty: not fitted."""
    note: str = ""

    @property
    def text(self) -> str:
        """In a clause."""
        return f"fitted on {'; '.join(self.fitted_on)}" if self.fitted_on else self.note

    @staticmethod
    def datasheet(gpu: Gpu) -> Calibration:
        return Calibration(
            gpu=gpu.name,
            matmul_efficiency=1.0,
            attention_efficiency=1.0,
            bandwidth_efficiency=1.0,
            step_overhead_s=0.0,
            fitted_on=(),
            note="uncalibrated: datasheet peaks and no overhead; real steps are slower",
        )

    notes_steps: ClassVar[bool] = False
    """Whether what a step costs depends on ``new_layout`` and ``builds``."""

    def overhead_s(self, work: StepWork) -> float:
        """What a step with work takes beside its parts; one without launches nothing."""
        return self.step_overhead_s if work.query_rows or work.extra_linear_flops else 0.0

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> Self:
        names = [field.name for field in fields(cls)]
        needed = [field.name for field in fields(cls) if field.default is MISSING]
        unknown, missing = sorted(set(raw) - set(names)), [name for name in needed if name not in raw]
        if unknown or missing:
            raise UserError(
                f"calibration has unknown keys {unknown} and lacks {missing}: give exactly {', '.join(names)}"
            )
        fitted_on = raw["fitted_on"]
        if not isinstance(fitted_on, (list, tuple)) or not all(isinstance(cell, str) for cell in fitted_on):
            raise UserError(f"calibration: fitted_on={fitted_on!r} has the wrong type: see a saved calibration")
        return cls(**{**raw, "fitted_on": tuple(fitted_on)})

    @classmethod
    def load(cls, path: Path) -> Self:
        require(path.exists(), f"calibration file {path} does not exist: give the path of a saved calibration")
        text = read_text("calibration", path)
        try:
            raw = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise UserError(f"calibration file {path} is not JSON ({error}): save it again") from error
        if not isinstance(raw, dict):
            raise UserError(f"calibration file {path} holds a {type(raw).__name__}: it must be one JSON object")
        return cls.from_dict(raw)


@dataclass(frozen=True, kw_only=True)
class CardCalibration(Calibration):
    """What two kinds of steps take besides, where the host is the slower part: both are of a diffusion LLM's steps."""

    layout_s: Annotated[float, Range(0)] = 0.0
    """Taken by a step whose rows lie otherwise than those of the step before: what says where they lie is made anew."""
    build_s: Annotated[float, Range(0)] = 0.0
    """Taken by a step in which a sequence chooses the rows that it keeps."""

    notes_steps: ClassVar[bool] = True

    def overhead_s(self, work: StepWork) -> float:
        return super().overhead_s(work) + self.layout_s * work.new_layout + self.build_s * work.builds


@dataclass(frozen=True, kw_only=True)
class StepCost:
    """Simulated seconds of one step, by part, and what it moved."""

    total_s: float
    linear_s: float
    attention_s: float
    logits_s: float
    overhead_s: float
    bound: Bound
    """Whether arithmetic or traffic, each summed over the parts, would take longer alone."""
    flops: int
    bytes: int


class _Part(NamedTuple):
    flops: int
    bytes: int


class Roofline:
    def __init__(self, shape: ModelShape, gpu: Gpu, calibration: Calibration | None = None) -> None:
        self.shape = shape
        self.gpu = gpu
        self.calibration = Calibration.datasheet(gpu) if calibration is None else calibration
        if self.calibration.gpu != gpu.name:
            raise UserError(
                f"calibration is for gpu={self.calibration.gpu!r}, not {gpu.name!r}: give the one of that GPU"
            )

    def step_time(self, work: StepWork, *, copied_bytes_per_logit: int = 0) -> StepCost:
        """Each part is max(FLOP / (efficiency x peak), bytes / (efficiency x bandwidth)).

        ``copied_bytes_per_logit`` are read and written beyond LOGIT_PASSES by code that reduces logits through copies.
        """
        calibration = self.calibration
        linear, attention, logits = self._parts(
            work, logit_passes=LOGIT_PASSES, copied_bytes_per_logit=copied_bytes_per_logit
        )
        matmul = calibration.matmul_efficiency * self.gpu.peak_flops
        scores = calibration.attention_efficiency * self.gpu.peak_flops
        bandwidth = calibration.bandwidth_efficiency * self.gpu.bandwidth
        compute = (linear.flops / matmul, attention.flops / scores, logits.flops / matmul)
        traffic = tuple(part.bytes / bandwidth for part in (linear, attention, logits))
        bound: Bound = "compute" if math.fsum(compute) >= math.fsum(traffic) else "memory"
        return self._cost(work, (linear, attention, logits), map(max, compute, traffic), bound)

    def _cost(self, work: StepWork, parts: Sequence[_Part], seconds: Iterable[float], bound: Bound) -> StepCost:
        """``seconds`` are those of the ``parts``."""
        (linear, attention, logits), (linear_s, attention_s, logits_s) = parts, seconds
        overhead_s = self.calibration.overhead_s(work)
        return StepCost(
            total_s=linear_s + attention_s + logits_s + overhead_s,
            linear_s=linear_s,
            attention_s=attention_s,
            logits_s=logits_s,
            overhead_s=overhead_s,
            bound=bound,
            flops=linear.flops + attention.flops + logits.flops,
            bytes=linear.bytes + attention.bytes + logits.bytes,
        )

    def floors(self, work: StepWork) -> list[tuple[float, float]]:
        """Seconds that each part's arithmetic, and its traffic, takes at the datasheet peaks."""
        parts = self._parts(work, logit_passes=LOGIT_PASSES)
        return [(part.flops / self.gpu.peak_flops, part.bytes / self.gpu.bandwidth) for part in parts]

    def lower_bound_s(self, work: StepWork) -> float:
        """max(all FLOP / peak, all bytes / bandwidth) at the datasheet peaks, whatever the calibration.

        No implementation of this forward on this card is faster. It is below ``step_time`` even
        without calibration, because one part's arithmetic may not overlap another part's traffic
        there, and because logits are charged one pass here (written once) and two there.
        """
        parts = self._parts(work, logit_passes=1)
        return max(sum(p.flops for p in parts) / self.gpu.peak_flops, sum(p.bytes for p in parts) / self.gpu.bandwidth)

    def _parts(
        self, work: StepWork, *, logit_passes: int, copied_bytes_per_logit: int = 0
    ) -> tuple[_Part, _Part, _Part]:
        if min(work) < 0:
            name, value = next((name, value) for name, value in work._asdict().items() if value < 0)
            raise ValueError(f"{name}={value} must not be negative")
        if work.logit_rows and not work.logit_chunks:
            raise ValueError("logit_chunks=0 cannot produce logit rows")
        shape = self.shape
        linear = _Part(
            flops=shape.linear_flops_per_token * work.query_rows + work.extra_linear_flops,
            bytes=(shape.streamed_weight_bytes_layers(work.query_rows) if work.query_rows else 0)
            + work.extra_weight_bytes,
        )
        attention = _Part(
            flops=shape.attention_flops_per_pair * work.attention_pairs + work.extra_attention_flops,
            bytes=shape.kv_bytes_per_token * (work.kv_read_rows + work.kv_written_rows) + work.extra_cache_bytes,
        )
        logits = _Part(
            flops=shape.logits_flops_per_row * work.logit_rows,
            bytes=shape.streamed_weight_bytes_head * work.logit_chunks
            + (shape.logits_bytes_per_row * logit_passes + shape.vocab_rows * copied_bytes_per_logit) * work.logit_rows
            if work.logit_rows
            else 0,
        )
        return linear, attention, logits
