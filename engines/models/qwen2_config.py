"""Architecture of a causal decoder of the Qwen2/Qwen2.5 or Llama family, read strictly from its published config.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

from engines.errors import UserError, require
from engines.models.checkpoint import checkpoint_dir, read_json
from engines.models.config_fields import flag, positive_float, positive_int, refuse_unsupported, require_fields
from engines.models.shape import QWEN2_5_7B, QWEN2_5_14B, QWEN2_5_32B, ModelShape

Family: TypeAlias = Literal["qwen2", "llama"]

CAUSAL_TYPES: tuple[Family, ...] = ("qwen2", "llama")
"""Values of ``model_type`` that ``read_causal_config`` accepts."""

_REQUIRED = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "vocab_size",
    "max_position_embeddings",
    "rms_norm_eps",
)

_IMPLEMENTED: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "use_sliding_window": (False, None),  # a window size alone is inert: it counts only with this flag
    "use_mrope": (False, None),
    "partial_rotary_factor": (1.0, None),
    "pretraining_tp": (1, None),
    "quantization_config": (None,),
}


@dataclass(frozen=True, kw_only=True)
class Rope:
    """Rotary positions. ``scaling`` is what a checkpoint says of them beyond theta, None where it says nothing."""

    theta: float
    scaling: LinearScaling | Llama3Scaling | None = None


@dataclass(frozen=True, kw_only=True)
class LinearScaling:
    """Every frequency divided by ``factor`` (position interpolation, arXiv 2306.15595)."""

    factor: float


@dataclass(frozen=True, kw_only=True)
class Llama3Scaling:
    """Llama 3.1's: long wavelengths are stretched by ``factor``, short ones kept, those between interpolated."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int

    def __post_init__(self) -> None:
        require(
            self.low_freq_factor < self.high_freq_factor,
            f"config.json has low_freq_factor={self.low_freq_factor} and high_freq_factor={self.high_freq_factor}: the "
            "second must be larger",
        )


@dataclass(frozen=True, kw_only=True)
class CausalConfig:
    """A pre-norm decoder with rotary positions, grouped-query attention and a gated MLP."""

    family: Family
    d_model: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    mlp_hidden_size: int
    vocab_size: int
    """Rows of the embedding and of the head, padding rows included."""
    max_sequence_length: int
    rope: Rope
    rms_norm_eps: float
    qkv_bias: bool
    o_bias: bool = False
    mlp_bias: bool = False
    weight_tying: bool = False

    def __post_init__(self) -> None:
        require(
            self.n_heads % self.n_kv_heads == 0,
            f"config.json: num_attention_heads={self.n_heads} must be a multiple of num_key_value_heads={self.n_kv_heads}",
        )
        require(
            self.head_dim % 2 == 0, f"config.json: head_dim={self.head_dim} is odd, which rotary positions cannot halve"
        )

    @staticmethod
    def from_dict(raw: Mapping[str, Any]) -> CausalConfig:
        """Unknown keys are ignored, unsupported values refused."""
        family = raw.get("model_type")
        if family not in CAUSAL_TYPES:
            raise UserError(
                f"config.json has model_type={family!r}: give a checkpoint of type {' or '.join(CAUSAL_TYPES)}"
            )
        require_fields(raw, _REQUIRED)
        refuse_unsupported(raw, _IMPLEMENTED)
        layer_types = set(raw.get("layer_types") or ()) - {"full_attention"}
        if layer_types:
            raise UserError(f"config.json has layer_types={sorted(layer_types)}; only 'full_attention' is implemented")
        d_model, n_heads = positive_int(raw, "hidden_size"), positive_int(raw, "num_attention_heads")
        if raw.get("head_dim") is None and d_model % n_heads:
            raise UserError(
                f"config.json: num_attention_heads={n_heads} must divide hidden_size={d_model}, or give head_dim"
            )
        has_bias = flag(raw, "attention_bias")
        return CausalConfig(
            family=family,
            d_model=d_model,
            n_layers=positive_int(raw, "num_hidden_layers"),
            n_heads=n_heads,
            # Checkpoints from before grouped heads lack the field.
            n_kv_heads=positive_int(raw, "num_key_value_heads")
            if raw.get("num_key_value_heads") is not None
            else n_heads,
            head_dim=positive_int(raw, "head_dim") if raw.get("head_dim") is not None else d_model // n_heads,
            mlp_hidden_size=positive_int(raw, "intermediate_size"),
            vocab_size=positive_int(raw, "vocab_size"),
            max_sequence_length=positive_int(raw, "max_position_embeddings"),
            rope=_rope(raw),
            rms_norm_eps=positive_float(raw, "rms_norm_eps"),
            # Qwen2 has biases on q, k and v whatever its config says; Llama has four or none.
            qkv_bias=family == "qwen2" or has_bias,
            o_bias=family == "llama" and has_bias,
            mlp_bias=family == "llama" and flag(raw, "mlp_bias"),
            weight_tying=flag(raw, "tie_word_embeddings"),
        )

    @staticmethod
    def from_shape(shape: ModelShape, *, max_sequence_length: int = 32768, theta: float = 1e6) -> CausalConfig:
        """What sizes random weights; a checkpoint's own config.json is what is served."""
        require(
            shape.num_experts == 1 and not shape.qk_norm,
            f"model={shape.name!r} has experts or normalised queries, which the decoder here does not compute",
        )
        return CausalConfig(
            family="qwen2" if shape.qkv_bias else "llama",
            d_model=shape.d_model,
            n_layers=shape.n_layers,
            n_heads=shape.n_heads,
            n_kv_heads=shape.n_kv_heads,
            head_dim=shape.head_dim,
            mlp_hidden_size=shape.mlp_hidden,
            vocab_size=shape.vocab_rows,
            max_sequence_length=max_sequence_length,
            rope=Rope(theta=theta),
            rms_norm_eps=1e-6,
            qkv_bias=shape.qkv_bias,
            weight_tying=shape.tied,
        )

    def shape(self, name: str, *, dtype_bytes: int = 2) -> ModelShape:
        """What cost models read."""
        return ModelShape(
            name=name,
            d_model=self.d_model,
            n_layers=self.n_layers,
            n_heads=self.n_heads,
            n_kv_heads=self.n_kv_heads,
            head_dim=self.head_dim,
            mlp_hidden=self.mlp_hidden_size,
            vocab_rows=self.vocab_size,
            tied=self.weight_tying,
            qkv_bias=self.qkv_bias,
            dtype_bytes=dtype_bytes,
        )


