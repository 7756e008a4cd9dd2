"""Runs steps of a block-diffusion model on a paged pool: prefills, commits and denoises in one packed forward, one call of attention.

The host writes ids, because it decides. A step's metadata goes to the device in one transfer; tokens and confidences of the places its
rules asked for come back in another. A request's final blocks and its denoised rows are segments that each see all keys up to their own
block's end. Without a mask, this is bidirectional within blocks and causal across them. A draw is a function of (seed, which draw of the
request, position) alone. Shapes: s segments, N rows, m rows with logits, V vocabulary rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from time import perf_counter
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from engines.attention.backends import Spans, VarlenAttention
from engines.attention.registry import attention_backend
from engines.blockdiffusion.sequence import BlockStepPlan, Denoised, Outcome, SharedTables, Work
from engines.dllm.denoise import Reduction, Sampling, concat
from engines.errors import require
from engines.kernels.probe import HostKernels, TritonKernels
from engines.models.block_config import BlockConfig
from engines.models.layers import FusedOps, fuse
from engines.models.llada2 import ExpertLayers
from engines.models.packed import PackedModel
from engines.models.protocol import Attend
from engines.runtime.device import PoolTensors, Staging, Store, on, staging_to
from engines.runtime.noise import row_keys
from engines.runtime.rows import Ints, ranks


class BlockStepRows(NamedTuple):
    slot: Ints
    position: Ints
    pool_row: Ints
    """The pool row; all three are [N], padding included."""
    q_len: Ints
    k_start: Ints
    k_len: Ints
    """A segment's place among ``keys``; all three are [s]."""
    keys: Ints
    """Pool rows of each request's keys from its first token on, one request after the other."""
    first_denoised: Ints
    """[denoised] the row of each denoised block's first place, or where it would be if it is not computed."""
    block_start: Ints
    """[denoised] the position of that place."""
    last_final: Ints
    """[works that want a first token] the row of each one's last final token."""

    @property
    def num_rows(self) -> int:
        return len(self.slot)


