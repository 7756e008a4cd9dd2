"""A request as the engine receives it.

Who fills what: a workload makes ``Request``; a scheduler turns live requests into a ``StepPlan``
(engines/dllm/plan.py); an executor, real or simulated, answers it; the engine reports the step as a
``StepRecord`` (engines/dllm/record.py), and a driver stamps the times of requests from it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from engines.dllm.config import GenerationConfig
from engines.errors import require

if TYPE_CHECKING:
    from engines.models.config import ModelConfig


@dataclass(frozen=True, kw_only=True)
class Request:
    """``prompt_ids`` may be None on a simulated executor, which needs only the length."""

    request_id: int
    prompt_len: int
    generation: GenerationConfig
    prompt_ids: tuple[int, ...] | None = None
    arrival_s: float = 0.0

    @property
    def total_len(self) -> int:
        return self.prompt_len + self.generation.gen_length


def check_request(request: Request, model: ModelConfig) -> None:
    """Refuse what a model cannot run, from its config alone."""
    ids = request.prompt_ids
    require(request.prompt_len >= 1, f"prompt of request {request.request_id} is empty: give at least one token")
    require(
        ids is not None and len(ids) == request.prompt_len,
        f"request {request.request_id} has no prompt_ids of length prompt_len={request.prompt_len}: give the token ids",
    )
    assert ids is not None
    require(
        request.total_len <= model.max_sequence_length,
        f"prompt of {request.prompt_len} tokens + gen_length={request.generation.gen_length} exceeds the model's "
        f"max_sequence_length={model.max_sequence_length}: shorten the prompt or the generation",
    )
    require(
        min(ids) >= 0 and max(ids) < model.vocab_size,
        f"prompt_ids of request {request.request_id} hold ids outside [0, {model.vocab_size}): use this model's tokenizer",
    )
    require(
        model.mask_token_id not in ids,
        f"prompt_ids of request {request.request_id} hold the mask id {model.mask_token_id}: remove it from the prompt",
    )
