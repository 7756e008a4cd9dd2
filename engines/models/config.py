"""Architecture of a LLaDA checkpoint, read strictly from its published config.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from engines.errors import UserError

# The upstream config class carries GPT-2-like defaults (768 wide, vocabulary 50257, tied weights);
# falling back to them would serve a wrong model silently, so these fields must be present.
_REQUIRED = ("d_model", "n_layers", "n_heads", "vocab_size", "max_sequence_length", "rope_theta",
             "rms_norm_eps", "mask_token_id", "eos_token_id")  # fmt: skip

# field -> the only values implemented; any other value in a checkpoint is refused, never ignored.
_FIXED: dict[str, tuple[Any, ...]] = {
    "rope": (True,),
    "alibi": (False, None),
    "layer_norm_type": ("rms",),
    "block_type": ("llama",),
    "block_group_size": (1, None),
    "activation_type": ("silu", "swiglu"),
    "attention_layer_norm": (False, None),
    "bias_for_layer_norm": (False, None),
    "include_bias": (False, None),
    "include_qkv_bias": (False, None),
    "scale_logits": (False, None),
    "input_emb_norm": (False, None),
}


@dataclass(frozen=True, kw_only=True)
class LLaDAConfig:
    """Field names follow the published LLaDA configuration (OLMo's, not Llama's)."""

    d_model: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    mlp_hidden_size: int
    vocab_size: int
    """Rows of the embedding and of the head (``embedding_size`` of the checkpoint if it is set)."""
    max_sequence_length: int
    rope_theta: float
    rms_norm_eps: float
    mask_token_id: int
    eos_token_id: int
    pad_token_id: int
    weight_tying: bool = False

    @property
    def head_dim(self) -> int:
        return self.d_model // self.n_heads

    @staticmethod
    def from_dict(raw: Mapping[str, Any]) -> LLaDAConfig:
        """Build from a parsed ``config.json``; unknown keys are ignored, unsupported values refused."""
        if raw.get("model_type") != "llada":
            raise UserError(f"model_type {raw.get('model_type')!r} is not 'llada': give a LLaDA checkpoint")
        missing = [name for name in _REQUIRED if raw.get(name) is None]
        if missing:
            raise UserError(f"config.json lacks {', '.join(missing)}: add the architecture's fields")
        for name, allowed in _FIXED.items():
            if name in raw and raw[name] not in allowed:
                raise UserError(f"config.json has {name}={raw[name]!r}; only {allowed[0]!r} is implemented")
        n_heads = int(raw["n_heads"])
        d_model = int(raw["d_model"])
        n_kv_heads = n_heads if raw.get("n_kv_heads") is None else int(raw["n_kv_heads"])
        if d_model % n_heads or n_heads % n_kv_heads:
            raise UserError(
                f"config.json: n_heads={n_heads} must divide d_model={d_model} and be a multiple of n_kv_heads={n_kv_heads}"
            )
        hidden = raw.get("mlp_hidden_size")
        eos = int(raw["eos_token_id"])
        pad = raw.get("pad_token_id")
        return LLaDAConfig(
            d_model=d_model,
            n_layers=int(raw["n_layers"]),
            n_heads=n_heads,
            n_kv_heads=n_kv_heads,
            mlp_hidden_size=int(raw.get("mlp_ratio", 4)) * d_model if hidden is None else int(hidden),
            vocab_size=int(raw.get("embedding_size") or raw["vocab_size"]),
            max_sequence_length=int(raw["max_sequence_length"]),
            rope_theta=float(raw["rope_theta"]),
            rms_norm_eps=float(raw["rms_norm_eps"]),
            mask_token_id=int(raw["mask_token_id"]),
            eos_token_id=eos,
            pad_token_id=eos if pad is None else int(pad),
            weight_tying=bool(raw.get("weight_tying", False)),
        )

    def to_dict(self) -> dict[str, Any]:
        """The published layout of ``config.json``, complete enough for the upstream class to read."""
        return {
            "architectures": ["LLaDAModelLM"], "model_type": "llada",
            "d_model": self.d_model, "n_layers": self.n_layers, "n_heads": self.n_heads,
            "n_kv_heads": self.n_kv_heads, "mlp_hidden_size": self.mlp_hidden_size, "mlp_ratio": 4,
            "vocab_size": self.vocab_size, "embedding_size": self.vocab_size,
            "max_sequence_length": self.max_sequence_length,
            "rope": True, "rope_theta": self.rope_theta, "rope_full_precision": True, "alibi": False,
            "layer_norm_type": "rms", "rms_norm_eps": self.rms_norm_eps, "layer_norm_with_affine": True,
            "attention_layer_norm": False, "bias_for_layer_norm": False,
            "block_type": "llama", "block_group_size": 1, "activation_type": "silu",
            "include_bias": False, "include_qkv_bias": False, "weight_tying": self.weight_tying,
            "scale_logits": False, "input_emb_norm": False,
            "attention_dropout": 0.0, "embedding_dropout": 0.0, "residual_dropout": 0.0,
            "mask_token_id": self.mask_token_id, "eos_token_id": self.eos_token_id,
            "pad_token_id": self.pad_token_id,
        }  # fmt: skip


LLADA_8B = LLaDAConfig(
    d_model=4096, n_layers=32, n_heads=32, n_kv_heads=32, mlp_hidden_size=12288, vocab_size=126464,
    max_sequence_length=4096, rope_theta=500000.0, rms_norm_eps=1e-5,
    mask_token_id=126336, eos_token_id=126081, pad_token_id=126081,
)  # fmt: skip
"""LLaDA-8B-Instruct, from its published config.json (8,015,581,184 parameters)."""
