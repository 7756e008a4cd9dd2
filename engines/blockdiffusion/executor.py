"""Runs steps of a block-diffusion model on a paged pool: prefills, commits and denoises in one packed forward.

Ids are written on the host, which decides; a step's metadata goes to the device in one transfer, and the tokens and confidences
of the places its rules asked for come back in another.
"""

from __future__ import annotations

from time import perf_counter

import numpy as np
import torch
from torch import Tensor

from engines.attention import attention_backend
from engines.blockdiffusion.attention import GatheredAttention
from engines.blockdiffusion.draws import reduced, step_draws
from engines.blockdiffusion.plan import Denoised, Outcome, StepPlan
from engines.blockdiffusion.rows import StepRows, step_rows, wanted_rows
from engines.blockdiffusion.tables import SharedTables
from engines.dllm.decode.denoise import Reduction
from engines.errors import UserError, require
from engines.kernels.choice import HostKernels, TritonKernels
from engines.models.block_config import BlockConfig
from engines.models.experts import Experts
from engines.models.layers import FusedOps, fuse
from engines.models.packed import PackedModel
from engines.runtime.device import on
from engines.runtime.pool import PoolTensors
from engines.runtime.rows import Ints
from engines.runtime.staging import Staging, staging_to

_LEAST_LOGITS = 64


class TorchBlockExecutor:
    """``num_slots`` requests of up to ``max_len`` tokens over ``num_tokens`` tokens of K/V."""

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
        """``block`` and ``shifts`` are the model's own unless they are given; ``block_size`` tokens of K/V lie together, by default a
        block's."""
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
            backend = attention_backend(
                attention, self.device, model.dtype, config.head_dim, config.n_heads, config.n_kv_heads
            )
            self.attention = GatheredAttention(backend, host.store(kernels.store), self._staging)
            self.tables = SharedTables(
                num_slots=num_slots,
                num_blocks=-(-num_tokens // size),
                block_size=size,
                max_len=max_len,
                diffusion_block=self.block,
                caches=prefix_cache,
            )
            _join_experts(model)
            self.pool = _pool(model, self.tables)
        self._reduction = Reduction(confidence_of="sampler", suppress_id=config.mask_token_id)
        self._tokens = np.zeros((num_slots + 1, max_len), dtype=np.int64)
        """[slots, max_len] ids of final blocks; of the last, which is padding's, none."""

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
    def run(self, plan: StepPlan, denoised: Denoised) -> Outcome:
        began = perf_counter()
        least = self.model.min_rows
        with on(self.device):
            rows = step_rows(plan.works, self.tables, self.block, least=least)
            ids, position = self._staging.send(self._ids(plan, rows, denoised), rows.position)
            attend = self.attention.attend(rows, self.pool)
            hidden = self.model.hidden(ids, self.model.rotary(position), attend)
            tokens, confidence = self._predicted(hidden, rows, denoised, least)
        found = Outcome(
            np.zeros(denoised.wanted.shape, dtype=np.int64),
            np.full(denoised.wanted.shape, -np.inf, dtype=confidence.dtype),
            tokens[len(tokens) - len(rows.last_final) :],
            0.0,
        )
        num_denoised = len(tokens) - len(rows.last_final)
        found.tokens[denoised.wanted] = tokens[:num_denoised]
        found.confidence[denoised.wanted] = confidence[:num_denoised]
        return found._replace(duration_s=perf_counter() - began)

    def close(self) -> None:
        self.pool.close()

    # ---- in between ------------------------------------------------------------------------------------------------------

    def _ids(self, plan: StepPlan, rows: StepRows, denoised: Denoised) -> Ints:
        """[N] ids: final ones from their slots, blocks with the mask's id in their holes."""
        ids = self._tokens[rows.slot, np.minimum(rows.position, self._tokens.shape[1] - 1)]
        spans = [work.rows for work in plan.works if work.rows is not None]
        if spans:
            begin, end = np.array(spans, dtype=np.int64).T
            place = np.arange(self.block)
            is_computed = (place >= begin[:, None]) & (place < end[:, None])
            block_ids = np.where(denoised.holes, self.model.config.mask_token_id, denoised.ids)
            ids[(rows.first_denoised[:, None] + place)[is_computed]] = block_ids[is_computed]
        return ids

    def _predicted(self, hidden: Tensor, rows: StepRows, denoised: Denoised, least: int) -> tuple[Ints, np.ndarray]:
        """Tokens and confidences of the wanted rows, on the host."""
        wanted = wanted_rows(rows, denoised, int(self.shifts))
        if not len(wanted):
            return np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.float32)
        draws = step_draws(rows, wanted, denoised, self._staging, self.model.config.vocab_size)
        index = np.append(wanted, np.zeros(max(0, least - len(wanted)), dtype=np.int64))  # repeated up to so many
        if draws is not None and len(index) > len(wanted):
            draws = draws.rows(self._staging.ints([*range(len(wanted)), *[0] * (len(index) - len(wanted))]))
        picked = hidden.index_select(0, self._staging.ints(index))
        token, confidence = reduced(self.model, picked, self._reduction, draws, most=self._max_num_logits)
        # One transfer, the only one that waits for the device.
        both = torch.stack((token.double(), confidence.double())).cpu().numpy()
        require(
            bool(np.isfinite(both[1]).all()),
            "the model's logits are not finite: check its weights, or give a wider dtype",
        )
        both = both[:, : len(wanted)]
        return both[0].astype(np.int64), both[1].astype(np.float32)


def _join_experts(model: PackedModel[BlockConfig]) -> None:
    """Before the pool takes what is left of the memory: while a layer's experts are joined they are there twice."""
    for module in model.modules():
        if isinstance(module, Experts):
            module.matrices()


def _pool(model: PackedModel[BlockConfig], tables: SharedTables) -> PoolTensors:
    try:
        return PoolTensors.of(model, tables.num_blocks + 1, tables.block_size, make=torch.zeros)
    except RuntimeError as error:  # of which torch.OutOfMemoryError is one
        said = (str(error).strip() or "no message").splitlines()[0]
        raise UserError(
            f"num_tokens={tables.num_blocks * tables.block_size}: their K/V do not fit {model.device} ({said}): lower it"
        ) from error
