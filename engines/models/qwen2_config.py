"""Architecture of a causal decoder of the Qwen2, Qwen3, Llama or Mistral family, read strictly from its published config.json.

``read_shape`` also reads mixtures of experts. It reads every field that changes the time of a step, and refuses values that no simulated
step supports.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

from engines.errors import UserError, require
from engines.models.checkpoint import checkpoint_dir, published_config
from engines.models.config import (
    DECODER_SIZES,
    IMPLEMENTED,
    LAYERS,
    SAID,
    Heads,
    Hidden,
    Layers,
    Positive,
    Rope,
    Rows,
    Width,
    decoder_fields,
    flag,
    read_numbers,
    read_rope,
    refuse_unsupported,
    require_fields,
    sliding_window,
)
from engines.models.shape import (
    CATALOGUE,
    DIFFUSION,
    MISTRAL,
    QWEN2_5_7B,
    QWEN2_5_14B,
    QWEN2_5_32B,
    QWEN3,
    ModelShape,
    ReadShape,
)

Family: TypeAlias = Literal["qwen2", "qwen3", "llama", "mistral"]

CAUSAL_TYPES: tuple[Family, ...] = get_args(Family)
"""Values of ``model_type`` that ``read_causal_config`` accepts."""

_REQUIRED = (*DECODER_SIZES.values(), "rms_norm_eps")

_IMPLEMENTED: Mapping[str, Sequence[Any]] = {
    name: allowed
    for name, allowed in (IMPLEMENTED["decoders"] | IMPLEMENTED["causal"]).items()
    if name != "use_sliding_window"
}
_WITHOUT_BIASES = {**_IMPLEMENTED, "attention_bias": (False, None), "mlp_bias": (False, None)}


class _Published(NamedTuple):
    """Defaults for fields that a family's config.json may lack, as transformers reads it."""

    implemented: Mapping[str, Sequence[Any]] = _IMPLEMENTED
    theta: float | None = None
    head_dim: int | None = None
    """None: the model's width divided by the number of heads."""
    slides: bool = False
    """Whether a window is in use without a flag."""


_FAMILIES: Mapping[Family, _Published] = {
    "qwen2": _Published(),
    "qwen3": _Published({**_IMPLEMENTED, "mlp_bias": (False, None)}, head_dim=128),
    "llama": _Published(theta=1e4),  # Llama 2 publishes none
    "mistral": _Published(_WITHOUT_BIASES, theta=1e4, slides=True),
}