CAUSAL_SHAPES: dict[str, CausalConfig] = {
    shape.name.lower(): CausalConfig.from_shape(shape) for shape in (QWEN2_5_7B, QWEN2_5_14B, QWEN2_5_32B)
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
    path = directory / "config.json"
    require(path.is_file(), f"model directory {directory} has no config.json: give a Qwen2 or Llama checkpoint")
    return CausalConfig.from_dict(read_json(path))


def causal_config(model: str) -> CausalConfig:
    """The config of a shape's name (``CAUSAL_SHAPES``), a directory or a hub id."""
    found = CAUSAL_SHAPES.get(model.lower())
    return read_causal_config(checkpoint_dir(model, weights=False)) if found is None else found


def _rope(raw: Mapping[str, Any]) -> Rope:
    """From ``rope_theta`` and ``rope_scaling``, or from ``rope_parameters``, which replaced the two in transformers 5."""
    scaling = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    if not isinstance(scaling, Mapping):
        raise UserError(f"config.json has rope_scaling={scaling!r}: give an object, or null")
    theta = scaling if scaling.get("rope_theta") is not None else raw
    if theta.get("rope_theta") is None:
        raise UserError("config.json lacks rope_theta: add the architecture's fields")
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if scaling.get("partial_rotary_factor") not in (None, 1, 1.0):
        raise UserError(
            f"config.json has partial_rotary_factor={scaling['partial_rotary_factor']!r}; only 1.0 is implemented"
        )
    return Rope(theta=positive_float(theta, "rope_theta"), scaling=_scaling(kind, scaling))


def _scaling(kind: object, raw: Mapping[str, Any]) -> LinearScaling | Llama3Scaling | None:
    if kind == "default":
        return None
    if kind == "linear":
        require_fields(raw, ("factor",))
        return LinearScaling(factor=positive_float(raw, "factor"))
    if kind == "llama3":
        require_fields(raw, ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"))
        return Llama3Scaling(
            factor=positive_float(raw, "factor"),
            low_freq_factor=positive_float(raw, "low_freq_factor"),
            high_freq_factor=positive_float(raw, "high_freq_factor"),
            original_max_position_embeddings=positive_int(raw, "original_max_position_embeddings"),
        )
    raise UserError(f"config.json has rope_type={kind!r}; only 'default', 'linear' and 'llama3' are implemented")
