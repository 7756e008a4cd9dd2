"""Architecture of a block-diffusion checkpoint, read strictly from its published config.json; no torch.

LLaDA2 (2.0 and 2.1, mini and flash), SDAR (dense) and Fast-dLLM v2. Tokens of a block see each other and all blocks before.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, TypeAlias

from engines.errors import UserError, require
from engines.knobs import Range
from engines.models.checkpoint import checkpoint_dir, published_config
from engines.models.config import (
    DECODER_SIZES,
    IMPLEMENTED,
    PUBLISHED,
    Heads,
    Hidden,
    Layers,
    Positive,
    Rope,
    Rows,
    Width,
    decoder_fields,
    plain_rope,
    read_numbers,
    refuse_unsupported,
    require_fields,
    token_id,
)

BlockFamily: TypeAlias = Literal["llada2", "sdar", "fast-dllm-v2"]
BlockLength = Annotated[int, Range(1, 4096)]
_Count = Annotated[int, Range(1, 2**16)]

_DECODER = IMPLEMENTED["decoders"] | IMPLEMENTED["block"]


class _Published(NamedTuple):
    """What is said of a family beside its config.json, where the ids of special tokens and the block may be missing."""

    family: BlockFamily
    block_field: str | None
    block_length: int
    mask_token_id: int
    implemented: Mapping[str, Sequence[Any]]


_FAMILIES = {
    "llada2_moe": _Published("llada2", None, 32, 156895, IMPLEMENTED["decoders"] | IMPLEMENTED["llada2"]),
    "sdar": _Published("sdar", "block_size", 4, 151669, _DECODER),
    "Fast_dLLM_Qwen": _Published("fast-dllm-v2", "bd_size", 32, 151665, {**_DECODER, "attention_bias": (True, None)}),
}
BLOCK_TYPES = tuple(_FAMILIES)
"""Values of ``model_type`` that ``BlockConfig.from_dict`` accepts, spelt as published."""


@dataclass(frozen=True, kw_only=True)
class ExpertsConfig:
    """A mixture of experts behind a router that is limited to some groups of them (LLaDA2)."""

    num_experts: _Count
    experts_per_token: _Count
    num_groups: _Count
    groups_per_token: _Count
    scaling: Positive
    """What the chosen experts' weights sum to."""
    expert_hidden: Hidden
    shared_hidden: Hidden
    """Hidden width of the expert every token gets."""
    dense_layers: Annotated[int, Range(0, 1024)]
    """The first so many layers have an MLP of ``mlp_hidden_size`` instead."""

    def __post_init__(self) -> None:
        experts, groups = self.num_experts, self.num_groups
        require(
            experts % groups == 0 and experts // groups >= 2,
            f"config.json: n_group={groups} must divide num_experts={experts} into groups of two at least",
        )
        require(
            self.groups_per_token <= groups and self.experts_per_token <= self.groups_per_token * (experts // groups),
            f"config.json: topk_group={self.groups_per_token} of n_group={groups} hold fewer experts than "
            f"num_experts_per_tok={self.experts_per_token}",
        )


@dataclass(frozen=True, kw_only=True)
class BlockConfig:
    o_bias: ClassVar[bool] = False
    mlp_bias: ClassVar[bool] = False

    family: BlockFamily
    d_model: Width
    n_layers: Layers
    n_heads: Heads
    n_kv_heads: Heads
    head_dim: Width
    rotary_dim: Width
    """Dimensions of a head that are rotated, its first."""
    mlp_hidden_size: Hidden
    vocab_size: Rows
    """Rows of the embedding and of the head, padding rows included."""
    max_sequence_length: Rows
    rope: Rope
    rms_norm_eps: Positive
    mask_token_id: int
    """The id a place without a token is computed with."""
    eos_token_id: int
    """The first where a checkpoint has several."""
    block_length: BlockLength
    """What it was trained with."""
    experts: ExpertsConfig | None = None
    weight_tying: bool = False

    def __post_init__(self) -> None:
        require(
            self.n_heads % self.n_kv_heads == 0,
            f"config.json: num_attention_heads={self.n_heads} must be a multiple of num_key_value_heads={self.n_kv_heads}",
        )
        require(
            self.rotary_dim % 2 == 0 and 0 < self.rotary_dim <= self.head_dim,
            f"config.json: {self.rotary_dim} of head_dim={self.head_dim} are rotated, which must be an even part of it",
        )

    @property
    def shifts_logits(self) -> bool:
        """Row i of the logits predicts the token at i + 1, not at i."""
        return self.family == "fast-dllm-v2"

    @property
    def qkv_bias(self) -> bool:
        return self.family == "fast-dllm-v2"

    @property
    def qk_norm(self) -> bool:
        return self.family != "fast-dllm-v2"

    @staticmethod
    def from_dict(raw: Mapping[str, Any]) -> "BlockConfig":
        """Unknown keys are ignored, unsupported values refused."""
        kind = raw.get("model_type")
        published = _FAMILIES.get(kind) if isinstance(kind, str) else None
        if published is None:
            mixture = ", SDAR's mixture of experts, which is not implemented" if kind == "sdar_moe" else ""
            raise UserError(
                f"config.json has model_type={kind!r}{mixture}: give a checkpoint of type {' or '.join(BLOCK_TYPES)}"
            )
        is_moe = published.family == "llada2"
        has_pad_alone = raw.get("eos_token_id") is None and raw.get("pad_token_id") is not None
        end = "pad_token_id" if has_pad_alone else "eos_token_id"
        require_fields(raw, (*DECODER_SIZES.values(), "rms_norm_eps", end))
        refuse_unsupported(raw, published.implemented)
        fields = decoder_fields(BlockConfig, raw)
        d_model, n_heads, vocab_size = fields["d_model"], fields["n_heads"], fields["vocab_size"]
        require(
            raw.get("head_dim") is not None or d_model % n_heads == 0,
            f"config.json: num_attention_heads={n_heads} must divide hidden_size={d_model}, or give head_dim",
        )
        sizes: dict[str, Any] = {
            "n_kv_heads": n_heads,
            "head_dim": d_model // n_heads,
            "block_length": published.block_length,
        }
        names = {"n_kv_heads": "num_key_value_heads", "head_dim": "head_dim", "block_length": published.block_field}
        sizes |= read_numbers(BlockConfig, raw, {ours: name for ours, name in names.items() if name is not None})
        ends = raw[end]
        special = {
            "mask_token_id": published.mask_token_id if raw.get("mask_token_id") is None else raw["mask_token_id"],
            "eos_token_id": ends[0] if isinstance(ends, list) and ends else ends,
        }
        raw, rope = _read_rope(raw, rotates_parts=is_moe)
        return BlockConfig(
            **fields,
            **sizes,
            mask_token_id=token_id(special, "mask_token_id", vocab_size),
            eos_token_id=token_id(special, "eos_token_id", vocab_size),
            family=published.family,
            rotary_dim=_rotary_dim(raw, sizes["head_dim"]) if is_moe else sizes["head_dim"],
            rope=rope,
            experts=_read_experts(raw) if is_moe else None,
        )


def _read_rope(raw: Mapping[str, Any], *, rotates_parts: bool) -> tuple[Mapping[str, Any], Rope]:
    """Plain positions alone. In ``rope_parameters`` the rotated share of a head may stand too: it is moved to where it was before."""
    given = raw.get("rope_parameters")
    if rotates_parts and isinstance(given, Mapping):
        share = given.get("partial_rotary_factor")
        if share is not None:
            require(
                raw.get("partial_rotary_factor") in (None, share),
                f"config.json has partial_rotary_factor={raw.get('partial_rotary_factor')!r} and {share!r} in rope_parameters: "
                "correct one of them",
            )
            own = {name: value for name, value in given.items() if name != "partial_rotary_factor"}
            raw = {**raw, "partial_rotary_factor": share, "rope_parameters": own}
    return raw, plain_rope(raw)


def _rotary_dim(raw: Mapping[str, Any], head_dim: int) -> int:
    share = raw.get("partial_rotary_factor", 1.0)
    require(
        type(share) in (int, float) and 0 < share <= 1,
        f"config.json has partial_rotary_factor={share!r}: give a share of the head, above 0 and at most 1",
    )
    found = int(head_dim * share)
    require(
        raw.get("rotary_dim") in (None, found),
        f"config.json has rotary_dim={raw.get('rotary_dim')!r} and partial_rotary_factor={share!r} of head_dim={head_dim}: "
        "correct one of them",
    )
    return found


def _read_experts(raw: Mapping[str, Any]) -> ExpertsConfig:
    names = PUBLISHED["names"]["experts"]
    require_fields(raw, (*names.values(), "num_shared_experts"))
    numbers = read_numbers(ExpertsConfig, raw, names)
    shared = raw["num_shared_experts"]
    require(
        type(shared) is int and shared >= 1,
        f"config.json has num_shared_experts={shared!r}; only one or more are implemented",
    )
    return ExpertsConfig(**numbers, shared_hidden=shared * numbers["expert_hidden"])


def read_block_config(directory: Path) -> BlockConfig:
    return BlockConfig.from_dict(published_config(directory, "LLaDA2, SDAR or Fast-dLLM v2"))


def _published(raw: Mapping[str, Any]) -> BlockConfig:
    own = dict(raw)
    rope = Rope(theta=own.pop("rope_theta"))
    experts = own.pop("experts", None)
    return BlockConfig(**own, rope=rope, experts=experts and ExpertsConfig(**experts))


BLOCK_SHAPES: Mapping[str, BlockConfig] = {name: _published(raw) for name, raw in PUBLISHED["block"].items()}
"""Full-size shapes that need no download with random weights. LLaDA2.0 and 2.1 have 16,255,643,392 parameters (mini) and
102,889,705,216 (flash), SDAR-8B 8,190,735,360 and Fast-dLLM v2 7B 7,615,616,512."""
SMALL_BLOCKS: Mapping[str, BlockConfig] = {name: _published(raw) for name, raw in PUBLISHED["small block"].items()}
"""Small models of each family with random weights, whose steps a CPU core runs in milliseconds."""


def block_config(model: str, *, known: Iterable[str] = BLOCK_SHAPES) -> BlockConfig:
    """The config of a shape's name (``BLOCK_SHAPES``), a directory or a hub id; ``known`` are names that a refusal tells."""
    found = BLOCK_SHAPES.get(model.lower())
    return read_block_config(checkpoint_dir(model, weights=False, known=known)) if found is None else found