def step_rows(
    works: Sequence[Work], tables: SharedTables, block: int, *, least: int, grain: int | None = None
) -> BlockStepRows:
    """Lay out the works' rows one after another, padded to ``least`` or more; ``grain`` final tokens see each other, by default a block."""
    grain = grain or block
    columns = [
        (work.slot, work.start, work.tokens, *(work.rows or (0, 0)), work.rows is not None, work.wants_first)
        for work in works
    ]
    slot, start, tokens, begin, end, denoises, wants_first = np.array(columns, dtype=np.int64).T
    denoised = end - begin
    counts = tokens + denoised
    total = int(counts.sum())
    size = max(total, least)
    first_row = counts.cumsum() - counts
    block_start = start + tokens
    """The position at which each work's denoised block begins."""
    slots = np.full(size, tables.padding_slot, dtype=np.int64)
    position, pool_row = np.zeros((2, size), dtype=np.int64)
    offset = ranks(counts)
    slots[:total] = slot.repeat(counts)
    # Rows that are not computed lie between the final blocks and the computed rows.
    jump = np.where(offset >= tokens.repeat(counts), begin.repeat(counts), 0)
    position[:total] = start.repeat(counts) + offset + jump
    pool_row[:total] = tables.rows(slots[:total], position[:total])

    num_keys = block_start + np.where(denoises, block, 0)
    key_first = num_keys.cumsum() - num_keys
    segments = tokens // grain + denoises
    work_index, index = np.arange(len(works)).repeat(segments), ranks(segments)
    is_final = index < (tokens // grain)[work_index]
    keys = tables.rows(slot.repeat(num_keys), ranks(num_keys))
    return BlockStepRows(
        slots,
        position,
        pool_row,
        np.where(is_final, grain, denoised[work_index]),
        key_first[work_index],
        np.where(is_final, start[work_index] + (index + 1) * grain, (block_start + block)[work_index]),
        keys,
        (first_row + tokens - begin)[denoises.astype(bool)],
        block_start[denoises.astype(bool)],
        (first_row + tokens - 1)[wants_first.astype(bool)],
    )


def wanted_rows(rows: BlockStepRows, denoised: Denoised, shift: int) -> Ints:
    """Return the rows whose logits are read: those of the wanted places of denoised blocks, by request and place, then the last final rows.
    The row ``shift`` before a place predicts it."""
    request, place = np.nonzero(denoised.wanted)
    return np.concatenate((rows.first_denoised[request] + place - shift, rows.last_final))


class GatheredAttention:
    """Writes a layer's K and V to the pool, then fetches each request's keys once, however many of its blocks read them."""

    def __init__(self, attention: VarlenAttention, store: Store, staging: Staging) -> None:
        self._attention, self._store, self._staging = attention, store, staging

    @property
    def name(self) -> str:
        return self._attention.name

    def attend(self, rows: BlockStepRows, pool: PoolTensors) -> Attend:
        pool_row, keys = self._staging.send(rows.pool_row, rows.keys)
        spans = Spans.of_lengths(rows.q_len, rows.k_start, rows.k_len, device=pool.k.device)
        attention, store, num_real = self._attention, self._store, int(rows.q_len.sum())

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            pool_k, pool_v = pool.rows(layer)
            store(pool_k, pool_v, pool_row, k, v)
            out = torch.empty_like(q)
            out[num_real:] = 0
            return attention(q, pool_k.index_select(0, keys), pool_v.index_select(0, keys), spans, out)

        return attend


@dataclass(frozen=True, kw_only=True)
class BlockDraws(Sampling):
    """``Sampling`` whose ``top_k`` is taken before ``top_p``, as the authors of SDAR and LLaDA2 do."""

    draws: Tensor
    """bool [m]: rows that draw; the others take the likeliest token."""

    def allowed_tokens(self, logits: Tensor, suppress_id: int | None) -> Tensor | None:
        """[m, V] the tokens whose probabilities confidence is read from: among the ``top_k`` likeliest, the shortest prefix whose
        probabilities sum to more than ``top_p``. None if all are.

        The mask is one of them if it is so likely, as in published samplers, but is never drawn. If it would be alone, the next token joins
        it.
        """
        if self.top_p is None or self.top_k is None:
            return None
        ordered, token = logits.to(torch.float64).sort(dim=-1, descending=True, stable=True)
        rank = torch.arange(logits.shape[1], device=logits.device)
        is_near = rank < self.top_k.unsqueeze(1)
        scaled = (ordered - ordered[:, :1]) / torch.where(self.temperature > 0, self.temperature, 1.0).unsqueeze(1)
        probability = torch.softmax(scaled.masked_fill(~is_near, -torch.inf), dim=-1)
        top_p = self.top_p.unsqueeze(1)
        is_kept = is_near & ((probability.cumsum(dim=-1) - probability <= top_p) | (top_p >= 1))
        if suppress_id is not None:
            is_kept |= (rank == 1) & (token[:, :1] == suppress_id)
        return torch.empty_like(is_kept).scatter_(1, token, is_kept)

    def tokens(self, logits: Tensor, greedy: Tensor, allowed: Tensor | None) -> Tensor:
        return torch.where(self.draws, super().tokens(logits, greedy, allowed), greedy)

    def remasked(self, confidence: Tensor) -> Tensor:
        return confidence


def step_draws(
    rows: BlockStepRows, wanted: np.ndarray, denoised: Denoised, staging: Staging, vocab: int
) -> BlockDraws | None:
    """Make the draws for the ``wanted`` rows [m] of a step, in the order of ``wanted_rows``. None if all are greedy at temperature 0.

    A block's first token is the likeliest, even if its request draws.
    """
    if all(each.temperature == 0 for each in denoised.sampling):
        return None
    request, place = np.nonzero(denoised.wanted)
    sampling, num_first = denoised.sampling, len(wanted) - len(request)

    def column(values: Sequence[float], otherwise: float) -> np.ndarray:
        """[m] the value of each row's request; integers stay integers."""
        return np.append(np.array(values)[request], np.full(num_first, otherwise))

    seeds = column([each.seed for each in sampling], 0)
    draw = column(denoised.draw.tolist(), 0)
    positions = np.append(rows.block_start[request] + place, np.zeros(num_first, dtype=np.int64))
    keys = row_keys(*staging.send(seeds, draw, positions))
    is_cut = [each.top_k is not None or each.top_p < 1 for each in sampling]
    has_cuts = bool(column(is_cut, False).any())
    return BlockDraws(
        temperature=staging.floats(column([each.temperature for each in sampling], 0.0)),
        keys=keys,
        random_remasking=torch.zeros_like(keys, dtype=torch.bool),
        top_p=staging.floats(column([each.top_p for each in sampling], 1.0)) if has_cuts else None,
        top_k=staging.ints(column([min(each.top_k or vocab, vocab) for each in sampling], vocab)) if has_cuts else None,
        draws=staging.ints(column([int(each.draws) for each in sampling], 0)).bool(),
    )


def equal_parts(count: int, max_rows: int) -> list[slice]:
    bounds = np.linspace(0, count, -(-count // max_rows) + 1).astype(int).tolist()
    return [slice(start, end) for start, end in pairwise(bounds)]


_LEAST_LOGITS = 64


class TorchBlockExecutor:
    """Runs ``num_slots`` requests of up to ``max_len`` tokens each, over ``num_tokens`` tokens of K/V."""

    makes_canvases = False

    def __init__(
        self,
        model: PackedModel[BlockConfig],
        *,
        num_slots: int,
        max_len: int,
        num_tokens: int,
        block: int | None = None,
        block_size: int | None = None,
        max_num_logits: int = 2048,
        attention: str = "auto",
        prefix_cache: bool = True,
        shifts: bool | None = None,
    ) -> None:
        """``block`` and ``shifts`` are by default the model's own; ``block_size`` tokens of K/V lie together, by default a block's."""
        config = model.config
        self.model, self.device = model, model.device
        self.block, self.shifts = block or config.block_length, config.shifts_logits if shifts is None else shifts
        require(
            max_len <= config.max_sequence_length,
            f"max_len={max_len} exceeds the model's {config.max_sequence_length} positions: lower it",
        )
        require(
            max_num_logits >= _LEAST_LOGITS,
            f"max_num_logits={max_num_logits} must be at least {_LEAST_LOGITS}: raise it",
        )
        self._max_num_logits = max_num_logits
        size = block_size or self.block
        with on(self.device):
            self._staging: Staging = staging_to(self.device)
            host = HostKernels(device=self.device, dtype=model.dtype)
            kernels = TritonKernels(device=self.device, dtype=model.dtype)
            fuse(model, kernels.ops(host.ops(FusedOps(joins=True))))
            self._gathering = partial(GatheredAttention, store=host.store(kernels.store), staging=self._staging)
            self.tables = SharedTables(
                num_slots=num_slots,
                num_blocks=-(-num_tokens // size),
                block_size=size,
                max_len=max_len,
                diffusion_block=1 if self.makes_canvases else self.block,
                caches=prefix_cache,
            )
            # Do this before the pool takes the rest of the memory: while a layer's experts are joined, they exist twice.
            for module in model.modules():
                if isinstance(module, ExpertLayers):
                    module.matrices()
            self._place(attention)
        self._reduction = Reduction(confidence_of="sampler", suppress_id=config.mask_token_id)
        self._tokens = np.zeros((num_slots + 1, max_len), dtype=np.int64)
        """[slots, max_len] ids of final blocks; the last slot is for padding and has none."""

    def _place(self, attention: str) -> None:
        """Make the pool, and the attention over it."""
        config = self.model.config
        backend = attention_backend(
            attention, self.device, self.model.dtype, config.head_dim, config.n_heads, config.n_kv_heads
        )
        self.attention = self._gathering(backend)
        self.pool = PoolTensors.of_blocks(self.model, self.tables)

    def open(self, final: Ints) -> int:
        vocabulary = self.model.config.vocab_size
        require(
            not len(final) or (int(final.min()) >= 0 and int(final.max()) < vocabulary),
            f"token ids must lie between 0 and {vocabulary - 1}, the vocabulary of the model",
        )
        slot = self.tables.open()
        self.extend(slot, 0, final)
        return slot

    def extend(self, slot: int, start: int, ids: Ints) -> None:
        self._tokens[slot, start : start + len(ids)] = ids

    def close_slot(self, slot: int) -> None:
        self.tables.close(slot)

    @torch.inference_mode()
    def run(self, plan: BlockStepPlan, denoised: Denoised) -> Outcome:
        start_s = perf_counter()
        min_rows = self.model.min_rows
        with on(self.device):
            rows = step_rows(plan.works, self.tables, self.block, least=min_rows)
            ids, position = self._staging.send(self._ids(plan, rows, denoised), rows.position)
            attend = self.attention.attend(rows, self.pool)
            hidden = self.model.hidden(ids, self.model.rotary(position), attend)
            tokens, confidence = self._predict(hidden, rows, denoised, min_rows)
        num_denoised, shape = len(tokens) - len(rows.last_final), denoised.wanted.shape
        no_confidence = np.full(shape, -np.inf, dtype=confidence.dtype)
        outcome = Outcome(np.zeros(shape, dtype=np.int64), no_confidence, tokens[num_denoised:], 0.0)
        outcome.tokens[denoised.wanted] = tokens[:num_denoised]
        outcome.confidence[denoised.wanted] = confidence[:num_denoised]
        return outcome._replace(duration_s=perf_counter() - start_s)

    def close(self) -> None:
        self.pool.close()

    # ---- in between ------------------------------------------------------------------------------------------------------

    def _ids(self, plan: BlockStepPlan, rows: BlockStepRows, denoised: Denoised) -> Ints:
        """[N] ids: final ones from their slots, and blocks with the mask's id in their holes."""
        ids = self._tokens[rows.slot, np.minimum(rows.position, self._tokens.shape[1] - 1)]
        spans = [work.rows for work in plan.works if work.rows is not None]
        if spans:
            begin, end = np.array(spans, dtype=np.int64).T
            offset = np.arange(self.block)
            is_computed = (offset >= begin[:, None]) & (offset < end[:, None])
            block_ids = np.where(denoised.holes, self.model.config.mask_token_id, denoised.ids)
            ids[(rows.first_denoised[:, None] + offset)[is_computed]] = block_ids[is_computed]
        return ids

    def _predict(self, hidden: Tensor, rows: BlockStepRows, denoised: Denoised, least: int) -> tuple[Ints, np.ndarray]:
        """Return tokens and confidences of the wanted rows, on the host."""
        wanted = wanted_rows(rows, denoised, int(self.shifts))
        if not len(wanted):
            return np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.float32)
        draws = step_draws(rows, wanted, denoised, self._staging, self.model.config.vocab_size)
        index = np.append(wanted, np.zeros(max(0, least - len(wanted)), dtype=np.int64))  # repeated up to ``least``
        if draws is not None and len(index) > len(wanted):
            draws = draws.rows(self._staging.ints([*range(len(wanted)), *[0] * (len(index) - len(wanted))]))
        picked = hidden.index_select(0, self._staging.ints(index))
        # Parts have nearly equal sizes: none is so small that it would be summed in another order.
        token, confidence = concat(
            self._reduction(self.model.logits(picked[part]), None if draws is None else draws.rows(part))
            for part in equal_parts(len(picked), self._max_num_logits)
        )
        # One transfer, the only one that waits for the device.
        values = torch.stack((token.double(), confidence.double())).cpu().numpy()
        require(
            bool(np.isfinite(values[1]).all()),
            "the model's logits are not finite: check its weights, or give a wider dtype",
        )
        values = values[:, : len(wanted)]
        return values[0].astype(np.int64), values[1].astype(np.float32)
