"""Steps made by hand for one part of the torch executor: items, their state, and where their rows lie."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from support.tiny_models import GQA, TinyModel, prompt_of

from engines.dllm.config import GenerationConfig, Phase
from engines.dllm.executor.state import RequestState
from engines.dllm.plan import PlanItem, Request
from engines.runtime.device import Staging
from engines.runtime.rows import Ints


class CountingStaging(Staging):
    """A CPU's, that counts transfers."""

    def __init__(self) -> None:
        self.num_sends = 0

    def send(self, *arrays: Ints) -> list[torch.Tensor]:
        self.num_sends += 1
        return super().send(*arrays)


@dataclass(frozen=True, kw_only=True)
class Resident:
    """A request in its first block, and how far it is."""

    prompt_len: int = 5
    block_length: int = 4
    num_blocks: int = 2
    phase: Phase = Phase.FULL
    committed: int = 0
    """Tokens of its first block that are there already: the first ones, each equal to its position."""
    commit: int = 1
    kept_rows: int = 3
    generation: dict[str, Any] = field(default_factory=dict)

    def request(self, request_id: int, model: TinyModel) -> Request:
        gen_length = self.num_blocks * self.block_length
        generation = GenerationConfig(
            gen_length=gen_length, block_length=self.block_length, steps=gen_length, **self.generation
        )
        prompt = prompt_of(model, request_id, self.prompt_len)
        return Request(request_id=request_id, prompt_len=self.prompt_len, prompt_ids=prompt, generation=generation)

    def item(self, request_id: int, kv_start: int) -> PlanItem:
        return PlanItem(
            request_id=request_id,
            phase=self.phase,
            total_len=self.prompt_len + self.num_blocks * self.block_length,
            block_start=self.prompt_len,
            block_end=self.prompt_len + self.block_length,
            window_end=self.prompt_len + self.block_length,
            commit=self.commit,
            masks_left=self.block_length - self.committed,
            kept_rows=self.kept_rows,
            kv_start=kv_start,
            step_in_block=1,
        )


@dataclass(frozen=True, kw_only=True)
class Step:
    items: list[PlanItem]
    requests: list[Request]
    state: RequestState
    staging: CountingStaging
    num_pool_rows: int


def step_of(residents: Sequence[Resident], *, model: TinyModel = GQA, num_slots: int | None = None) -> Step:
    """The residents are given with those in a Refresh first, as parts see them."""
    staging, kv_start = CountingStaging(), 2
    state = RequestState(
        model.config, staging, num_slots=num_slots or len(residents), max_len=60, device=torch.device("cpu")
    )
    requests = [resident.request(i, model) for i, resident in enumerate(residents)]
    state.admit(requests)
    items = []
    for i, resident in enumerate(residents):
        items.append(resident.item(i, kv_start))
        kv_start += resident.kept_rows + resident.block_length + 1
        (slot,) = state.slots(items[-1:])
        done = np.arange(resident.prompt_len, resident.prompt_len + resident.committed)
        state.tokens[slot, done] = torch.from_numpy(done)
    return Step(items=items, requests=requests, state=state, staging=staging, num_pool_rows=kv_start + 1)
