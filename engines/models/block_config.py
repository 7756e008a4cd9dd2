"""Architecture of a block-diffusion checkpoint, read strictly from its published config.json; no torch.

We read LLaDA2 (2.0 and 2.1, mini and flash), SDAR (dense) and Fast-dLLM v2. Tokens of a block see each other and all blocks before.
We also read DiffusionGemma, whose block is a canvas, which may begin behind any token.
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
    LAYERS,
    PUBLISHED,
    SAID,
    Heads,
    Hidden,
    Layers,
    Positive,
    Rope,
    Rows,
    Width,
    decoder_fields,
    layer_types,
    plain_rope,
    read_numbers,
    refuse_unsupported,
    require_fields,
    token_id,
)

BlockFamily: TypeAlias = Literal["llada2", "sdar", "fast-dllm-v2", "diffusion-gemma"]
BlockLength = Annotated[int, Range(1, 4096)]
_Count = Annotated[int, Range(1, 2**16)]

_DECODER = IMPLEMENTED["decoders"] | IMPLEMENTED["block"]


class _Published(NamedTuple):
    """Values for a family whose config.json may lack the ids of special tokens and the block length."""

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
CANVAS_TYPE = "diffusion_gemma"
BLOCK_TYPES = (*_FAMILIES, CANVAS_TYPE)
"""Values of ``model_type`` that ``BlockConfig.from_dict`` accepts, spelt as published."""


@dataclass(frozen=True, kw_only=True)
class ExpertsConfig:
    """A mixture of experts behind a router that is limited to some groups of them (LLaDA2)."""

    num_experts: _Count
    experts_per_token: _Count
    num_groups: _Count
    groups_per_token: _Count
    scaling: Positive
    """The sum of the chosen experts' weights."""
    expert_hidden: Hidden
    shared_hidden: Hidden
    """Hidden width of the shared expert, which every token gets."""
    dense_layers: Annotated[int, Range(0, 1024)]
    """Number of first layers that have an MLP of ``mlp_hidden_size`` instead of experts."""

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
    """Number of a head's first dimensions that are rotated."""
    mlp_hidden_size: Hidden
    vocab_size: Rows
    """Rows of the embedding and of the head, padding rows included."""
    max_sequence_length: Rows
    rope: Rope
    rms_norm_eps: Positive
    mask_token_id: int
    """The id that stands for a place without a token."""
    eos_token_id: int
    """The first one if a checkpoint has several."""
    block_length: BlockLength
    """The block length that the model was trained with."""
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
        """Whether row i of the logits predicts the token at i + 1, not at i."""
        return self.family == "fast-dllm-v2"

    @property
    def qkv_bias(self) -> bool:
        return self.family == "fast-dllm-v2"

    @property
    def qk_norm(self) -> bool:
        return self.family != "fast-dllm-v2"

    @staticmethod
    def from_dict(raw: Mapping[str, Any]) -> "BlockConfig":
        """Build from a parsed ``config.json``; unknown keys are ignored, unsupported values refused."""
        model_type = raw.get("model_type")
        if model_type == CANVAS_TYPE:
            return CanvasConfig.from_dict(raw)
        published = _FAMILIES.get(model_type) if isinstance(model_type, str) else None
        if published is None:
            mixture = ", SDAR's mixture of experts, which is not implemented" if model_type == "sdar_moe" else ""
            raise UserError(
                f"config.json has model_type={model_type!r}{mixture}: give a checkpoint of type {' or '.join(BLOCK_TYPES)}"
            )
        is_moe = published.family == "llada2"
        has_pad_alone = raw.get("eos_token_id") is None and raw.get("pad_token_id") is not None
        eos_field = "pad_token_id" if has_pad_alone else "eos_token_id"
        require_fields(raw, (*DECODER_SIZES.values(), "rms_norm_eps", eos_field))
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
        eos_ids = raw[eos_field]
        special_ids = {
            "mask_token_id": published.mask_token_id if raw.get("mask_token_id") is None else raw["mask_token_id"],
            "eos_token_id": eos_ids[0] if isinstance(eos_ids, list) and eos_ids else eos_ids,
        }
        raw, rope = _read_rope(raw, rotates_parts=is_moe)
        return BlockConfig(
            **fields,
            **sizes,
            mask_token_id=token_id(special_ids, "mask_token_id", vocab_size),
            eos_token_id=token_id(special_ids, "eos_token_id", vocab_size),
            family=published.family,
            rotary_dim=_rotary_dim(raw, sizes["head_dim"]) if is_moe else sizes["head_dim"],
            rope=rope,
            experts=_read_experts(raw) if is_moe else None,
        )


