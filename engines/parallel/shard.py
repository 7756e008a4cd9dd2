"""A rank's part of a LLaDA or Dream model, cut out of the whole model or read directly from a checkpoint.

Each layer has two sums over the ranks (behind attention and behind the MLP), and the embedding one behind it.
``engines.models.config`` says which rank holds which head or id.
"""

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engines.models.config import check_division, span
from engines.models.decoder import DreamModel
from engines.models.layers import Linear, RotaryAttention
from engines.models.llada import LLaDAModelLM
from engines.models.loader import Slice, Weights, load_model
from engines.models.protocol import DiffusionModel
from engines.parallel.group import TensorParallel

_Cut = Literal["outputs", "inputs", "ids"]

_IN_LAYER: dict[str, _Cut] = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj", "ff_proj", "gate_proj", "up_proj"), "outputs"),
    **dict.fromkeys(("attn_out", "ff_out", "o_proj", "down_proj"), "inputs"),
}
_OUTSIDE: dict[str, _Cut] = {"wte": "ids", "embed_tokens": "ids", "ff_out": "outputs", "lm_head": "outputs"}


class PartialLinear(Linear):
    """Computes x W^T over this rank's own inputs, summed over the ranks; weight [outputs, own inputs], no bias."""

    def __init__(self, weight: nn.Parameter, group: TensorParallel) -> None:
        with torch.device("meta"):
            super().__init__(weight.shape[1], weight.shape[0])
        self.weight = weight
        self.group = group

    def forward(self, x: Tensor) -> Tensor:
        return self.group.all_reduce(super().forward(x))

    __call__ = forward


class PartialEmbedding(nn.Module):
    """Holds the rows of ids [first, first + own); rows of other ids come from the ranks that hold them. weight [own, d]."""

    def __init__(self, weight: nn.Parameter, first: int, group: TensorParallel) -> None:
        super().__init__()
        self.weight = weight
        self.first = first
        self.group = group

    def forward(self, ids: Tensor) -> Tensor:
        local_ids = ids - self.first
        elsewhere = (local_ids < 0) | (local_ids >= self.weight.shape[0])
        rows = F.embedding(local_ids.masked_fill(elsewhere, 0), self.weight)
        return self.group.all_reduce(rows.masked_fill_(elsewhere.unsqueeze(-1), 0))


def shard_model(model: LLaDAModelLM | DreamModel, group: TensorParallel) -> dict[str, Slice]:
    """Reduce ``model`` to ``group.rank``'s part, in place. Returns which part of which tensor of its state dict is left.

    ``model.config`` still describes the whole model. Works on the meta device too.
    """
    check_division(model.config, group.size)
    if group.size == 1:
        return {}
    parts: dict[str, Slice] = {}
    for path, module in list(model.named_modules()):
        if isinstance(module, (nn.Linear, nn.Embedding)):
            parts |= _cut(model, path, module, group)
        elif isinstance(module, RotaryAttention):
            module.heads //= group.size
            module.kv_heads //= group.size
    model.kv_heads_here = model.config.n_kv_heads // group.size
    model.tensor_parallel = group
    return parts


def _cut(model: nn.Module, path: str, module: nn.Linear | nn.Embedding, group: TensorParallel) -> dict[str, Slice]:
    parent, _, leaf = path.rpartition(".")
    in_layer = any(name in ("blocks", "layers") for name in parent.split("."))
    cut = (_IN_LAYER if in_layer else _OUTSIDE).get(leaf)
    if cut is None:
        raise ValueError(f"{path} has no rule how to divide it among ranks")
    parts: dict[str, Slice] = {}
    for name, parameter in list(module.named_parameters()):
        dim = 1 if cut == "inputs" else 0
        length = parameter.shape[dim]
        part = Slice(dim, *span(length, group.rank, group.size), length)
        # We copy the part, or the whole tensor would stay in memory behind it.
        shard = part.of(parameter.detach()).clone(memory_format=torch.contiguous_format)
        module.register_parameter(name, nn.Parameter(shard, requires_grad=parameter.requires_grad))
        parts[f"{path}.{name}"] = part
    first, end = span(length, group.rank, group.size)
    if cut == "outputs":
        assert isinstance(module, nn.Linear)
        module.out_features = end - first
    elif cut == "inputs":
        assert getattr(module, "bias", None) is None, f"every rank would add the bias of {path}"
        setattr(model.get_submodule(parent), leaf, PartialLinear(module.get_parameter("weight"), group))
    else:
        setattr(model.get_submodule(parent), leaf, PartialEmbedding(module.get_parameter("weight"), first, group))
    return parts


def load_shard(
    model: str,
    group: TensorParallel,
    *,
    dtype: torch.dtype = torch.float32,
    weights: Weights = "checkpoint",
    seed: int = 0,
) -> DiffusionModel:
    """Load ``group.rank``'s part by ``load_model``, on the rank's device; no other weights are read.

    Random weights are the parts of those that one process draws on such a device with the same seed.
    """
    return load_model(
        model,
        dtype=dtype,
        device=group.device,
        weights=weights,
        seed=seed,
        divide=lambda network: shard_model(network, group),
    )
