"""The configuration of a diffusion language model, under one set of names, and those of LLaDA and Dream; no torch.

We read a parsed ``config.json`` strictly, its rotary positions included: we assume nothing and refuse what we do not support.

The dimensions alone say how a model is divided among ranks. Attention is divided by KV head, each with its query heads; the MLP by
hidden unit; embedding and output head by vocabulary id. Norms are whole on every rank.
"""

import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar

from engines.errors import UserError, require
from engines.knobs import Range, check_value, knobs_of

Width = Annotated[int, Range(1, 2**17)]
Layers = Annotated[int, Range(1, 1024)]
Heads = Annotated[int, Range(1, 4096)]
Hidden = Annotated[int, Range(1, 2**20)]
Rows = Annotated[int, Range(1, 2**24)]
"""Rows of a vocabulary, or positions."""
Positive = Annotated[float, Range(above=0, most=1e30)]
PUBLISHED: Mapping[str, Mapping[str, Any]] = json.loads(
    Path(__file__).with_name("published.json").read_text(encoding="utf-8")
)
"""Dimensions of published checkpoints, and of small ones like them: kind -> name -> fields of the kind's class."""


@dataclass(frozen=True, kw_only=True)
class ModelConfig(ABC):
    """Fields are named as LLaDA publishes them (OLMo's names, not Llama's)."""

    family: ClassVar[str]
    """'llada' or 'dream': names the chat format and the decoding conventions."""
    shifts_logits: ClassVar[bool]
    """Whether row i of ``DiffusionModel.logits`` predicts the token at i + 1, not at i. The decoder shifts."""
    qkv_bias: ClassVar[bool]

    d_model: Width
    n_layers: Layers
    n_heads: Heads
    n_kv_heads: Heads
    mlp_hidden_size: Hidden
    vocab_size: Rows
    """Rows of the embedding and of the head, padding rows included."""
    max_sequence_length: Rows
    rope_theta: Positive
    rms_norm_eps: Positive
    mask_token_id: int
    eos_token_id: int
    pad_token_id: int
    weight_tying: bool = False

    @property
    def head_dim(self) -> int:
        return self.d_model // self.n_heads

    @abstractmethod
    def to_dict(self) -> dict[str, Any]:
        """The published layout of ``config.json``."""


DECODER_SIZES: Mapping[str, str] = PUBLISHED["names"]["decoders"]
"""Our names of a decoder's sizes -> those that Qwen, Llama, Mistral and Dream publish."""
LAYERS = ("full_attention", "sliding_attention")
"""Layer types that ``sliding_window`` knows."""
SAID = "config.json: "
"""Prefix of errors about a config.json."""
IMPLEMENTED: Mapping[str, dict[str, Sequence[Any]]] = PUBLISHED["implemented"]
"""Kind of model -> field -> the only values that the modules here compute, the usual one first.

``hidden_act`` has two names for one function. The size of a window has no effect without ``use_sliding_window``. Dream's q, k and v have
a bias even if the field is absent.
"""


def decoder_fields(
    kind: type, raw: Mapping[str, Any], *, layers: Sequence[str] = ("full_attention",)
) -> dict[str, Any]:
    """Read the fields that Qwen, Llama, Mistral and Dream publish alike, by our names; ``layers`` are the supported layer types."""
    layer_types(raw, layers)
    return {
        **read_numbers(kind, raw, {**DECODER_SIZES, "rms_norm_eps": "rms_norm_eps"}),
        "weight_tying": flag(raw, "tie_word_embeddings"),
    }


def sliding_window(raw: Mapping[str, Any], num_layers: int, *, always: bool = False) -> int | None:
    """Return the most tokens that a query of some layer sees, itself included; None if every layer sees all.

    ``always`` is for Mistral, whose window is in use and has 4,096 tokens unless the config says otherwise. Qwen has a window
    only with ``use_sliding_window``, from layer ``max_window_layers`` on.
    """
    types = layer_types(raw, LAYERS)
    require(
        types is None or len(types) == num_layers,
        f"config.json has {len(types or ())} layer_types and num_hidden_layers={num_layers}: give one a layer, or null",
    )
    is_used = always or flag(raw, "use_sliding_window")
    needed = {"sliding_window"} if types is not None else {"sliding_window", "max_window_layers"}
    missing = sorted(name for name in needed if name not in raw)
    require(
        always or not is_used or not missing,
        f"config.json has use_sliding_window=True and lacks {', '.join(missing)}: say which layers have which window",
    )
    window, first = raw.get("sliding_window", 4096), raw.get("max_window_layers")
    for name, value, least in (("sliding_window", window, 1), ("max_window_layers", first, 0)):
        require(
            value is None or (type(value) is int and value >= least),
            f"config.json has {name}={value!r}: give a whole number from {least} on, or null",
        )
    window = window if is_used else None
    if types is None:
        return window if always or (first or 0) < num_layers else None
    slides = "sliding_attention" in types
    require(
        not slides or window is not None,
        "config.json has layer_types with 'sliding_attention' and no sliding_window in use: correct one of them",
    )
    return window if slides else None


