"""Runs steps of a causal decoder on a paged pool: prefills, chunks over history and decodes, packed or in a bucket.

Token ids live on the device in slots. A step's metadata is built once, by array arithmetic over its sequences, and
sent in one transfer. The model runs one forward. The sampled ids go back into the slots without the host seeing them.

We capture CUDA graphs beforehand, for the grid of buckets (LAPS §3.1) and a ladder of packed sizes. A graph holds the layers and the
head on each sequence's newest row, and nothing that depends on a step's sizes.

``MeasuredSteps`` runs steps in this way and returns how long they took. The simulated cluster gets measured steps on a virtual clock,
and a policy's step model is fitted on them.
"""

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from engines.ar.sampling import GREEDY, Logprobs, SamplingParams
from engines.ar.torch.attention import (
    DecodeKernels,
    DeviceKernel,
    PagedAttention,
    SdpaAttention,
    StepAttention,
    probe,
    span_arrays,
    spans_of,
)
from engines.ar.torch.rows import PackedWork, Size, flat_index, most_sequences, packed_rows, rows_in
from engines.ar.torch.sampling import Draws, LogitRules, TokenScores, next_tokens, penalize
from engines.cost.roofline import DecodeLine
from engines.errors import require
from engines.kernels import host
from engines.kernels.probe import HostKernels, TritonKernels
from engines.kernels.whole import WholeLayers
from engines.models.decoder import CausalModel
from engines.models.layers import FusedOps, fuse, products_by
from engines.policies.views import Bucket, Chunk, Rung
from engines.runtime.device import PoolTensors, Staging, Store, on, staging_to
from engines.runtime.graphs import CudaRecorder, Graphs, Recorder
from engines.runtime.rows import BlockTables, Ints


class CaptureCost(NamedTuple):
    seconds: float
    num_bytes: int
    """Device memory that was reserved for the graph; 0 if it fits into what larger graphs left, or without a device."""


class CausalGraphs(Graphs[Size]):
    def __init__(
        self,
        model: CausalModel,
        attention: PagedAttention,
        tables: BlockTables,
        pool: PoolTensors,
        tokens: Tensor,
        staging: Staging,
        recorder: Recorder,
    ) -> None:
        """``tokens`` [slots + 1, width] is the executor's store."""
        super().__init__(recorder, staging, tokens.device)
        self._model, self._attention, self._tables, self._pool = model, attention, tables, pool
        self._tokens = tokens
        self._costs: dict[Size, CaptureCost] = {}

    @property
    def costs(self) -> Mapping[Size, CaptureCost]:
        return self._costs

    def capture(self, size: Size) -> None:
        if size in self:
            return
        device = self._tokens.device
        memory_bytes = torch.cuda.memory_reserved(device) if device.type == "cuda" else 0
        start_s = perf_counter()
        self.record(size, self._metadata(size, PackedWork.of([])), partial(self._forward, size))
        if device.type == "cuda":
            torch.cuda.synchronize(device)
            memory_bytes = torch.cuda.memory_reserved(device) - memory_bytes
        self._costs[size] = CaptureCost(perf_counter() - start_s, memory_bytes)

    def run(self, size: Size, work: PackedWork) -> Tensor:
        """Return logits [sequences of the size, V], those of ``work`` first. The next step of this size overwrites them."""
        return self.replay(size, self._metadata(size, work))

    def _metadata(self, size: Size, work: PackedWork) -> tuple[Ints, ...]:
        n = most_sequences(size)
        rows = rows_in(size, work, self._tables, sequences=n)
        members = rows.members
        last = np.zeros(n, dtype=np.int64)
        last[: work.size] = rows.last
        return (
            rows.position,
            flat_index(rows, self._tokens.shape[1]),
            rows.pool_row,
            last,
            *span_arrays(members.tokens, members.end, self._tables.table[members.slot]),
        )

    def _forward(self, size: Size, numbers: Tensor) -> Tensor:
        n = most_sequences(size)
        # In the order of ``_metadata``.
        lengths = [size.tokens] * 3 + [n, n + 1, n + 1, n, n * self._tables.table.shape[1]]
        position, flat, pool_row, last, *spans = numbers.split(lengths)
        spans[-1] = spans[-1].view(n, -1)
        max_q = size.length if isinstance(size, Bucket) else max(size.tokens, 2)
        max_k = self._tables.max_len + (size.length if isinstance(size, Bucket) else 0)
        attend = self._attention.over(spans_of(spans, max_q=max_q, max_k=max_k), pool_row, self._pool)
        hidden = self._model.hidden(self._tokens.take(flat), self._model.rotary(position), attend)
        return self._model.logits(hidden.index_select(0, last))


