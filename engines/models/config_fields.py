"""Strict reading of a parsed ``config.json``: nothing assumed, nothing unsupported passed over."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from engines.errors import UserError
from engines.knobs import knobs_of

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
    layer_types = set(raw.get("layer_types") or ()) - {"full_attention"}
    if layer_types:
        raise UserError(f"config.json has layer_types={sorted(layer_types)}; only 'full_attention' is implemented")
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
    return {field: knobs[field]._replace(name=names[field]).taken(value, prefix=SAID) for field, value in given.items()}


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
