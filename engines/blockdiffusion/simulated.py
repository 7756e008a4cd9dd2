"""Charges steps of block diffusion to a card instead of running them: the same plans, tokens that mean nothing.

It depends on the model how many places a forward is sure of. A simulation draws this number for each request by itself: one plus a Poisson
number. ``tokens_per_forward`` is its mean, before the rest of a block limits it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Literal

import numpy as np

from engines.blockdiffusion.rules import Bools
from engines.blockdiffusion.sequence import BlockStepPlan, Denoised, Outcome, SharedTables, Work
from engines.cost.roofline import StepPrice, StepWork
from engines.dllm.memory import GUARD_FRACTION
from engines.errors import require
from engines.knobs import Checked, Only, Range
from engines.models.shape import ModelShape
from engines.runtime.rows import Ints

_LOGIT_BYTES = 10
"""Bytes per logit of a chunk: the logit itself, and two copies in float32 while it is reduced."""
_DRAWN_LOGITS, _NOISE_BYTES = 32, 16
"""Rows whose tokens are drawn at a time, and the bytes of noise per logit."""
_ROW_COPIES, _CANVAS_COPIES = 5, 5
"""Embeddings per row of a canvas during its MLP: the layer's input and output, two normed ones, and the last step's expectation. The MLP's
sum comes on top while experts are summed. While logits are made there are four, and the new expectation."""
_MLP_COPIES = 3
"""The MLP's two products, and one of these after the activation."""
_EXPERT_COPIES = 3
"""Experts' inputs, their outputs, and the outputs sorted back, each with one row per chosen expert. Two exist at once."""
_CHOICE_BYTES = 20
"""Bytes per expert that a row of a canvas chose: its number, its place among all and its weight."""


def pool_tokens(shape: ModelShape, memory_bytes: int, *, rows: int, logit_rows: int) -> int:
    """Tokens of K/V that fit beside steps of ``rows`` rows. While a layer attends, its keys and values are copied out of the pool."""
    step = step_bytes(shape, rows, logit_rows)
    free_bytes = memory_bytes - shape.weight_bytes - step - round(GUARD_FRACTION * memory_bytes)
    num_tokens = free_bytes // (shape.kv_bytes_per_token + shape.kv_bytes_per_token // shape.n_layers)
    require(
        num_tokens > 0,
        f"memory_limit={memory_bytes}: {shape.name} takes {shape.weight_bytes} bytes of weights and {step} of a step of "
        f"max_num_batched_tokens={rows}: give more memory or a smaller step",
    )
    return num_tokens


def step_bytes(shape: ModelShape, rows: int, logit_rows: int) -> int:
    """Most bytes that a step holds besides weights and pool, if it makes ``logit_rows`` rows of logits at a time."""
    copied = rows * shape.experts_per_token * shape.d_model * shape.dtype_bytes if shape.num_experts > 1 else 0
    if shape.canvas is None:
        logits = logit_rows * shape.vocab_rows * _LOGIT_BYTES
        return rows * shape.activation_bytes_per_query_token + _EXPERT_COPIES * copied + logits
    row, float32 = shape.d_model * shape.dtype_bytes, 4
    rounded = shape.dtype_bytes if shape.dtype_bytes < float32 else 0
    tables = 2 * (shape.head_dim + shape.canvas.full_head_dim) * (float32 + rounded)
    # Logits and their probabilities, plus one rounded copy if the model is narrower.
    bytes_per_logit = 2 * float32 + rounded
    logits = max(bytes_per_logit * logit_rows, float32 * logit_rows + _NOISE_BYTES * min(logit_rows, _DRAWN_LOGITS))
    head = rows * _CANVAS_COPIES * row + logits * shape.vocab_rows
    experts = rows * (row + shape.experts_per_token * _CHOICE_BYTES) + 2 * copied
    mlp = rows * _MLP_COPIES * (shape.shared_hidden or 0) * shape.dtype_bytes
    return max(rows * (_ROW_COPIES * row + tables) + max(experts, mlp), head)