class Ran(NamedTuple):
    """The results of a step."""

    tokens: Tensor
    """[sequences that sample] ids on the device, in the order of the work."""
    size: Size | None
    """The bucket or rung in which the step ran; None if it ran in none."""
    num_rows: int
    """Rows the model computed, padding included."""
    logprobs: Mapping[int, Logprobs] = {}
    """Slot -> log probabilities of the next token, for each sequence that asks for them."""
    prompt_logprobs: Mapping[int, Logprobs] = {}
    """Slot -> those of the prompt's tokens that follow the step's tokens, for each sequence that asks for them."""


_SCORED_LOGITS = 1 << 24
"""Most logits in memory at once while we score the rows of a prompt."""


class PagedExecutor:
    """``num_slots`` sequences of up to ``max_len`` tokens over ``num_blocks`` blocks of K/V.

    ``attention`` and ``recorder`` replace what the device would choose.
    """

    def __init__(
        self,
        model: CausalModel,
        *,
        num_slots: int,
        max_len: int,
        num_tokens: int,
        longest_bucket: int = 0,
        block_size: int = 16,
        attention: StepAttention | None = None,
        recorder: Recorder | None = None,
        uses_graphs: bool = True,
    ) -> None:
        """``num_tokens`` tokens of K/V, in whole blocks. ``block_size`` is the CPU's; a flash kernel has its own.
        ``longest_bucket`` is the length of the longest bucket that will be asked for."""
        config = model.config
        config.check_length("max_len", max_len)
        require(num_tokens >= 1, f"num_tokens={num_tokens} must be at least 1")
        self.model, self.device = model, model.device
        with on(self.device):
            self._staging: Staging = staging_to(self.device)
            self._host = HostKernels(device=self.device, dtype=model.dtype)
            kernels = TritonKernels(device=self.device, dtype=model.dtype)
            self.attention = attention or self._choose(block_size, kernels.store)
            fuse(model, kernels.ops(self._host.ops(FusedOps(joins=True))))
            size = self.attention.block_size
            self.tables = BlockTables(
                num_slots=num_slots,
                num_blocks=-(-num_tokens // size),
                block_size=size,
                max_len=max_len,
                spare=1 + -(-longest_bucket // size),
            )
            self._longest_bucket = longest_bucket
            self.pool = PoolTensors.of_blocks(model, self.tables)
            if isinstance(self.attention, SdpaAttention) and self._host.serve_heads(config.head_dim):
                self.attention.whole = WholeLayers.of(model, self.pool)
            # The last column belongs to no position, the last row to no sequence.
            self._tokens = torch.zeros((num_slots + 1, max_len + 2), dtype=torch.int64, device=self.device)
            if recorder is None and self.device.type == "cuda" and uses_graphs:
                recorder = CudaRecorder(self.device)
            self.graphs: CausalGraphs | None = None
            if recorder is not None and isinstance(self.attention, PagedAttention):
                self.graphs = CausalGraphs(
                    model, self.attention, self.tables, self.pool, self._tokens, self._staging, recorder
                )
        self._sampling: dict[int, SamplingParams] = {}
        """By slot; a missing slot takes the likeliest token, and nothing is told about it."""
        self._rules: dict[int, LogitRules] = {}
        """By slot; the logits of a missing slot stay as they are."""
        self._is_closed = False

    # ---- slots -------------------------------------------------------------------------------------

    def open(self, sampling: SamplingParams = GREEDY) -> int:
        slot = self.tables.open()
        if not sampling.is_plain:
            self._sampling[slot] = sampling
        if sampling.shapes_logits:
            with on(self.device):
                self._rules[slot] = LogitRules(sampling, self._staging)
        return slot

    def close_slot(self, slot: int) -> None:
        """Free the blocks and the slot of a sequence that is over."""
        self.tables.close(slot)
        self._sampling.pop(slot, None)
        self._rules.pop(slot, None)

    def write(self, slot: int, start: int, ids: Sequence[int] | Ints) -> None:
        """Write token ids into a slot from ``start`` on."""
        tokens = np.asarray(ids, dtype=np.int64)
        vocabulary = self.model.config.vocab_size
        require(
            start + len(tokens) <= self.tables.max_len,
            f"{start + len(tokens)} tokens exceed max_len={self.tables.max_len}: raise it",
        )
        require(
            not len(tokens) or (int(tokens.min()) >= 0 and int(tokens.max()) < vocabulary),
            f"token ids must lie between 0 and {vocabulary - 1}, the vocabulary of the model",
        )
        with on(self.device):
            self._tokens[slot, start : start + len(tokens)] = self._staging.ints(tokens)

    def read(self, slot: int, start: int, end: int) -> list[int]:
        """Return the ids at [start, end); waits for the device."""
        return self._tokens[slot, start:end].tolist()

    # ---- steps -------------------------------------------------------------------------------------

    @torch.inference_mode()
    def capture(self, sizes: Iterable[Size]) -> Mapping[Size, CaptureCost]:
        """Capture the graphs of these sizes, the largest first so that the others fit into its memory. Does nothing on a CPU:
        there a bucket runs operator by operator."""
        ordered = sorted(sizes, key=lambda size: (size.tokens, most_sequences(size)), reverse=True)
        for size in ordered:
            require(size.tokens >= 1, f"size={size} must hold at least one token")
            require(
                not isinstance(size, Bucket) or size.length <= max(self._longest_bucket, 1),
                f"bucket={size} is longer than longest_bucket={self._longest_bucket}: raise it",
            )
        if self.graphs is None:
            return {}
        with on(self.device):
            for size in ordered:
                self.graphs.capture(size)
        return self.graphs.costs

    @torch.inference_mode()
    def run(self, work: PackedWork, mode: object = None) -> Ran:
        """Compute the rows of ``work``, which must have their blocks, and write the sampled ids behind their sequences.

        ``mode`` is ``NextStep.mode``: the step runs in this bucket or rung if it fits, or else in none.
        """
        assert not self._is_closed, "a closed executor has no pool"
        scored = self._scored(work)
        size = None if scored else self._size(work, mode)
        prompt_logprobs: Mapping[int, Logprobs] = {}
        with on(self.device):
            if self.graphs is not None and size in self.graphs:
                assert size is not None
                logits, num_rows = self.graphs.run(size, work), size.tokens
                if not work.samples.all():
                    logits = logits.index_select(0, self._staging.ints(np.flatnonzero(work.samples)))
                else:
                    logits = logits[: work.size]
            else:
                logits, num_rows, prompt_logprobs = self._eager(work, size, scored)
            tokens, logprobs = self._sample(logits, work)
            slot, end = work.slot[work.samples], work.end[work.samples]
            self._tokens.put_(self._staging.ints(slot * self._tokens.shape[1] + end), tokens)
        return Ran(tokens, size, num_rows, logprobs, prompt_logprobs)

    def wait(self) -> None:
        """Wait until the device has done what it was given."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def close(self) -> None:
        """Give back graphs, pool and token store; may be called twice."""
        self._is_closed = True
        if self.graphs is not None:
            self.graphs.close()
        self.pool.close()
        self._tokens = self._tokens.new_empty((0, self._tokens.shape[1]))

    def paths(self) -> dict[str, Any]:
        """Return the kernels on which its steps run, as JSON."""
        kernel = self._paged_kernel()
        return {
            "attention": self.attention.name,
            "attention_unavailable": kernel if isinstance(kernel, str) else None,
            "host_kernels_unavailable": self._host.fault,
            "products": products_by(self.model),
            "block_size": self.attention.block_size,
            "num_graphs": 0 if self.graphs is None else len(self.graphs.keys),
        }

    def _paged_kernel(self) -> DeviceKernel | str:
        config = self.model.config
        return probe(self.device, self.model.dtype, config.head_dim, config.n_heads // config.n_kv_heads)

    # ---- in between ----------------------------------------------------------------------------------

    def _choose(self, block_size: int, store: Store) -> StepAttention:
        kernel = self._paged_kernel()
        if isinstance(kernel, str):
            kernels = None
            if self._host.serve_heads(self.model.config.head_dim):
                kernels, store = DecodeKernels(host.store, host.decode, host.attend), host.store
            return SdpaAttention(store, self._staging, block_size=block_size, kernels=kernels)
        return PagedAttention(kernel.name, kernel.kernel, store, self._staging, block_size=kernel.block_size)

    def _size(self, work: PackedWork, mode: object) -> Size | None:
        """Return the size in which the step runs: ``mode`` if it fits, or without ``mode`` a decode step's narrowest captured bucket."""
        if isinstance(mode, Bucket):
            fits = work.size <= mode.batch and int(work.tokens.max()) <= mode.length
            is_captured = self.graphs is None or mode in self.graphs
            return mode if fits and is_captured and mode.length <= max(self._longest_bucket, 1) else None
        if isinstance(mode, Rung):
            fits = work.total <= mode.tokens and work.size <= most_sequences(mode)
            return mode if fits and (self.graphs is None or mode in self.graphs) else None
        if self.graphs is not None and int(work.tokens.max()) == 1:
            buckets = [size for size in self.graphs.keys if isinstance(size, Bucket) and size.length == 1]
            return min((size for size in buckets if size.batch >= work.size), default=None)
        return None

    def _eager(
        self, work: PackedWork, size: Size | None, scored: Mapping[int, int]
    ) -> tuple[Tensor, int, dict[int, Logprobs]]:
        """Return logits [sampling sequences, V], the number of rows computed, and ``Ran.prompt_logprobs``."""
        min_rows = self.model.min_rows
        rows = packed_rows(work, self.tables, least=min_rows) if size is None else rows_in(size, work, self.tables)
        attend = self.attention.attend(rows, self.tables, self.pool)
        last = rows.last[work.samples]
        num_sampled = len(last)
        last = _at_least(min_rows, last, rows.last[0])
        flat, position, index = self._staging.send(flat_index(rows, self._tokens.shape[1]), rows.position, last)
        hidden = self.model.hidden(self._tokens.take(flat), self.model.rotary(position), attend)
        logprobs = {}
        for i, count in scored.items():
            slot, start, first = (int(column[i]) for column in (work.slot, work.start, rows.members.first))
            following = self._tokens[slot, start + 1 : start + 1 + count]
            logprobs[slot] = self._score(hidden, first, following, self._sampling[slot].prompt_logprobs or 0)
        if num_sampled == 0:
            return hidden.new_empty((0, self.model.config.vocab_size)), rows.num_rows, logprobs
        return self.model.logits(hidden.index_select(0, index))[:num_sampled], rows.num_rows, logprobs

    def _scored(self, work: PackedWork) -> dict[int, int]:
        """Return, for each sequence whose prompt is scored, its place in the work -> how many of its rows a prompt token follows."""
        counts = {}
        columns = (work.slot.tolist(), work.start.tolist(), work.end.tolist())
        for i, (slot, start, end) in enumerate(zip(*columns, strict=True)):
            params = self._sampling.get(slot, GREEDY)
            if params.prompt_logprobs is not None:
                count = min(end, params.prompt_tokens - 1) - start
                if count > 0:
                    counts[i] = count
        return counts

    def _score(self, hidden: Tensor, first: int, following: Tensor, most: int) -> Logprobs:
        """Return the scores of the tokens that follow the rows from ``first`` on, computed a few rows at a time."""
        min_rows = self.model.min_rows
        chunk = max(min_rows, _SCORED_LOGITS // self.model.config.vocab_size)
        parts = []
        for start in range(0, len(following), chunk):
            tokens = following[start : start + chunk]
            row = first + start
            index = _at_least(min_rows, np.arange(row, row + len(tokens)), row)
            logits = self.model.logits(hidden.index_select(0, self._staging.ints(index)))[: len(tokens)]
            parts.append(TokenScores(logits).of(tokens).cut(0, len(tokens), most))
        return Logprobs.joined(parts)

    def _sample(self, logits: Tensor, work: PackedWork) -> tuple[Tensor, dict[int, Logprobs]]:
        """Return the ids of the sequences that sample, and ``Ran.logprobs``."""
        if not self._sampling:
            return next_tokens(logits, None), {}
        slots, ends = work.slot[work.samples], work.end[work.samples]
        sampling = [self._sampling.get(slot, GREEDY) for slot in slots.tolist()]
        indices = [i for i, params in enumerate(sampling) if params.logprobs is not None]
        rows = self._staging.ints(indices)
        scores = TokenScores(logits.index_select(0, rows)) if indices else None
        tokens = next_tokens(self._shape_logits(logits, slots, ends), Draws.of(sampling, ends, self._staging))
        if scores is None:
            return tokens, {}
        logprobs = scores.of(tokens.index_select(0, rows))
        return tokens, {
            int(slots[i]): logprobs.cut(row, row + 1, sampling[i].logprobs or 0) for row, i in enumerate(indices)
        }

    def _shape_logits(self, logits: Tensor, slots: Ints, ends: Ints) -> Tensor:
        """Return logits [m, V] shaped by the rules of their sequences, perhaps in place; ``ends`` [m] counts each sequence's tokens
        so far."""
        ruled = {i: self._rules[slot] for i, slot in enumerate(slots.tolist()) if slot in self._rules}
        if not ruled:
            return logits
        shaped = logits.float()
        for i, rules in ruled.items():
            rules.apply(shaped[i], self._tokens[int(slots[i]), : int(ends[i])], self._staging)
        penalized = [i for i, rules in ruled.items() if rules.params.penalizes]
        if penalized:
            rows, slot_rows = self._staging.send(np.array(penalized, dtype=np.int64), slots[penalized])
            longest = int(ends[penalized].max())
            tokens = self._tokens[:, :longest].index_select(0, slot_rows)
            params = [ruled[i].params for i in penalized]
            penalties = penalize(shaped.index_select(0, rows), tokens, ends[penalized], params, self._staging)
            shaped.index_copy_(0, rows, penalties)
        return shaped


def _at_least(least: int, rows: Ints, row: int) -> Ints:
    """Return ``rows``, and behind them ``row`` until there are at least ``least``."""
    return np.concatenate((rows, np.full(max(0, least - len(rows)), row, dtype=np.int64)))


def grid(lengths: Collection[int], batches: Collection[int]) -> tuple[Bucket, ...]:
    """Return a bucket for every (length, batch) (LAPS §3.1)."""
    return tuple(Bucket(length, batch) for length in sorted(lengths) for batch in sorted(batches))


class MeasuredSteps:
    """A ``StepCost`` that runs each step ``repeats`` times and takes the shortest, after ``warmup`` runs that do not count.

    ``timer`` is a clock in seconds.

    Sequences are anonymous: their history is whatever K/V the pool holds, as if a decode worker had sent it. Its values do
    not affect speed. ``context`` tokens are dealt evenly to the decoding sequences.
    """

    def __init__(
        self, executor: PagedExecutor, *, repeats: int = 1, warmup: int = 0, timer: Callable[[], float] = perf_counter
    ) -> None:
        require(repeats >= 1, f"repeats={repeats} must be at least 1")
        self.executor = executor
        self._timer = timer
        self.repeats, self.warmup = repeats, warmup

    def step_s(self, chunks: Sequence[Chunk], decoding: int, context: int, mode: object = None) -> float:
        return min(self.times_s(chunks, decoding, context, mode))

    def times_s(self, chunks: Sequence[Chunk], decoding: int = 0, context: int = 0, mode: object = None) -> list[float]:
        """Return the seconds of every repeat."""
        parts = [*chunks, *((history, 1) for history in split_context(context, decoding))]
        return self.timed(parts, mode)

    def decode_line(self, decoding: int) -> DecodeLine:
        """Return the line through the times of decode steps at two contexts, a short and a long one."""
        short, long = decoding, decoding * (self.executor.tables.max_len - 1)
        at_short, at_long = (self.step_s([], decoding, context) for context in (short, long))
        slope = max(at_long - at_short, 0.0) / max(long - short, 1)
        return DecodeLine(max(at_short - slope * short, 0.0), slope, 0.0)

    def timed(self, parts: Sequence[tuple[int, int]], mode: object = None) -> list[float]:
        """Return the seconds of every repeat of a step over (history, tokens) of each sequence."""
        executor, tables = self.executor, self.executor.tables
        slots = [executor.open() for _ in parts]
        try:
            starts, counts = np.array(parts, dtype=np.int64).reshape(-1, 2).T
            tables.grow(np.array(slots), starts + counts)
            work = PackedWork(np.array(slots), starts, counts, np.ones(len(parts), dtype=bool))
            for _ in range(self.warmup):
                executor.run(work, mode)
            executor.wait()
            return [self._time_run(lambda: executor.run(work, mode)) for _ in range(self.repeats)]
        finally:
            for slot in slots:
                executor.close_slot(slot)

    def _time_run(self, run: Callable[[], object]) -> float:
        start_s = self._timer()
        run()
        self.executor.wait()
        return self._timer() - start_s


def split_context(context: int, decoding: int) -> list[int]:
    """Return the history of each of ``decoding`` sequences, which have ``context`` tokens in all, without each newest token."""
    if decoding == 0:
        return []
    return [
        max(math.floor(context * (i + 1) / decoding) - math.floor(context * i / decoding) - 1, 0)
        for i in range(decoding)
    ]