def layer_types(raw: Mapping[str, Any], implemented: Sequence[str]) -> Sequence[str] | None:
    types = raw.get("layer_types")
    if types is None:
        return None
    if not isinstance(types, list | tuple):
        raise UserError(f"config.json has layer_types={types!r}: give a list of one type a layer, or null")
    others = sorted({repr(kind) for kind in types if kind not in implemented})
    if others:
        names = " and ".join(map(repr, implemented))
        raise UserError(f"config.json has layer_types=[{', '.join(others)}]; only {names} is implemented")
    return types


def require_fields(raw: Mapping[str, Any], names: Iterable[str]) -> None:
    missing = [name for name in names if raw.get(name) is None]
    require(not missing, f"config.json lacks {', '.join(missing)}: add the architecture's fields")


def refuse_unsupported(raw: Mapping[str, Any], implemented: Mapping[str, Sequence[Any]]) -> None:
    """Raise UserError for a value that is not ``implemented``, which is an entry of ``IMPLEMENTED``."""
    for name, allowed in implemented.items():
        if name in raw and raw[name] not in allowed:
            raise UserError(f"config.json has {name}={raw[name]!r}; only {allowed[0]!r} is implemented")


def read_numbers(kind: type, raw: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """Read fields by their published names, and check their declared ranges. Fields that are absent or null are left out."""
    knobs = knobs_of(kind)
    given = {field: raw[name] for field, name in names.items() if raw.get(name) is not None}
    return {field: knobs[field]._replace(name=names[field]).check(value, prefix=SAID) for field, value in given.items()}


def token_id(raw: Mapping[str, Any], name: str, vocab_size: int) -> int:
    value = raw[name]
    if type(value) is not int or not 0 <= value < vocab_size:
        raise UserError(f"config.json has {name}={value!r}: give one id below the {vocab_size} vocabulary rows")
    return value


def flag(raw: Mapping[str, Any], name: str) -> bool:
    """Return the value of a true or false field; False if it is absent or null."""
    value = raw.get(name)
    require(value in (True, False, None), f"config.json has {name}={value!r}: give true or false")
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
    """Rotary positions; ``scaling`` is None if a checkpoint gives theta alone."""

    theta: Positive
    scaling: "LinearScaling | Llama3Scaling | None" = None


@dataclass(frozen=True, kw_only=True)
class LinearScaling:
    """Every frequency divided by ``factor`` (position interpolation, arXiv 2306.15595)."""

    factor: Positive


@dataclass(frozen=True, kw_only=True)
class Llama3Scaling:
    """Llama 3.1's scaling: it stretches long wavelengths by ``factor``, keeps short ones, and interpolates between."""

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


def read_rope(raw: Mapping[str, Any], *, default_theta: float | None = None) -> Rope:
    """Read rotary positions from ``rope_theta`` and ``rope_scaling``, or from ``rope_parameters``, their successor in transformers 5.

    ``default_theta`` is the theta of a family whose published configs lack it.
    """
    ropes = [_rope_of(raw, name, default_theta) for name in ("rope_parameters", "rope_scaling") if raw.get(name)]
    if len(ropes) == 2 and ropes[0] != ropes[1]:
        raise UserError("config.json has rope_parameters and a rope_scaling that differ: correct one of them")
    return ropes[0] if ropes else _rope_of(raw, None, default_theta)


def plain_rope(raw: Mapping[str, Any]) -> Rope:
    """Like ``read_rope``, but raises UserError if the positions are scaled."""
    rope = read_rope(raw)
    if rope.scaling is not None:
        name = "rope_parameters" if raw.get("rope_parameters") else "rope_scaling"
        raise UserError(f"config.json has {name}={raw[name]!r}; only positions that nothing scales are implemented")
    return rope


def _rope_of(raw: Mapping[str, Any], name: str | None, default_theta: float | None) -> Rope:
    scaling = {} if name is None else raw[name]
    if not isinstance(scaling, Mapping):
        raise UserError(f"config.json has {name}={scaling!r}: give an object, or null")
    source = scaling if scaling.get("rope_theta") is not None else raw
    if default_theta is None:
        require_fields(source, ("rope_theta",))
    rope = Rope(**{"theta": default_theta} | read_numbers(Rope, source, {"theta": "rope_theta"}))
    if scaling.get("partial_rotary_factor") not in (None, 1, 1.0):
        raise UserError(
            f"config.json has partial_rotary_factor={scaling['partial_rotary_factor']!r}; only 1.0 is implemented"
        )
    kind, *others = [scaling[key] for key in ("rope_type", "type") if scaling.get(key) is not None] or ["default"]
    if others not in ([], [kind]):
        raise UserError(f"config.json has rope_type={kind!r} and type={others[0]!r}: correct one of them")
    if kind == "default":
        return rope
    kinds: dict[object, Any] = {"linear": LinearScaling, "llama3": Llama3Scaling}
    if not isinstance(kind, str) or kind not in kinds:
        raise UserError(
            f"config.json has rope_type={kind!r}; only 'default', 'linear' and 'llama3' are implemented "
            f"({name}={dict(scaling)!r})"
        )
    names = {key: key for key in knobs_of(kinds[kind])}
    require_fields(scaling, names)
    parsed = kinds[kind](**read_numbers(kinds[kind], scaling, names))
    return rope if parsed == LinearScaling(factor=1.0) else replace(rope, scaling=parsed)


def span(length: int, rank: int, size: int) -> tuple[int, int]:
    """Return (start, end) of a rank's part of ``length``. Parts differ by one at most, and lie in the ranks' order."""
    return rank * length // size, (rank + 1) * length // size


def check_division(config: ModelConfig, size: int) -> None:
    """Raise UserError if the model's heads cannot be divided among so many ranks."""
    require(size >= 1, f"tensor_parallel={size} must be at least 1")
    fits = [n for n in range(1, config.n_kv_heads + 1) if config.n_kv_heads % n == config.n_heads % n == 0]
    for field in ("n_kv_heads", "n_heads"):
        if getattr(config, field) % size:
            raise UserError(
                f"tensor_parallel={size} does not divide the model's {field}={getattr(config, field)}: "
                f"use one of {', '.join(map(str, fits))}"
            )


# The upstream config class carries GPT-2-like defaults (768 wide, vocabulary 50257, learned positions, tied weights).
# Falling back to them would serve a wrong model silently, so these fields must be present.
_LLADA_NUMBERS = ("d_model", "n_layers", "n_heads", "vocab_size", "max_sequence_length", "rope_theta", "rms_norm_eps")
_LLADA_REQUIRED = (
    *_LLADA_NUMBERS,
    *("mask_token_id", "eos_token_id"),
    *("rope", "block_type", "layer_norm_type", "activation_type"),
)

_LLADA_CONSTANT = {
    "architectures": ["LLaDAModelLM"],
    "model_type": "llada",
    "mlp_ratio": 4,
    **{name: allowed[0] for name, allowed in IMPLEMENTED["llada"].items() if allowed[0] is not None},
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
    def from_dict(raw: Mapping[str, Any]) -> "LLaDAConfig":
        """Build from a parsed ``config.json``; unknown keys are ignored, unsupported values refused."""
        require_fields(raw, _LLADA_REQUIRED)
        refuse_unsupported(raw, IMPLEMENTED["llada"])
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


LLADA_8B = LLaDAConfig(**PUBLISHED["diffusion"]["llada-8b"])
"""LLaDA-8B-Instruct, from its published config.json (8,015,581,184 parameters)."""


# The upstream config class has defaults of a different model (4096 wide, 32 layers, theta 10000).
_DREAM_REQUIRED = (*DECODER_SIZES.values(), "num_key_value_heads", "rope_theta", "rms_norm_eps")


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
    def from_dict(raw: Mapping[str, Any], generation: Mapping[str, Any] | None = None) -> "DreamConfig":
        """Build from parsed ``config.json`` and ``generation_config.json``.

        Special tokens missing from the first (or null there) are looked up in the second. Unknown
        keys are ignored, unsupported values refused.
        """
        require_fields(
            raw, (name for name in _DREAM_REQUIRED if name != "rope_theta" or not raw.get("rope_parameters"))
        )
        refuse_unsupported(raw, IMPLEMENTED["decoders"] | IMPLEMENTED["dream"])
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


DREAM_7B = DreamConfig(**PUBLISHED["diffusion"]["dream-7b"])
"""Dream-v0-7B, Base and Instruct (7,615,616,512 parameters).

Served checkpoints use their own config.json; this one only sizes random weights and estimates.
"""