Sure = Callable[[int, int], int]
"""(request, n) -> how many places the n-th forward of the request is sure of."""
HeadRows = Literal["wanted", "all"]
_DRAWS = 256
HostSeconds = Annotated[float, Range(0, 10), Only(executor="roofline")]


@dataclass(frozen=True, kw_only=True)
class HostCost(Checked):
    """Time that the card does not explain. Steps run one after another: the host waits for the results of one before it plans the next."""

    step_overhead_s: HostSeconds = 0.0
    """Seconds that a simulated step takes besides its kernels."""
    request_overhead_s: HostSeconds = 0.0
    """Seconds that each request adds to a simulated step."""
    prefix_overhead_s: HostSeconds = 0.0
    """Seconds that every 1,000 tokens before a request's rows add to a simulated step, because its prefix is looked up anew each time."""

    def of(self, plan: BlockStepPlan) -> float:
        tokens = sum(work.start for work in plan.works)
        requests_s = self.request_overhead_s * len(plan.works)
        return self.step_overhead_s + requests_s + self.prefix_overhead_s * tokens / 1e3


class PoissonSure:
    """One plus a Poisson number of mean ``tokens_per_forward`` - 1, which depends on seed, request and draw, not on other requests."""

    def __init__(self, tokens_per_forward: float, seed: int) -> None:
        self._extra, self._seed = tokens_per_forward - 1, seed
        self._drawn: dict[int, list[int]] = {}

    def __call__(self, request_id: int, draw: int) -> int:
        counts = self._drawn.setdefault(request_id, [])
        while len(counts) <= draw:
            random = np.random.default_rng((self._seed, request_id, len(counts)))
            counts.extend(1 + random.poisson(self._extra, _DRAWS))
        return int(counts[draw])


class SimulatedExecutor:
    def __init__(
        self,
        cost: StepPrice,
        sure: Sure,
        *,
        block: int,
        shifts: bool,
        tables: SharedTables,
        host: HostCost | None = None,
        head_rows: HeadRows = "wanted",
        max_num_logits: int = 2048,
        makes_canvases: bool = False,
    ) -> None:
        """A canvas is as sure as a block would be. Once it is sure of all places, it predicts the same tokens twice, without entropy."""
        self.makes_canvases = makes_canvases
        self.cost, self.sure, self.tables = cost, sure, tables
        self.block, self.shifts = block, shifts
        self._host = host or HostCost()
        self._head_rows, self._max_num_logits = head_rows, max_num_logits
        # Steps repeat: a simulation would spend most of its time pricing the same ones.
        self._seconds: dict[StepWork, float] = {}

    def open(self, final: Ints) -> int:
        return self.tables.open()

    def extend(self, slot: int, start: int, ids: Ints) -> None:
        """Do nothing: a simulation has no ids."""

    def close_slot(self, slot: int) -> None:
        self.tables.close(slot)

    def run(self, plan: BlockStepPlan, denoised: Denoised) -> Outcome:
        wanted = denoised.wanted
        work = step_work(
            plan,
            wanted,
            self.block,
            grain=1 if self.makes_canvases else self.block,
            windowed=self.cost.shape,
            head_rows=self._head_rows,
            max_num_logits=self._max_num_logits,
        )
        seconds = self._seconds.get(work)
        if seconds is None:
            seconds = self._seconds[work] = self.cost.step_time(work).total_s
        denoising = [each.request_id for each in plan.works if each.rows is not None]
        if self.makes_canvases:
            return self._canvas_outcome(denoising, denoised, seconds + self._host.of(plan))
        count = [self.sure(request_id, n) for request_id, n in zip(denoising, denoised.forward.tolist(), strict=True)]
        num_sure = np.array(count, dtype=np.int64)[:, None]
        is_sure = wanted & (wanted.cumsum(axis=1) <= num_sure) if count else wanted
        return Outcome(
            np.broadcast_to(np.array(denoising, dtype=np.int64)[:, None], wanted.shape),
            np.where(is_sure, 1.0, np.where(wanted, 0.0, -np.inf)),
            np.array([each.request_id for each in plan.works if each.wants_first], dtype=np.int64),
            seconds + self._host.of(plan),
        )

    def _canvas_outcome(self, denoising: list[int], denoised: Denoised, seconds: float) -> Outcome:
        is_sure = [
            sum(self.sure(request_id, n) for n in range(forward - step, forward + 1)) >= self.block
            for request_id, forward, step in zip(denoising, denoised.forward, denoised.step, strict=True)
        ]
        shape = denoised.wanted.shape
        tokens = np.broadcast_to(np.array(denoising, dtype=np.int64)[:, None], shape)
        confidence = np.broadcast_to(np.where(np.array(is_sure, dtype=bool), 0.0, -1e9)[:, None], shape)
        return Outcome(tokens, confidence, np.zeros(0, dtype=np.int64), seconds, tokens, tokens)


