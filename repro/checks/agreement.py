"""How often 16-bit arithmetic picks another token than float32: the most likely token of masked positions."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from engines.dllm.plan import Request
from repro.runs.statistics import wilson_interval

if TYPE_CHECKING:
    from torch import Tensor

    from engines.models.loader import Weights
    from engines.models.protocol import DiffusionModel


@dataclass(frozen=True, kw_only=True)
class Agreement:
    """Over all masked positions of all prompts, one forward each."""

    num_prompts: int
    num_positions: int
    num_agreeing: int
    median_margin: float
    """Median lead of float32's best logit over its second: how near the decisions are."""

    @property
    def share(self) -> float:
        return self.num_agreeing / self.num_positions

    def to_dict(self) -> dict[str, Any]:
        low, high = wilson_interval(self.num_agreeing, self.num_positions)
        return {
            "num_prompts": self.num_prompts,
            "n": self.num_positions,
            "agreeing": self.num_agreeing,
            "share": self.share,
            "low": low,
            "high": high,
            "median_margin": self.median_margin,
        }


def load_pair(model: str, *, weights: Weights, device: str) -> tuple[DiffusionModel, DiffusionModel]:
    """(float32, bfloat16). A checkpoint is loaded in both, so that rounding its weights counts; random weights are
    drawn in bfloat16 and widened, as published 16-bit checkpoints are: there only the arithmetic differs."""
    import torch

    from engines.models.loader import load_model

    rounded = load_model(model, dtype=torch.bfloat16, device=device, weights=weights)
    if weights == "random":
        exact: Any = copy.deepcopy(rounded)
        return exact.to(torch.float32), rounded
    return load_model(model, dtype=torch.float32, device=device, weights=weights), rounded


def top1_agreement(exact: DiffusionModel, rounded: DiffusionModel, requests: Sequence[Request]) -> Agreement:
    """Each prompt is followed by its whole generated region, all of it masked; raw argmax, the lowest id of equals."""
    import torch

    num_positions = num_agreeing = 0
    margins = []
    with torch.inference_mode():
        for request in requests:
            wanted, found = (_masked_logits(model, request) for model in (exact, rounded))
            num_positions += request.generation.gen_length
            num_agreeing += int((wanted.argmax(dim=-1) == found.argmax(dim=-1)).sum())
            best = wanted.topk(2, dim=-1).values
            margins.append((best[:, 0] - best[:, 1]).float().cpu())
    return Agreement(
        num_prompts=len(requests),
        num_positions=num_positions,
        num_agreeing=num_agreeing,
        median_margin=float(torch.cat(margins).median()),
    )


def _masked_logits(model: DiffusionModel, request: Request) -> Tensor:
    """[gen_length, V] of the positions to be generated."""
    import torch

    device = next(model.parameters()).device
    config, length = model.config, request.generation.gen_length
    assert request.prompt_ids is not None
    ids = torch.tensor([*request.prompt_ids, *[config.mask_token_id] * length], dtype=torch.int64, device=device)
    hidden = model.hidden(ids, model.rotary(torch.arange(len(ids), device=device)), _attend)
    # Where row i predicts token i + 1, the rows before the generated region's are the ones that predict it.
    start = request.prompt_len - int(config.shifts_logits)
    return model.logits(hidden[start : start + length])


def _attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Every row to every row."""
    from engines.attention import sdpa

    return sdpa(q[None], k[None], v[None])[0]