@dataclass(frozen=True, kw_only=True)
class CanvasConfig(BlockConfig):
    """DiffusionGemma: causal over final tokens, of which most layers see only a window, and bidirectional within the canvas.

    ``head_dim``, ``n_kv_heads`` and ``rope`` are those of layers with a window. The shared expert is the MLP beside the experts.
    """

    window: Rows
    """Tokens that a final token sees in a layer with a window, itself included. A canvas sees one fewer before it."""
    full_layers: tuple[int, ...]
    """Layers without a window, whose values are their keys before these are normed and rotated."""
    full_kv_heads: Heads
    full_head_dim: Width
    full_theta: Positive
    full_rotary_dim: Width
    """Dimensions of a head that full layers rotate, half of them from its beginning on and half from its middle on."""
    softcap: Positive = 30.0

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            self.n_heads % self.full_kv_heads == 0,
            f"{SAID}num_attention_heads={self.n_heads} must be a multiple of the {self.full_kv_heads} key-value heads of full layers",
        )
        require(
            self.full_rotary_dim % 2 == 0 and self.full_rotary_dim <= self.full_head_dim,
            f"{SAID}{self.full_rotary_dim} of {self.full_head_dim} dimensions of full layers are rotated, which must be an even part",
        )

    @property
    def mixture(self) -> ExpertsConfig:
        assert self.experts is not None
        return self.experts

    def is_full(self, layer: int) -> bool:
        return layer in self.full_layers

    def kv_shape(self, layer: int) -> tuple[int, int]:
        """Return the key-value heads of a layer, and their width."""
        return (self.full_kv_heads, self.full_head_dim) if self.is_full(layer) else (self.n_kv_heads, self.head_dim)

    @staticmethod
    def from_dict(raw: Mapping[str, Any]) -> "CanvasConfig":
        """Build from a config of transformers 5.24, or an older one with ``global_head_dim`` and ``num_global_key_value_heads``."""
        config = raw.get("text_config")
        if not isinstance(config, Mapping):
            raise UserError(f"{SAID}text_config={config!r} must be the object of the text model's fields: restore it")
        config = {"tie_word_embeddings": True, **config}
        require_fields(config, (*DECODER_SIZES.values(), "rms_norm_eps", "sliding_window", *_CANVAS_NAMES.values()))
        refuse_unsupported(config, IMPLEMENTED["canvas"])
        fields = decoder_fields(CanvasConfig, config, layers=LAYERS)
        names = {"n_kv_heads": "num_key_value_heads", "head_dim": "head_dim", "window": "sliding_window"}
        fields |= read_numbers(CanvasConfig, config, {**names, "softcap": "final_logit_softcapping"})
        experts = read_numbers(ExpertsConfig, config, _CANVAS_NAMES)
        full_layers = _full_layers(config, fields["n_layers"])
        kv_heads, head_dim = _full_heads(config, full_layers, fields)
        thetas, rotary_dim = _canvas_ropes(config, head_dim)
        eos_ids = config.get("eos_token_id", 1)
        special_ids = {"eos_token_id": eos_ids[0] if isinstance(eos_ids, list) and eos_ids else eos_ids}
        return CanvasConfig(
            **fields,
            **read_numbers(CanvasConfig, {"canvas_length": 256, **raw}, {"block_length": "canvas_length"}),
            family="diffusion-gemma",
            rotary_dim=fields["head_dim"],
            mask_token_id=NO_MASK,
            eos_token_id=token_id(special_ids, "eos_token_id", fields["vocab_size"]),
            rope=Rope(theta=thetas[0]),
            experts=ExpertsConfig(
                **experts,
                num_groups=1,
                groups_per_token=1,
                scaling=1.0,
                shared_hidden=fields["mlp_hidden_size"],
                dense_layers=0,
            ),
            full_layers=full_layers,
            full_kv_heads=kv_heads,
            full_head_dim=head_dim,
            full_theta=thetas[1],
            full_rotary_dim=rotary_dim,
        )


NO_MASK = -1
"""``mask_token_id`` of a model that has none."""
_CANVAS_NAMES = {
    "num_experts": "num_experts",
    "experts_per_token": "top_k_experts",
    "expert_hidden": "moe_intermediate_size",
}


def _full_layers(text: Mapping[str, Any], num_layers: int) -> tuple[int, ...]:
    """Return the full layers: every sixth and the last, unless ``layer_types`` says otherwise."""
    types = layer_types(text, LAYERS)
    if types is None:
        return tuple(i for i in range(num_layers) if i % 6 == 5 or i == num_layers - 1)
    require(
        len(types) == num_layers,
        f"{SAID}layer_types has {len(types)} entries and num_hidden_layers={num_layers}: give one a layer",
    )
    return tuple(i for i, kind in enumerate(types) if kind == LAYERS[0])