@dataclass(frozen=True, kw_only=True)
class CausalConfig:
    """A pre-norm decoder with rotary positions, grouped-query attention and a gated MLP."""

    family: Family
    d_model: Width
    n_layers: Layers
    n_heads: Heads
    n_kv_heads: Heads
    head_dim: Width
    mlp_hidden_size: Hidden
    vocab_size: Rows
    """Rows of the embedding and of the head, padding rows included."""
    max_sequence_length: Rows
    """Number of positions, at most the size of a sliding window. A window that hides no position counts as none."""
    rope: Rope
    rms_norm_eps: Positive
    qkv_bias: bool
    o_bias: bool = False
    mlp_bias: bool = False
    weight_tying: bool = False
    sliding_window: Rows | None = None
    """Most tokens that a layer's queries see; given only if it is less than the published number of positions."""

    @property
    def qk_norm(self) -> bool:
        return self.family == "qwen3"

    def check_length(self, name: str, tokens: int) -> None:
        """Raise UserError if ``name`` allows longer sequences than the model computes."""
        length, window = self.max_sequence_length, self.sliding_window
        limit = f"{length} positions" if window is None else f"sliding_window={window}, past which nothing is computed"
        require(tokens <= length, f"{name}={tokens} exceeds the model's {limit}: lower it")

    def __post_init__(self) -> None:
        require(
            self.n_heads % self.n_kv_heads == 0,
            f"config.json: num_attention_heads={self.n_heads} must be a multiple of num_key_value_heads={self.n_kv_heads}",
        )
        require(
            self.head_dim % 2 == 0, f"config.json: head_dim={self.head_dim} is odd, which rotary positions cannot halve"
        )

    @staticmethod
    def from_dict(raw: Mapping[str, Any]) -> "CausalConfig":
        """Build from a parsed ``config.json``; unknown keys are ignored, unsupported values refused."""
        family = raw.get("model_type")
        if family not in CAUSAL_TYPES:
            *names, last = CAUSAL_TYPES
            raise UserError(
                f"config.json has model_type={family!r}: give a checkpoint of type {', '.join(names)} or {last}"
            )
        published = _FAMILIES[family]
        require_fields(raw, _REQUIRED)
        refuse_unsupported(raw, published.implemented)
        fields = decoder_fields(CausalConfig, raw, layers=LAYERS)
        d_model, n_heads = fields["d_model"], fields["n_heads"]
        if raw.get("head_dim") is None and published.head_dim is None and d_model % n_heads:
            raise UserError(
                f"config.json: num_attention_heads={n_heads} must divide hidden_size={d_model}, or give head_dim"
            )
        # Checkpoints from before grouped heads lack the field.
        heads = {"n_kv_heads": n_heads, "head_dim": published.head_dim or d_model // n_heads}
        heads |= read_numbers(CausalConfig, raw, {"n_kv_heads": "num_key_value_heads", "head_dim": "head_dim"})
        has_bias = flag(raw, "attention_bias")
        window = sliding_window(raw, fields["n_layers"], always=published.slides)
        if window is not None and window >= fields["max_sequence_length"]:
            window = None
        elif window is not None:
            fields["max_sequence_length"] = window
        return CausalConfig(
            **fields,
            **heads,
            family=family,
            rope=read_rope(raw, default_theta=published.theta),
            sliding_window=window,
            # Qwen2 has biases on q, k and v whatever its config says; Llama and Qwen3 have four or none.
            qkv_bias=family == "qwen2" or has_bias,
            o_bias=family != "qwen2" and has_bias,
            mlp_bias=family == "llama" and flag(raw, "mlp_bias"),
        )

    @staticmethod
    def from_shape(shape: ModelShape) -> "CausalConfig":
        """Return a config that sizes random weights; served checkpoints use their own config.json."""
        require(shape.num_experts == 1, f"model={shape.name!r} has experts, which the decoder here does not compute")
        return CausalConfig(
            family="qwen3" if shape.qk_norm else "qwen2" if shape.qkv_bias else "llama",
            d_model=shape.d_model,
            n_layers=shape.n_layers,
            n_heads=shape.n_heads,
            n_kv_heads=shape.n_kv_heads,
            head_dim=shape.head_dim,
            mlp_hidden_size=shape.mlp_hidden,
            vocab_size=shape.vocab_rows,
            max_sequence_length=32768,
            rope=Rope(theta=1e6),
            rms_norm_eps=1e-6,
            qkv_bias=shape.qkv_bias,
            weight_tying=shape.tied,
        )


CAUSAL_SHAPES: dict[str, CausalConfig] = {
    shape.name.lower(): CausalConfig.from_shape(shape)
    for shape in (QWEN2_5_7B, QWEN2_5_14B, QWEN2_5_32B, *QWEN3, *MISTRAL)
}
"""Full-size shapes that need no download with random weights."""


def tiny_causal(
    *, d_model: int = 64, n_layers: int = 12, n_heads: int = 4, n_kv_heads: int = 2, vocab_size: int = 512
) -> CausalConfig:
    """A Qwen2 decoder whose steps a CPU core runs in milliseconds."""
    return CausalConfig(
        family="qwen2",
        d_model=d_model,
        n_layers=n_layers,
        n_heads=n_heads,
        n_kv_heads=n_kv_heads,
        head_dim=d_model // n_heads,
        mlp_hidden_size=4 * d_model,
        vocab_size=vocab_size,
        max_sequence_length=4096,
        rope=Rope(theta=1e6),
        rms_norm_eps=1e-6,
        qkv_bias=True,
        weight_tying=True,
    )


def read_causal_config(directory: Path) -> CausalConfig:
    return CausalConfig.from_dict(published_config(directory, "Qwen2, Qwen3, Llama or Mistral"))


def causal_config(model: str) -> CausalConfig:
    """The config of a shape's name (``CAUSAL_SHAPES``), a directory or a hub id."""
    config = CAUSAL_SHAPES.get(model.lower())
    return read_causal_config(checkpoint_dir(model, weights=False)) if config is None else config


# -- shapes -----------------------------------------------------------------------------------------------

_MIXTURES: Mapping[str, tuple[str, str, str]] = {
    "mixtral": ("mistral", "num_local_experts", "intermediate_size"),
    "qwen2_moe": ("qwen2", "num_experts", "moe_intermediate_size"),
    "qwen3_moe": ("qwen3", "num_experts", "moe_intermediate_size"),
}
"""``model_type`` -> the dense model with the same attention, and the fields for the number and hidden width of experts."""
_SHAPES_IMPLEMENTED: Mapping[str, tuple[Any, ...]] = {
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
        shape = _shape_of(raw, types, folder.resolve().name)
    except UserError as error:
        raise UserError(f"model={str(folder)!r}: {error}") from None
    for known in CATALOGUE:
        if known not in DIFFUSION and shape.dimensions | {"name": known.name} == known.dimensions:
            return known
        if shape.name.lower() == known.name.lower():
            shape = replace(shape, name=f"{shape.name} (config.json)")
    return shape


def _shape_of(raw: Mapping[str, Any], types: tuple[str, ...], name: str) -> ModelShape:
    kind: Any = raw.get("model_type")
    require(kind in types, f"config.json has model_type={kind!r}: give one of {', '.join(types)}")
    refuse_unsupported(raw, _SHAPES_IMPLEMENTED)
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
