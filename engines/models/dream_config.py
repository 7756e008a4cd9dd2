"""Architecture of a Dream checkpoint, read strictly from its published config.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from engines.errors import UserError
from engines.models.config import ModelConfig
from engines.models.config_fields import (
    DECODER_SIZES,
    IMPLEMENTED_OF_DECODERS,
    Rope,
    check_heads,
    decoder_fields,
    plain_rope,
    read_numbers,
    refuse_unsupported,
    require_fields,
    token_id,
)

# The upstream config class has defaults of a different model (4096 wide, 32 layers, theta 10000).
_REQUIRED = (*DECODER_SIZES.values(), "num_key_value_heads", "rope_theta", "rms_norm_eps")

_IMPLEMENTED = {
    **IMPLEMENTED_OF_DECODERS,
    "attention_bias": (True, None),  # q, k and v have one, whatever an absent field suggests
    "mlp_bias": (False, None),
}


@dataclass(frozen=True, kw_only=True)
class DreamConfig(ModelConfig):
    """A Qwen2.5 body without a causal mask, and its autoregressive head."""

    family: ClassVar[str] = "dream"
    shifts_logits: ClassVar[bool] = True
    qkv_bias: ClassVar[bool] = True
    o_bias: ClassVar[bool] = False
    mlp_bias: ClassVar[bool] = False
    qk_norm: ClassVar[bool] = False

    @staticmethod
    def from_dict(raw: Mapping[str, Any], generation: Mapping[str, Any] | None = None) -> DreamConfig:
        """Build from parsed ``config.json`` and ``generation_config.json``.

        Special tokens missing from the first (or null there) are looked up in the second. Unknown
        keys are ignored, unsupported values refused.
        """
        if raw.get("model_type") != "Dream":
            raise UserError(f"model_type {raw.get('model_type')!r} is not 'Dream': give a Dream checkpoint")
        require_fields(raw, (name for name in _REQUIRED if name != "rope_theta" or not raw.get("rope_parameters")))
        refuse_unsupported(raw, _IMPLEMENTED)
        fields = decoder_fields(DreamConfig, raw)
        fields |= read_numbers(DreamConfig, raw, {"n_kv_heads": "num_key_value_heads"})
        fields["rope_theta"] = plain_rope(raw).theta
        d_model, n_heads = fields["d_model"], fields["n_heads"]
        check_heads(n_heads, fields["n_kv_heads"], d_model)
        if raw.get("head_dim") not in (None, d_model // n_heads):
            raise UserError(
                f"config.json has head_dim={raw['head_dim']!r}; only hidden_size / num_attention_heads = {d_model // n_heads} is implemented"
            )
        special = {
            name: (generation or {}).get(name) if raw.get(name) is None else raw[name]
            for name in ("mask_token_id", "eos_token_id", "pad_token_id")
        }
        if special["pad_token_id"] is None:
            special["pad_token_id"] = special["eos_token_id"]
        missing = [name for name, value in special.items() if value is None]
        if missing:
            raise UserError(
                f"config.json and generation_config.json lack {', '.join(missing)}: add them to config.json"
            )
        return DreamConfig(
            **fields,
            mask_token_id=token_id(special, "mask_token_id", fields["vocab_size"]),
            eos_token_id=token_id(special, "eos_token_id", fields["vocab_size"]),
            pad_token_id=token_id(special, "pad_token_id", fields["vocab_size"]),
        )

    @property
    def rope(self) -> Rope:
        return Rope(theta=self.rope_theta)

    def to_dict(self) -> dict[str, Any]:
        return {
            "architectures": ["DreamModel"],
            "model_type": "Dream",
            **{published: getattr(self, ours) for ours, published in DECODER_SIZES.items()},
            "num_key_value_heads": self.n_kv_heads,
            "max_window_layers": self.n_layers,
            "rope_theta": self.rope_theta,
            "rope_scaling": None,
            "rms_norm_eps": self.rms_norm_eps,
            "hidden_act": "silu",
            "sliding_window": None,
            "use_sliding_window": False,
            "attention_dropout": 0.0,
            "tie_word_embeddings": self.weight_tying,
            "mask_token_id": self.mask_token_id,
            "eos_token_id": self.eos_token_id,
            "bos_token_id": self.eos_token_id,
            "pad_token_id": self.pad_token_id,
        }


DREAM_7B = DreamConfig(
    d_model=3584,
    n_layers=28,
    n_heads=28,
    n_kv_heads=4,
    mlp_hidden_size=18944,
    vocab_size=152064,
    max_sequence_length=131072,
    rope_theta=1000000.0,
    rms_norm_eps=1e-6,
    mask_token_id=151666,
    eos_token_id=151643,
    pad_token_id=151643,
)
"""Dream-v0-7B, Base and Instruct (7,615,616,512 parameters).

A checkpoint's own config.json is what is served; this one only sizes random weights and estimates.
"""