def _full_heads(text: Mapping[str, Any], full: Sequence[int], fields: Mapping[str, Any]) -> tuple[int, int]:
    """Return the key-value heads of full layers and their width. A config may spell them in two ways, which must agree."""
    spellings = {"num_key_value_heads": "num_global_key_value_heads", "head_dim": "global_head_dim"}
    layer_configs = text.get("per_layer_config") or {}
    require(
        isinstance(layer_configs, Mapping) and set(layer_configs) in (set(), {str(i) for i in full}),
        f"{SAID}per_layer_config={layer_configs!r} must say the heads of the full layers, {', '.join(map(str, full))}: correct it",
    )
    sizes = []
    for ours, (new, old) in zip(("n_kv_heads", "head_dim"), spellings.items(), strict=True):
        unique = {repr(each[new]): each for each in layer_configs.values() if isinstance(each, Mapping) and new in each}
        values = [read_numbers(CanvasConfig, each, {ours: new})[ours] for each in unique.values()]
        values += read_numbers(CanvasConfig, text, {ours: old}).values()
        require(
            len(set(values)) <= 1,
            f"{SAID}{new} of full layers is {' and '.join(map(str, values))} in per_layer_config and {old}: correct one of them",
        )
        sizes.append(values[0] if values else fields[ours])
    return sizes[0], sizes[1]


def _canvas_ropes(text: Mapping[str, Any], head_dim: int) -> tuple[tuple[float, float], int]:
    """Return theta of layers with a window and of full layers, and how many dimensions of a head full layers rotate."""
    ropes = {LAYERS[1]: {"rope_theta": 1e4}, LAYERS[0]: {"rope_theta": 1e6}, **(text.get("rope_parameters") or {})}
    defaults: Mapping[str, Any] = {"rope_type": "proportional", "partial_rotary_factor": 0.25}
    full_rope = {**defaults, **ropes[LAYERS[0]]}
    require(
        full_rope["rope_type"] == "proportional",
        f"{SAID}rope_type={full_rope['rope_type']!r} of full layers; only 'proportional' is implemented",
    )
    share = full_rope.pop("partial_rotary_factor")
    rotary_dim = 2 * (_rotary_dim({"partial_rotary_factor": share}, head_dim) // 2)
    plain = {name: value for name, value in full_rope.items() if name != "rope_type"}
    return (
        plain_rope({"rope_parameters": ropes[LAYERS[1]]}).theta,
        plain_rope({"rope_parameters": plain}).theta,
    ), rotary_dim


def _read_rope(raw: Mapping[str, Any], *, rotates_parts: bool) -> tuple[Mapping[str, Any], Rope]:
    """Read unscaled positions. ``rope_parameters`` may also hold the rotated share of a head, which we move to its older place."""
    parameters = raw.get("rope_parameters")
    if rotates_parts and isinstance(parameters, Mapping):
        share = parameters.get("partial_rotary_factor")
        if share is not None:
            require(
                raw.get("partial_rotary_factor") in (None, share),
                f"config.json has partial_rotary_factor={raw.get('partial_rotary_factor')!r} and {share!r} in rope_parameters: "
                "correct one of them",
            )
            rest = {name: value for name, value in parameters.items() if name != "partial_rotary_factor"}
            raw = {**raw, "partial_rotary_factor": share, "rope_parameters": rest}
    return raw, plain_rope(raw)


def _rotary_dim(raw: Mapping[str, Any], head_dim: int) -> int:
    share = raw.get("partial_rotary_factor", 1.0)
    require(
        type(share) in (int, float) and 0 < share <= 1,
        f"config.json has partial_rotary_factor={share!r}: give a share of the head, above 0 and at most 1",
    )
    rotary_dim = int(head_dim * share)
    require(
        raw.get("rotary_dim") in (None, rotary_dim),
        f"config.json has rotary_dim={raw.get('rotary_dim')!r} and partial_rotary_factor={share!r} of head_dim={head_dim}: "
        "correct one of them",
    )
    return rotary_dim


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
    return BlockConfig.from_dict(published_config(directory, "LLaDA2, SDAR, Fast-dLLM v2 or DiffusionGemma"))


def _published(raw: Mapping[str, Any]) -> BlockConfig:
    fields = dict(raw)
    rope = Rope(theta=fields.pop("rope_theta"))
    experts = fields.pop("experts", None)
    kind: type[BlockConfig] = BlockConfig
    if fields["family"] == "diffusion-gemma":
        kind, fields["full_layers"] = CanvasConfig, tuple(fields["full_layers"])
    return kind(**fields, rope=rope, experts=experts and ExpertsConfig(**experts))


BLOCK_SHAPES: Mapping[str, BlockConfig] = {name: _published(raw) for name, raw in PUBLISHED["block"].items()}
"""Full-size shapes that need no download with random weights. LLaDA2.0 and 2.1 have 16,255,643,392 parameters (mini) and
102,889,705,216 (flash), SDAR-8B 8,190,735,360, Fast-dLLM v2 7B 7,615,616,512 and DiffusionGemma's text part 25,250,986,812."""
SMALL_BLOCKS: Mapping[str, BlockConfig] = {name: _published(raw) for name, raw in PUBLISHED["small block"].items()}
"""Small models of each family with random weights, whose steps a CPU core runs in milliseconds."""


def block_config(model: str, *, known: Iterable[str] = BLOCK_SHAPES) -> BlockConfig:
    """Return the config for a shape's name (``BLOCK_SHAPES``), a directory or a hub id; errors list the ``known`` names."""
    config = BLOCK_SHAPES.get(model.lower())
    return read_block_config(checkpoint_dir(model, weights=False, known=known)) if config is None else config