def step_work(
    plan: BlockStepPlan,
    wanted: Bools,
    block: int,
    *,
    grain: int | None = None,
    windowed: ModelShape | None = None,
    head_rows: HeadRows = "wanted",
    max_num_logits: int = 2048,
) -> StepWork:
    """The work that a plan asks of a card. Final blocks (or runs of ``grain`` tokens) and denoised rows see themselves and all before them.
    A request's keys are read once, however many of its blocks read them. If some layers have a window, pairs and keys are averages over the
    layers, weighted by what one takes."""
    parts = [_request_work(work, block, grain or block) for work in plan.works]
    rows, pairs, keys = (sum(part[i] for part in parts) for i in range(3))
    if windowed is not None and windowed.canvas is not None:
        window_parts = [_window_work(work, block, windowed.canvas.window) for work in plan.works]
        pair_share, key_share = windowed.windowed_shares
        pairs += round(pair_share * (sum(part[0] for part in window_parts) - pairs))
        keys += round(key_share * (sum(part[1] for part in window_parts) - keys))
    firsts = sum(work.wants_first for work in plan.works)
    logits = rows if head_rows == "all" else int(wanted.sum()) + firsts
    return StepWork(
        query_rows=rows,
        attention_pairs=pairs,
        logit_rows=logits,
        kv_read_rows=keys,
        kv_written_rows=rows,
        num_sequences=len(plan.works),
        logit_chunks=max(1, -(-logits // max_num_logits)),
    )


def _request_work(work: Work, block: int, grain: int) -> tuple[int, int, int]:
    """Rows, pairs of a row and a key, and keys of a request's share of a step."""
    block_start, runs = work.start + work.tokens, work.tokens // grain
    # Run i sees start + i * grain keys; n runs see n * start + (1 + ... + n) * grain, times the rows of a run.
    pairs = grain * (runs * work.start + grain * runs * (runs + 1) // 2)
    if work.rows is None:
        return work.num_rows, pairs, block_start
    denoised = work.rows[1] - work.rows[0]
    return work.num_rows, pairs + denoised * (block_start + block), block_start + block


def _window_work(work: Work, block: int, window: int) -> tuple[int, int]:
    """Pairs and keys of a request's share on a layer with a window, as in ``canvas_executor.within_window``."""
    start, block_start = work.start, work.start + work.tokens
    num_full = min(max(window - start, 0), work.tokens)
    pairs = num_full * start + num_full * (num_full + 1) // 2 + (work.tokens - num_full) * window
    first_key = max(0, (start if work.tokens else block_start) - (window - 1))
    if work.rows is None:
        return pairs, block_start - first_key
    return pairs + block * (min(block_start, window - 1) + block), block_start + block - first_key
