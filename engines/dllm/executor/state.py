"""Resident requests: their token ids, in slots on the device, and the facts about each that the host needs."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from engines.dllm.config import GenerationConfig
from engines.dllm.executor.step import BlockPlaces, BlockTokens, Fresh
from engines.dllm.plan import ExecutorError, PlanItem, Request
from engines.models.config import ModelConfig
from engines.runtime.device import Staging


class RequestState:
    """The state of at most ``num_slots`` requests. Ids go to the device once, at admission, and come back once, at the end.

    ``spare`` more slots belong to no request: they pad captured graphs.
    """

    def __init__(
        self,
        shape: ModelConfig,
        staging: Staging,
        *,
        num_slots: int,
        max_len: int,
        device: torch.device,
        spare: int = 0,
        settles: bool = False,
    ) -> None:
        self.max_len = max_len
        # The last column belongs to no position: padding of a ragged block reads and writes it.
        self.tokens = torch.full(
            (num_slots + spare, max_len + 1), shape.mask_token_id, dtype=torch.int64, device=device
        )
        self._committed_in = torch.zeros_like(self.tokens) if settles else None
        """Step of its block in which a token was committed; any number for a mask."""
        self._taint = torch.zeros(num_slots + spare, dtype=torch.int64, device=device)
        """For each slot, in how many steps a row of the request's logits was not finite; read with its ids."""
        self._mask_id, self._eos_id = shape.mask_token_id, shape.eos_token_id
        self._staging = staging
        self._free = list(range(num_slots))
        self._slots: dict[int, int] = {}
        self._requests: dict[int, Request] = {}
        self._draws: dict[int, int] = {}
        self._ends: dict[int, int] = {}
        """Request id -> its end position, for requests that a stop token ended."""
        self.guided: set[int] = set()
        self.sampled: set[int] = set()
        """Requests whose steps need random numbers."""
        self.parallel: set[int] = set()
        self.stopping: set[int] = set()

    @property
    def width(self) -> int:
        """Columns of a slot."""
        return self.tokens.shape[1]

    @property
    def settles(self) -> bool:
        """Whether rows of a block may settle (``Settling``)."""
        return self._committed_in is not None

    @property
    def is_empty(self) -> bool:
        return not self._requests

    def admit(self, requests: Sequence[Request]) -> None:
        """Give each request a slot that holds its prompt, then masks."""
        if not requests:
            return
        ids, flat = [], []
        for request in requests:
            slot = self._free.pop()
            self._slots[request.request_id] = slot
            self._requests[request.request_id] = request
            self._draws[request.request_id] = 0
            generation = request.generation
            for members, is_member in (
                (self.guided, generation.cfg_scale > 0),
                (
                    self.sampled,
                    max(generation.temperature, generation.alg_temp) > 0 or generation.remasking == "random",
                ),
                (self.parallel, generation.is_parallel),
                (self.stopping, generation.stop_at_eos),
            ):
                if is_member:
                    members.add(request.request_id)
            row = np.full(request.total_len, self._mask_id, dtype=np.int64)
            assert request.prompt_ids is not None
            row[: request.prompt_len] = request.prompt_ids
            ids.append(row)
            flat.append(np.arange(slot * self.width, slot * self.width + request.total_len))
        index, values = self._staging.send(np.concatenate(flat), np.concatenate(ids))
        self.tokens.put_(index, values)

    def check_finite(self, slots: Tensor, confidence: Tensor) -> None:
        """Mark the requests in ``slots`` [n] whose largest confidence [n] of this step is NaN. All confidences of a row are NaN if its
        logits are not finite. This does not wait for the device."""
        self._taint.index_add_(0, slots, confidence.isnan().to(torch.int64))

    def release(self, request_id: int) -> tuple[int, ...]:
        """Return the generated ids, with end-of-text after an early stop; waits for the device. Raises ExecutorError if some of the
        request's logits were not finite: then its ids mean nothing."""
        request = self._requests.pop(request_id, None)
        if request is None:  # lost before it was admitted
            return ()
        slot = self._slots.pop(request_id)
        del self._draws[request_id]
        for members in (self.guided, self.sampled, self.parallel, self.stopping):
            members.discard(request_id)
        self._free.append(slot)
        end = self._ends.pop(request_id, request.total_len)
        padding = (self._eos_id,) * (request.total_len - end)
        # Both together, so that we wait for the device once.
        *ids, taint = torch.cat((self.tokens[slot, request.prompt_len : end], self._taint[slot : slot + 1])).tolist()
        if taint:
            self._taint[slot] = 0
            raise ExecutorError(
                "logits were not finite (NaN or infinite): the weights are damaged, or dtype is too narrow for them; check "
                "the checkpoint, or use --dtype float32"
            )
        return (*ids, *padding)

    def request(self, item: PlanItem) -> Request:
        return self._requests[item.request_id]

    def generations(self, items: Sequence[PlanItem]) -> list[GenerationConfig]:
        return [self._requests[item.request_id].generation for item in items]

    def slots(self, items: Sequence[PlanItem]) -> list[int]:
        return [self._slots[item.request_id] for item in items]

    def next_draws(self, items: Sequence[PlanItem]) -> list[int]:
        """Return how often each request has drawn random numbers before, and count this time."""
        draws = [self._draws[item.request_id] for item in items]
        for item in items:
            self._draws[item.request_id] += 1
        return draws

    def end_with(self, item: PlanItem) -> None:
        """Have the request end with its active block."""
        self._ends[item.request_id] = item.block_end

    def commit(self, block: BlockPlaces, flat: Tensor, tokens: Tensor) -> None:
        """Write the tokens [n, 1] of a step."""
        self.tokens.put_(flat, tokens)
        if self._committed_in is not None:
            assert block.step is not None
            self._committed_in.put_(flat, block.step)

    def commit_chosen(self, block: BlockPlaces, chosen: Tensor, tokens: Tensor, block_tokens: BlockTokens) -> None:
        """Write the chosen ones of the tokens [n, B] of a step."""
        self.tokens.put_(block.flat, torch.where(chosen, tokens, block_tokens.ids))
        if self._committed_in is not None:
            assert block.step is not None
            previous = self._committed_in.take(block.flat)
            self._committed_in.put_(block.flat, torch.where(chosen, block.step, previous))

    def fresh_rows(self, block: BlockPlaces, sent: Sequence[Tensor]) -> Fresh:
        """Find the rows to compute of the last requests of a step, which have settled rows; ``sent`` holds their ``FreshRows``."""
        assert self._committed_in is not None
        settled_before, base, behind, first_cell, rank = sent
        count = len(base)
        flat = block.flat[-count:]
        is_fresh = (self.tokens.take(flat) == self._mask_id) | (self._committed_in.take(flat) >= settled_before)
        if block.padding is not None:
            is_fresh &= ~block.padding[-count:]
        fresh_flags = is_fresh.long()
        order = (1 - fresh_flags).sort(dim=1, stable=True).indices
        offset = order.take(rank)
        cell = first_cell + offset
        packed = block.packed.clone()
        packed[-count:] = base + (fresh_flags.cumsum(dim=1) - 1).clamp_(min=0)
        return Fresh(
            position=block.positions[-count:].take(cell),
            flat=flat.take(cell),
            pool_row=behind.expand(flat.shape).take(cell) + offset,
            packed=packed,
        )

    def block_tokens(self, block: BlockPlaces) -> BlockTokens:
        ids = self.tokens.take(block.flat)
        fixed = ids != self._mask_id
        if block.padding is not None:
            fixed |= block.padding
        return BlockTokens(ids, fixed)
