"""Strict reading of a parsed ``config.json``, its rotary positions included: nothing assumed, nothing unsupported passed over."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from engines.errors import UserError, require
from engines.knobs import knobs_of
from engines.models.config import Positive, Rows

DECODER_SIZES = {
    "d_model": "hidden_size",
    "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads",
    "mlp_hidden_size": "intermediate_size",
    "vocab_size": "vocab_size",
    "max_sequence_length": "max_position_embeddings",
}
"""Our names of a decoder's sizes -> those that Qwen2, Llama and Dream publish."""
SAID = "config.json: "
"""In front of what is wrong with it."""
IMPLEMENTED_OF_DECODERS: Mapping[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "use_sliding_window": (False, None),  # a window size alone is inert: it counts only with this flag
    "use_mrope": (False, None),
    "quantization_config": (None,),
}


def decoder_fields(kind: type, raw: Mapping[str, Any]) -> dict[str, Any]:
    """What Qwen2, Llama and Dream publish alike, by our names."""
    layer_types = [] if raw.get("layer_types") is None else raw["layer_types"]
    if not isinstance(layer_types, list | tuple):
        raise UserError(f"config.json has layer_types={layer_types!r}: give a list of one type a layer, or null")
    others = sorted({repr(each) for each in layer_types if each != "full_attention"})
    if others:
        raise UserError(f"config.json has layer_types=[{', '.join(others)}]; only 'full_attention' is implemented")
    return {
        **read_numbers(kind, raw, {**DECODER_SIZES, "rms_norm_eps": "rms_norm_eps"}),
        "weight_tying": flag(raw, "tie_word_embeddings"),
    }


def require_fields(raw: Mapping[str, Any], names: Iterable[str]) -> None:
    missing = [name for name in names if raw.get(name) is None]
    if missing:
        raise UserError(f"config.json lacks {', '.join(missing)}: add the architecture's fields")


def refuse_unsupported(raw: Mapping[str, Any], implemented: Mapping[str, tuple[Any, ...]]) -> None:
    """``implemented``: field -> the only values the modules here compute, the usual one first."""
    for name, allowed in implemented.items():
        if name in raw and raw[name] not in allowed:
            raise UserError(f"config.json has {name}={raw[name]!r}; only {allowed[0]!r} is implemented")


def read_numbers(kind: type, raw: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """Fields of a configuration, each by its published name and in the range that it declares; what is absent or null is left out."""
    knobs = knobs_of(kind)
    given = {field: raw[name] for field, name in names.items() if raw.get(name) is not None}
    return {field: knobs[field]._replace(name=names[field]).check(value, prefix=SAID) for field, value in given.items()}


def token_id(raw: Mapping[str, Any], name: str, vocab_size: int) -> int:
    value = raw[name]
    if type(value) is not int or not 0 <= value < vocab_size:
        raise UserError(f"config.json has {name}={value!r}: give one id below the {vocab_size} vocabulary rows")
    return value


def flag(raw: Mapping[str, Any], name: str) -> bool:
    """False where the field is absent or null."""
    value = raw.get(name)
    if value not in (True, False, None):
        raise UserError(f"config.json has {name}={value!r}: give true or false")
    return bool(value)


def check_heads(n_heads: int, n_kv_heads: int, d_model: int) -> None:
    if d_model % n_heads or n_heads % n_kv_heads:
        raise UserError(
            f"config.json: n_heads={n_heads} must divide d_model={d_model} and be a multiple of n_kv_heads={n_kv_heads}"
        )
    if d_model // n_heads % 2:
        raise UserError(
            f"config.json: d_model={d_model} over n_heads={n_heads} is an odd head width, which rotary positions cannot halve"
        )


@dataclass(frozen=True, kw_only=True)
class Rope:
    """``scaling`` is what a checkpoint says beyond theta, None where it says nothing."""

    theta: Positive
    scaling: LinearScaling | Llama3Scaling | None = None


@dataclass(frozen=True, kw_only=True)
class LinearScaling:
    """Every frequency divided by ``factor`` (position interpolation, arXiv 2306.15595)."""

    factor: Positive


@dataclass(frozen=True, kw_only=True)
class Llama3Scaling:
    """Llama 3.1's: long wavelengths are stretched by ``factor``, short ones kept, those between interpolated."""

    factor: Positive
    low_freq_factor: Positive
    high_freq_factor: Positive
    original_max_position_embeddings: Rows

    def __post_init__(self) -> None:
        require(
            self.low_freq_factor < self.high_freq_factor,
            f"config.json has low_freq_factor={self.low_freq_factor} and high_freq_factor={self.high_freq_factor}: the "
            "second must be larger",
        )


def read_rope(raw: Mapping[str, Any]) -> Rope:
    """From ``rope_theta`` and ``rope_scaling``, or from ``rope_parameters``, which replaced the two in transformers 5."""
    scaling = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    if not isinstance(scaling, Mapping):
        raise UserError(f"config.json has rope_scaling={scaling!r}: give an object, or null")
    theta = scaling if scaling.get("rope_theta") is not None else raw
    require_fields(theta, ("rope_theta",))
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if scaling.get("partial_rotary_factor") not in (None, 1, 1.0):
        raise UserError(
            f"config.json has partial_rotary_factor={scaling['partial_rotary_factor']!r}; only 1.0 is implemented"
        )
    rope = Rope(**read_numbers(Rope, theta, {"theta": "rope_theta"}))
    if kind == "default":
        return rope
    kinds: dict[object, Any] = {"linear": LinearScaling, "llama3": Llama3Scaling}
    if not isinstance(kind, str) or kind not in kinds:
        raise UserError(f"config.json has rope_type={kind!r}; only 'default', 'linear' and 'llama3' are implemented")
    names = {name: name for name in knobs_of(kinds[kind])}
    require_fields(scaling, names)
    return replace(rope, scaling=kinds[kind](**read_numbers(kinds[kind], scaling, names)))
