"""Architecture of a LLaDA checkpoint, read strictly from its published config.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

from engines.errors import UserError
from engines.models.config import ModelConfig
from engines.models.config_fields import (
    check_heads,
    flag,
    positive_float,
    positive_int,
    refuse_unsupported,
    require_fields,
    token_id,
)

# The upstream config class carries GPT-2-like defaults (768 wide, vocabulary 50257, learned positions, tied weights);
# falling back to them would serve a wrong model silently, so these fields must be present.
_REQUIRED = (
    "d_model",
    "n_layers",
    "n_heads",
    "vocab_size",
    "max_sequence_length",
    "rope_theta",
    "rms_norm_eps",
    "mask_token_id",
    "eos_token_id",
    "rope",
    "block_type",
    "layer_norm_type",
    "activation_type",
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
    "rope": True,
    "rope_full_precision": True,
    "alibi": False,
    "layer_norm_type": "rms",
    "layer_norm_with_affine": True,
    "attention_layer_norm": False,
    "bias_for_layer_norm": False,
    "block_type": "llama",
    "block_group_size": 1,
    "activation_type": "silu",
    "include_bias": False,
    "include_qkv_bias": False,
    "scale_logits": False,
    "input_emb_norm": False,
    "attention_dropout": 0.0,
    "embedding_dropout": 0.0,
    "residual_dropout": 0.0,
}


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
        d_model, n_heads = positive_int(raw, "d_model"), positive_int(raw, "n_heads")
        n_kv_heads = n_heads if raw.get("n_kv_heads") is None else positive_int(raw, "n_kv_heads")
        check_heads(n_heads, n_kv_heads, d_model)
        if raw.get("mlp_hidden_size") is not None:
            hidden = positive_int(raw, "mlp_hidden_size")
        else:
            hidden = d_model * (4 if raw.get("mlp_ratio") is None else positive_int(raw, "mlp_ratio"))
        vocab_size = positive_int(raw, "vocab_size")
        if raw.get("embedding_size") is not None:
            vocab_size = positive_int(raw, "embedding_size")
        eos = token_id(raw, "eos_token_id", vocab_size)
        return LLaDAConfig(
            d_model=d_model,
            n_layers=positive_int(raw, "n_layers"),
            n_heads=n_heads,
            n_kv_heads=n_kv_heads,
            mlp_hidden_size=hidden,
            vocab_size=vocab_size,
            max_sequence_length=positive_int(raw, "max_sequence_length"),
            rope_theta=positive_float(raw, "rope_theta"),
            rms_norm_eps=positive_float(raw, "rms_norm_eps"),
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
