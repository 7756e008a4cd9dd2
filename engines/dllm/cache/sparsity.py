"""Which context rows a Refresh retains (dLLM-Serve §4.5): the most important ones, ties to the lower index."""

from __future__ import annotations

import torch
from torch import Tensor


def top_rows(score: Tensor, num_kept: int) -> Tensor:
    """[n, heads, num_kept] context indices, most important first, ties to the lower index."""
    return score.sort(dim=-1, descending=True, stable=True).indices[..., :num_kept]


def top_rows_parity(score: Tensor, kept: list[int], num_context: list[int]) -> Tensor:
    """As ``top_rows`` by ``torch.topk`` on each request's own [1, N] list: the library's order of
    ties, which is what the published samplers get. For comparisons only."""
    width = max(kept)
    chosen = score.new_zeros((score.shape[0], score.shape[1], width), dtype=torch.int64)
    for i, (count, length) in enumerate(zip(kept, num_context, strict=True)):
        for head in range(score.shape[1]):
            chosen[i, head, :count] = torch.topk(
                score[i, head : head + 1, :length].contiguous(), count, dim=-1
            ).indices[0]
    return chosen
