"""The shape of a causal model, dense or a mixture of experts, from a folder's ``config.json`` in the hub's format.

We read every field that changes the time of a step, and refuse values that no simulated step supports. We read no weights.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from engines.errors import UserError, require
from engines.models.checkpoint import published_config
from engines.models.config import SAID, Hidden, Layers, read_numbers, refuse_unsupported, require_fields
from engines.models.qwen2_config import CAUSAL_TYPES, CausalConfig
from engines.models.shape import CATALOGUE, DIFFUSION, ModelShape, ReadShape

_MIXTURES: Mapping[str, tuple[str, str, str]] = {
    "mixtral": ("mistral", "num_local_experts", "intermediate_size"),
    "qwen2_moe": ("qwen2", "num_experts", "moe_intermediate_size"),
    "qwen3_moe": ("qwen3", "num_experts", "moe_intermediate_size"),
}
"""``model_type`` -> the dense model with the same attention, and the fields for the number and hidden width of experts."""
_IMPLEMENTED: Mapping[str, tuple[Any, ...]] = {
    "torch_dtype": ("bfloat16", "float16", None),
    "dtype": ("bfloat16", "float16", None),
    "decoder_sparse_step": (1, None),
}


@dataclass(frozen=True, kw_only=True)
class _Experts:
    num_experts: Layers
    experts_per_token: Layers
    mlp_hidden: Hidden
    shared_hidden: Hidden | None = None
    """The hidden width of a shared expert, which every token gets too."""


def read_shape(folder: Path) -> ModelShape:
    """Return the shape of a folder's model: the one of the catalogue with all the same sizes, or else one with the folder's name."""
    types = (*CAUSAL_TYPES, *_MIXTURES)
    raw = published_config(folder, ", ".join(types))
    try:
        shape = _shape(raw, types, folder.resolve().name)
    except UserError as error:
        raise UserError(f"model={str(folder)!r}: {error}") from None
    for known in CATALOGUE:
        if known not in DIFFUSION and shape.dimensions | {"name": known.name} == known.dimensions:
            return known
        if shape.name.lower() == known.name.lower():
            shape = replace(shape, name=f"{shape.name} (config.json)")
    return shape


def _shape(raw: Mapping[str, Any], types: tuple[str, ...], name: str) -> ModelShape:
    kind: Any = raw.get("model_type")
    require(kind in types, f"config.json has model_type={kind!r}: give one of {', '.join(types)}")
    refuse_unsupported(raw, _IMPLEMENTED)
    require(
        raw.get("quantization_config") is None,
        f"config.json has quantization_config={raw.get('quantization_config')!r}, which no step is simulated by: leave it out, and give "
        "precision=fp8 or fp8-block where the weights are so",
    )
    dense = dict(raw)
    if kind in _MIXTURES:
        dense["model_type"] = _MIXTURES[kind][0]
        dense.setdefault("sliding_window", None)
    config = CausalConfig.from_dict(dense)
    experts = _experts(raw, config.n_layers, *_MIXTURES[kind][1:]) if kind in _MIXTURES else {}
    require(
        config.sliding_window is None,
        f"config.json has sliding_window={config.sliding_window}, and simulated steps attend to the whole context: use a model without",
    )
    sizes = {field: getattr(config, field) for field in ("d_model", "n_layers", "n_heads", "n_kv_heads", "head_dim")}
    return ReadShape(
        name=name,
        **sizes,
        **{"mlp_hidden": config.mlp_hidden_size, **experts},
        vocab_rows=config.vocab_size,
        tied=config.weight_tying,
        qkv_bias=config.qkv_bias,
        qk_norm=config.qk_norm,
    )


def _experts(raw: Mapping[str, Any], n_layers: int, number: str, hidden: str) -> dict[str, Any]:
    """Return the shape's fields about experts. Layers in ``mlp_only_layers`` have one MLP instead of experts."""
    names = {
        "num_experts": number,
        "experts_per_token": "num_experts_per_tok",
        "mlp_hidden": hidden,
        "shared_hidden": "shared_expert_intermediate_size",
    }
    require_fields(raw, [name for name in names.values() if name != names["shared_hidden"]])
    sizes = read_numbers(_Experts, raw, names)
    dense = [] if raw.get("mlp_only_layers") is None else raw["mlp_only_layers"]
    require(
        isinstance(dense, list) and all(type(layer) is int and 0 <= layer < n_layers for layer in dense),
        f"{SAID}mlp_only_layers={dense!r} must be a list of layers from 0 to {n_layers - 1}",
    )
    if dense:
        sizes |= {"dense_layers": len(set(dense)), "dense_hidden": raw["intermediate_size"]}
    return sizes
