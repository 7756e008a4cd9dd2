"""Architecture of a LLaDA checkpoint, read strictly from its published config.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Annotated, Any, ClassVar

from engines.errors import UserError
from engines.knobs import Range, check_value
from engines.models.config import ModelConfig
from engines.models.config_fields import check_heads, flag, read_numbers, refuse_unsupported, require_fields, token_id

# The upstream config class carries GPT-2-like defaults (768 wide, vocabulary 50257, learned positions, tied weights);
# falling back to them would serve a wrong model silently, so these fields must be present.
_NUMBERS = ("d_model", "n_layers", "n_heads", "vocab_size", "max_sequence_length", "rope_theta", "rms_norm_eps")
_REQUIRED = (
    *_NUMBERS,
    *("mask_token_id", "eos_token_id"),
    *("rope", "block_type", "layer_norm_type", "activation_type"),
)

_IMPLEMENTED: dict[str, tuple[Any, ...]] = {
    "rope": (True,),
    "rope_full_precision": (True, None),
    "alibi": (False, None),
    "layer_norm_type": ("rms",),
    "layer_norm_with_affine": (True, None),
    "block_type": ("llama",),
    "block_group_size": (1, None),
    "activation_type": ("silu", "swiglu"),
    "multi_query_attention": (False, None),
    "clip_qkv": (None,),
    "attention_layer_norm": (False, None),
    "bias_for_layer_norm": (False, None),
    "include_bias": (False, None),
    "include_qkv_bias": (False, None),
    "scale_logits": (False, None),
    "input_emb_norm": (False, None),
    "quantization_config": (None,),
}

_CONSTANT = {
    "architectures": ["LLaDAModelLM"],
    "model_type": "llada",
    "mlp_ratio": 4,
    **{name: allowed[0] for name, allowed in _IMPLEMENTED.items() if allowed[0] is not None},
    **dict.fromkeys(("attention_dropout", "embedding_dropout", "residual_dropout"), 0.0),
}

Ratio = Annotated[int, Range(1, 1024)]
"""Width of the MLP over that of the model."""


@dataclass(frozen=True, kw_only=True)
class LLaDAConfig(ModelConfig):
    family: ClassVar[str] = "llada"
    shifts_logits: ClassVar[bool] = False
    qkv_bias: ClassVar[bool] = False

    @staticmethod
    def from_dict(raw: Mapping[str, Any]) -> LLaDAConfig:
        """Build from a parsed ``config.json``; unknown keys are ignored, unsupported values refused."""
        if raw.get("model_type") != "llada":
            raise UserError(f"model_type {raw.get('model_type')!r} is not 'llada': give a LLaDA checkpoint")
        require_fields(raw, _REQUIRED)
        refuse_unsupported(raw, _IMPLEMENTED)
        names = {name: name for name in (*_NUMBERS, "n_kv_heads", "mlp_hidden_size")}
        numbers = read_numbers(LLaDAConfig, raw, names)
        numbers |= read_numbers(LLaDAConfig, raw, {"vocab_size": "embedding_size"})
        numbers.setdefault("n_kv_heads", numbers["n_heads"])
        if "mlp_hidden_size" not in numbers:
            ratio = 4 if raw.get("mlp_ratio") is None else raw["mlp_ratio"]
            check_value(Ratio, "config.json: mlp_ratio", ratio)
            numbers["mlp_hidden_size"] = numbers["d_model"] * ratio
        check_heads(numbers["n_heads"], numbers["n_kv_heads"], numbers["d_model"])
        vocab_size = numbers["vocab_size"]
        eos = token_id(raw, "eos_token_id", vocab_size)
        return LLaDAConfig(
            **numbers,
            mask_token_id=token_id(raw, "mask_token_id", vocab_size),
            eos_token_id=eos,
            pad_token_id=eos if raw.get("pad_token_id") is None else token_id(raw, "pad_token_id", vocab_size),
            weight_tying=flag(raw, "weight_tying"),
        )

    def to_dict(self) -> dict[str, Any]:
        """Complete enough for the upstream class to read."""
        return {**_CONSTANT, **asdict(self), "embedding_size": self.vocab_size}


LLADA_8B = LLaDAConfig(
    d_model=4096,
    n_layers=32,
    n_heads=32,
    n_kv_heads=32,
    mlp_hidden_size=12288,
    vocab_size=126464,
    max_sequence_length=4096,
    rope_theta=500000.0,
    rms_norm_eps=1e-5,
    mask_token_id=126336,
    eos_token_id=126081,
    pad_token_id=126081,
)
"""LLaDA-8B-Instruct, from its published config.json (8,015,581,184 parameters)."""
