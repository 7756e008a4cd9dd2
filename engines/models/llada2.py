"""LLaDA2 over packed rows: a mixture-of-experts decoder that attends within a block and to the blocks before it.

Shapes as in ``engines.models.packed``. State-dict names are those of the published checkpoints.

We sort rows by expert and multiply each expert's rows in one product. A row's result does not depend on the other rows: on a
CPU, each expert multiplies at least ``LEAST_ROWS``. Shapes: n rows, E experts, k of them for each row, d model width.
"""

from collections.abc import Callable, Iterator
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engines.models.block_config import BlockConfig, ExpertsConfig
from engines.models.decoder import DecoderLayer, DecoderMLP, DecoderModel
from engines.models.layers import Linear, RMSNorm, RotaryAttention, one_tensor, rotate_halves
from engines.models.protocol import Attend

LEAST_ROWS = 16
"""Fewest rows of an expert's product on a CPU, rows of zeros included: with fewer, MKL adds in another order."""


class ExpertRouter(nn.Module):
    """Chooses the experts of each row and their weights, in float32 whatever the model's dtype is."""

    def __init__(self, width: int, config: ExpertsConfig) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(config.num_experts, width, dtype=torch.float32))
        self.expert_bias = nn.Parameter(torch.zeros(config.num_experts, dtype=torch.float32))
        self._config = config

    def _apply(self, fn: Callable[..., Tensor], recurse: bool = True) -> "ExpertRouter":
        """Move the router with the model, but keep it in float32."""

        def move(weight: Tensor) -> Tensor:
            result = fn(weight)
            return result if result.dtype == torch.float32 else weight.to(result.device, torch.float32)

        super()._apply(move, recurse)
        return self

    def forward(self, h: Tensor) -> tuple[Tensor, Tensor]:
        """Return the experts [n, k] and their weights [n, k] float32.

        The bias affects which experts are chosen, but not their weights. A group's score is the sum of its two best experts'
        scores. Experts outside the best groups are not chosen.
        """
        config = self._config
        n, groups = h.shape[0], config.num_groups
        missing = LEAST_ROWS - n if h.device.type == "cpu" else 0
        rows = F.pad(h.float(), (0, 0, 0, missing)) if missing > 0 else h.float()
        scores = torch.sigmoid(F.linear(rows, self.weight))[:n]
        by_group = (scores + self.expert_bias).view(n, groups, -1)
        best = by_group.topk(2, dim=-1).values.sum(dim=-1).topk(config.groups_per_token, dim=-1, sorted=False).indices
        is_shut = torch.ones((n, groups), dtype=torch.bool, device=h.device).scatter_(1, best, False)
        open_to = by_group.masked_fill(is_shut.unsqueeze(-1), -torch.inf).view(n, -1)
        chosen = open_to.topk(config.experts_per_token, dim=-1).indices
        weights = scores.gather(1, chosen)
        return chosen, weights / (weights.sum(dim=-1, keepdim=True) + 1e-20) * config.scaling

    __call__ = forward


