"""Architecture of a LLaDA checkpoint, read strictly from its published config.json.

Architecture of a Dream checkpoint, read strictly from its published config.json.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Annotated, Any, ClassVar

from engines.errors import UserError
from engines.knobs import Range, check_value
from engines.models.config import (
    DECODER_SIZES,
    IMPLEMENTED_OF_DECODERS,
    ModelConfig,
    Rope,
    check_heads,
    decoder_fields,
    flag,
    plain_rope,
    read_numbers,
    refuse_unsupported,
    require_fields,
    token_id,
)

# The upstream config class carries GPT-2-like defaults (768 wide, vocabulary 50257, learned positions, tied weights);
# falling back to them would serve a wrong model silently, so these fields must be present.
_LLADA_NUMBERS = ("d_model", "n_layers", "n_heads", "vocab_size", "max_sequence_length", "rope_theta", "rms_norm_eps")
_LLADA_REQUIRED = (
    *_LLADA_NUMBERS,
    *("mask_token_id", "eos_token_id"),
    *("rope", "block_type", "layer_norm_type", "activation_type"),
)

_LLADA_IMPLEMENTED: dict[str, tuple[Any, ...]] = {
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

_LLADA_CONSTANT = {
    "architectures": ["LLaDAModelLM"],
    "model_type": "llada",
    "mlp_ratio": 4,
    **{name: allowed[0] for name, allowed in _LLADA_IMPLEMENTED.items() if allowed[0] is not None},
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
        require_fields(raw, _LLADA_REQUIRED)
        refuse_unsupported(raw, _LLADA_IMPLEMENTED)
        names = {name: name for name in (*_LLADA_NUMBERS, "n_kv_heads", "mlp_hidden_size")}
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
        return {**_LLADA_CONSTANT, **asdict(self), "embedding_size": self.vocab_size}


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


# The upstream config class has defaults of a different model (4096 wide, 32 layers, theta 10000).
_DREAM_REQUIRED = (*DECODER_SIZES.values(), "num_key_value_heads", "rope_theta", "rms_norm_eps")

_DREAM_IMPLEMENTED = {
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
        require_fields(
            raw, (name for name in _DREAM_REQUIRED if name != "rope_theta" or not raw.get("rope_parameters"))
        )
        refuse_unsupported(raw, _DREAM_IMPLEMENTED)
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
