"""Architecture of a causal decoder of the Qwen2, Qwen3, Llama or Mistral family, read strictly from its published config.json."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

from engines.errors import UserError, require
from engines.models.checkpoint import checkpoint_dir, published_config
from engines.models.config import (
    DECODER_SIZES,
    IMPLEMENTED,
    LAYERS,
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
from engines.models.shape import MISTRAL, QWEN2_5_7B, QWEN2_5_14B, QWEN2_5_32B, QWEN3, ModelShape

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