class Expert(nn.Module):
    """Holds an expert's matrices under their published names; ``ExpertLayers`` multiplies them."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(width, hidden, bias=False)
        self.up_proj = nn.Linear(width, hidden, bias=False)
        self.down_proj = nn.Linear(hidden, width, bias=False)


class ExpertLayers(nn.ModuleList):
    def __init__(self, width: int, config: ExpertsConfig) -> None:
        super().__init__(Expert(width, config.expert_hidden) for _ in range(config.num_experts))
        self._joined: tuple[Tensor, Tensor] | None = None

    def _apply(self, fn: Callable[..., Tensor], recurse: bool = True) -> "ExpertLayers":
        super()._apply(fn, recurse)
        self._joined = None
        return self

    def matrices(self) -> tuple[Tensor, Tensor]:
        """gate and up [E, 2 hidden, d], down [E, d, hidden]; from the first call on the parameters are views of them."""
        if self._joined is None:
            experts = [cast(Expert, expert) for expert in self]
            inner = [matrix.weight for expert in experts for matrix in (expert.gate_proj, expert.up_proj)]
            outer = [expert.down_proj.weight for expert in experts]
            with torch.no_grad():
                joined = [one_tensor(cast(list[nn.Parameter], part)) for part in (inner, outer)]
            self._joined = joined[0].unflatten(0, (len(experts), -1)), joined[1].unflatten(0, (len(experts), -1))
        return self._joined

    def forward(self, h: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        return experts_sum(h, chosen, weights, *self.matrices(), F.silu)

    __call__ = forward


def experts_sum(
    h: Tensor, chosen: Tensor, weights: Tensor, inner: Tensor, outer: Tensor, activation: Callable[[Tensor], Tensor]
) -> Tensor:
    """Return the weighted sum [n, d] of each row's experts, for rows h [n, d]. The matrices are those of ``ExpertLayers.matrices``."""
    n, k = chosen.shape
    place, ends, size = _sorted_places(chosen.flatten(), len(inner))
    # We reuse names so that tensors are freed early: these are the largest of a layer.
    rows = h.new_zeros((size, h.shape[1])).index_copy_(0, place, h.repeat_interleave(k, dim=0))
    rows = F.grouped_mm(rows, inner.transpose(1, 2), offs=ends)
    gate, rows = activation(rows[:, : len(inner[0]) // 2]), rows[:, len(inner[0]) // 2 :]
    rows = gate * rows if gate.requires_grad else gate.mul_(rows)
    del gate
    rows = F.grouped_mm(rows, outer.transpose(1, 2), offs=ends)
    rows = rows.index_select(0, place).view(n, k, -1)
    weights = weights.to(rows.dtype).unsqueeze(-1)
    return (rows * weights if rows.requires_grad else rows.mul_(weights)).sum(dim=1)


def _sorted_places(expert: Tensor, num_experts: int) -> tuple[Tensor, Tensor, int]:
    """Return three things: the place of each (row, expert) pair [p] among all pairs sorted by expert, the end of each
    expert's places [E] int32, and the number of places."""
    if expert.device.type == "cpu":
        counts = torch.bincount(expert, minlength=num_experts)
        room = torch.where(counts > 0, counts.clamp(min=LEAST_ROWS), 0)
    else:  # ``bincount`` would wait for the device
        zeros = torch.zeros(num_experts, dtype=torch.int64, device=expert.device)
        room = counts = zeros.index_add_(0, expert, torch.ones_like(expert))
    ends = room.cumsum(0)
    order = expert.argsort(stable=True)
    first = ends - room - (counts.cumsum(0) - counts)
    place = torch.empty_like(order)
    place[order] = torch.arange(len(expert), device=expert.device) + first[expert[order]]
    size = int(ends[-1]) if expert.device.type == "cpu" else len(expert)
    return place, ends.to(torch.int32), size


class MixtureMLP(nn.Module):
    """Routed experts and a shared expert, which every row gets unweighted."""

    def __init__(self, width: int, config: ExpertsConfig) -> None:
        super().__init__()
        self.gate = ExpertRouter(width, config)
        self.experts = ExpertLayers(width, config)
        self.shared_experts = DecoderMLP(width, config.shared_hidden)

    def forward(self, h: Tensor) -> Tensor:
        return self.experts(h, *self.gate(h)) + self.shared_experts(h)

    __call__ = forward


class LLaDA2Attention(RotaryAttention):
    """Attention whose queries, keys and values come from one product. Only the first dimensions of a head are rotated."""

    def __init__(self, config: BlockConfig) -> None:
        super().__init__(config.n_heads, config.n_kv_heads, config.head_dim)
        width, kv_width = config.n_heads * config.head_dim, config.n_kv_heads * config.head_dim
        self.query_key_value = Linear(config.d_model, width + 2 * kv_width)
        self.query_layernorm = RMSNorm(config.head_dim, config.rms_norm_eps)
        self.key_layernorm = RMSNorm(config.head_dim, config.rms_norm_eps)
        self.dense = Linear(width, config.d_model)
        self._widths = [width, kv_width, kv_width]
        self._rotary_dim = config.rotary_dim

    def qkv(self, h: Tensor) -> Iterator[Tensor]:  # type: ignore[override]
        return iter(self.query_key_value(h).split(self._widths, dim=-1))

    def rotate(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        q, k = self.query_layernorm(q), self.key_layernorm(k)
        if self._rotary_dim == self.head_dim:
            return super().rotate(q, k, cos, sin)
        part = self._rotary_dim
        return (
            torch.cat((rotate_halves(q[..., :part], cos, sin), q[..., part:]), dim=-1),
            torch.cat((rotate_halves(k[..., :part], cos, sin), k[..., part:]), dim=-1),
        )

    def forward(self, h: Tensor, cos: Tensor, sin: Tensor, layer: int, attend: Attend) -> Tensor:
        return self.dense(self.attend_heads(h, cos, sin, layer, attend))

    __call__ = forward


class LLaDA2Layer(DecoderLayer):
    ATTENTION = "attention"


class LLaDA2Model(DecoderModel[BlockConfig]):
    EMBEDDING = "model.word_embeddings"

    def _layer(self, index: int) -> LLaDA2Layer:
        config, width = self.config, self.config.d_model
        assert config.experts is not None
        is_dense = index < config.experts.dense_layers
        mlp = DecoderMLP(width, config.mlp_hidden_size) if is_dense else MixtureMLP(width, config.experts)
        return LLaDA2Layer(config, LLaDA2Attention(config), mlp)

    @property
    def _rotary_dim(self) -> int:
        return self.config.rotary_dim

    @property
    def float32_weights(self) -> frozenset[str]:
        """Names of the routers' weights, which checkpoints store in either precision."""
        return frozenset(
            f"{name}.{weight}"
            for name, module in self.named_modules()
            if isinstance(module, ExpertRouter)
            for weight, _ in module.named_parameters()
        )
