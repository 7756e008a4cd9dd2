"""The parameters, FLOPs and bytes of a transformer, from its dimensions alone.

A FLOP is one multiply or one add (a GEMM of m x k by k x n costs 2mkn). Only matrix products are
counted; norms, rotations, biases and activations are below one percent and are left out.
"""

from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, NamedTuple

from engines.errors import UserError
from engines.models.block_config import BLOCK_SHAPES, BlockConfig, CanvasConfig
from engines.models.config import DREAM_7B as _DREAM_7B_CONFIG
from engines.models.config import LLADA_8B as _LLADA_8B_CONFIG
from engines.models.config import PUBLISHED, ModelConfig

_OF_MIXTURES = ("shared_hidden", "router_bias", "dense_layers", "dense_hidden", "canvas")
Precision = Literal["bf16", "fp8", "fp8-block", "fp8-dynamic"]


class CanvasLayers(NamedTuple):
    """The further dimensions of a canvas model: it has full layers, whose values are their keys, among layers with a window."""

    window: int
    full_layers: int
    full_kv_heads: int
    full_head_dim: int
    takes_back: int = 1
    """0 if a step's logits do not go into the next step, as in the autoregressive model with these layers."""


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """The dimensions of a pre-norm transformer with rotary positions, grouped-query attention and a gated MLP."""

    name: str
    d_model: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    """Independent of ``d_model / n_heads``: Qwen3 has 64 heads of 128 in a width of 5120."""
    mlp_hidden: int
    """Hidden width of the MLP, or of one expert if there are several."""
    vocab_rows: int
    """Rows of the embedding and of the head, padding rows included."""
    tied: bool = False
    qkv_bias: bool = False
    qk_norm: bool = False
    """A norm weight of ``head_dim`` each for queries and keys in every layer (Qwen3)."""
    num_experts: int = 1
    experts_per_token: int = 1
    shared_hidden: int | None = None
    """Hidden width of a shared expert, which every token gets too."""
    router_bias: bool = False
    """Whether each layer has a number per expert, which it adds when it chooses experts."""
    dense_layers: int | None = None
    """Number of layers that have one MLP of width ``dense_hidden`` instead of experts."""
    dense_hidden: int | None = None
    canvas: CanvasLayers | None = None
    """If it is given, logits are float32, and each row of them may be multiplied by the embedding once more."""
    dtype_bytes: int = 2
    precision: Precision = "bf16"
    """The format in which the layers' matrices are stored and multiplied. FP8 has one scale per tensor, or per block of it."""

    # Figures that follow from the dimensions.
    q_width: int = field(init=False, repr=False, compare=False)
    kv_width: int = field(init=False, repr=False, compare=False)
    expert_weights: int = field(init=False, repr=False, compare=False)
    """gate, up and down matrices of one expert of one layer."""
    dense_weights: int = field(init=False, repr=False, compare=False)
    """All other weights of a layer: q, k, v and output matrices, router, shared expert, norm weights and biases."""
    dense_layer_weights: int = field(init=False, repr=False, compare=False)
    """All weights of the ``dense_layers``."""
    weight_bytes: int = field(init=False, repr=False, compare=False)
    """Resident bytes of all weights."""
    streamed_weight_bytes_head: int = field(init=False, repr=False, compare=False)
    """Bytes of the LM head, read once for every chunk of logit rows."""
    linear_flops_per_token: int = field(init=False, repr=False, compare=False)
    """All matrices of all layers for one query row; the LM head is counted apart."""
    attention_flops_per_pair: int = field(init=False, repr=False, compare=False)
    """Scores and weighted sum of one (query row, key row) pair over all layers and heads; bidirectional attention has all pairs."""
    logits_flops_per_row: int = field(init=False, repr=False, compare=False)
    logits_bytes_per_row: int = field(init=False, repr=False, compare=False)
    kv_bytes_per_token: int = field(init=False, repr=False, compare=False)
    """K and V of one token over all layers."""
    activation_bytes_per_query_token: int = field(init=False, repr=False, compare=False)
    """Residual, q, k, v, attention output, gate, up and their product of one layer, all alive at once. Layers run in turn and
    free their temporaries. No reuse inside a layer is assumed, so an executor's measured peak should stay below this."""

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name) if each.init else None
            if type(value) is int and value < 1:
                raise UserError(f"{self.name}: {each.name}={value} must be at least 1")
        if self.n_heads % self.n_kv_heads:
            raise UserError(f"{self.name}: n_heads={self.n_heads} must be a multiple of n_kv_heads={self.n_kv_heads}")
        if (self.dense_layers is None) != (self.dense_hidden is None) or (self.dense_layers or 0) >= self.n_layers:
            raise UserError(
                f"{self.name}: dense_layers={self.dense_layers} of {self.n_layers} layers have dense_hidden="
                f"{self.dense_hidden}: give both or none, and leave a layer its experts"
            )
        if self.experts_per_token > self.num_experts:
            raise UserError(
                f"{self.name}: experts_per_token={self.experts_per_token} exceeds num_experts={self.num_experts}: lower it"
            )
        q_width, kv_width = self.n_heads * self.head_dim, self.n_kv_heads * self.head_dim
        attention = 2 * self.d_model * (q_width + kv_width)
        expert = 3 * self.d_model * self.mlp_hidden
        router = self.d_model * self.num_experts if self.num_experts > 1 else 0
        norms = 2 * self.d_model + (2 * self.head_dim if self.qk_norm else 0)
        biases = q_width + 2 * kv_width if self.qkv_bias else 0
        shared, shared_hidden = 3 * self.d_model * (self.shared_hidden or 0), self.shared_hidden or 0
        dense = attention + router + (self.num_experts if self.router_bias else 0) + shared + norms + biases
        dense_layers, dense_hidden = self.dense_layers or 0, self.dense_hidden or 0
        dense_mlp = 3 * self.d_model * dense_hidden
        dense_layer_weights = dense_layers * (attention + norms + biases + dense_mlp)
        embedding = self.vocab_rows * self.d_model
        embeddings_and_norm = self.d_model + embedding * (1 if self.tied else 2)
        expert_layers = self.n_layers - dense_layers
        layers = expert_layers * (dense + self.num_experts * expert) + dense_layer_weights
        hidden = max(self.experts_per_token * self.mlp_hidden + shared_hidden, dense_hidden)
        alive = self.d_model + 2 * (q_width + kv_width) + 3 * hidden
        active_weights = expert_layers * (router + shared + self.experts_per_token * expert)
        figures = {
            "q_width": q_width,
            "kv_width": kv_width,
            "expert_weights": expert,
            "dense_weights": dense,
            "dense_layer_weights": dense_layer_weights,
            "weight_bytes": layers * self.layer_weight_bytes + embeddings_and_norm * self.dtype_bytes,
            "streamed_weight_bytes_head": embedding * self.dtype_bytes,
            "linear_flops_per_token": 2 * (self.n_layers * attention + active_weights + dense_layers * dense_mlp),
            "attention_flops_per_pair": 4 * q_width * self.n_layers,
            "logits_flops_per_row": 2 * embedding,
            "logits_bytes_per_row": self.vocab_rows * self.dtype_bytes,
            "kv_bytes_per_token": 2 * kv_width * self.dtype_bytes * self.n_layers,
            "activation_bytes_per_query_token": alive * self.dtype_bytes,
        }
        if self.canvas is not None:
            figures = self._with_canvas(self.canvas, figures)
        for name, value in figures.items():
            object.__setattr__(self, name, value)

    def _with_canvas(self, canvas: CanvasLayers, figures: dict[str, int]) -> dict[str, int]:
        """Return the figures of a canvas model. Its full layers have other heads. Each layer has five more norms, two router scales and
        two scalars. The model has one more MLP with a norm, which takes in the tokens that the previous step expects."""
        full, windowed = canvas.full_layers, self.n_layers - canvas.full_layers
        q, kv = self.n_heads * canvas.full_head_dim, canvas.full_kv_heads * canvas.full_head_dim
        products = full * self.d_model * (2 * q + kv - 2 * (figures["q_width"] + figures["kv_width"]))
        conditioning = canvas.takes_back * 3 * self.d_model * (self.shared_hidden or 0)
        passes = 1 + canvas.takes_back
        others = self.n_layers * (6 * self.d_model + self.num_experts + 2) + self.d_model
        others += 2 * full * (canvas.full_head_dim - self.head_dim)
        added = products + conditioning + others
        return figures | {
            "dense_weights": figures["dense_weights"] + round(added / self.n_layers),
            "weight_bytes": figures["weight_bytes"] + added * self.layer_weight_bytes,
            "streamed_weight_bytes_head": passes * figures["streamed_weight_bytes_head"],
            "linear_flops_per_token": figures["linear_flops_per_token"] + 2 * (products + conditioning),
            "attention_flops_per_pair": 4 * (windowed * figures["q_width"] + full * q),
            "logits_flops_per_row": passes * figures["logits_flops_per_row"],
            "logits_bytes_per_row": 4 * self.vocab_rows,
            "kv_bytes_per_token": 2 * (windowed * figures["kv_width"] + full * kv) * self.dtype_bytes,
        }

    @property
    def windowed_shares(self) -> tuple[float, float]:
        """The shares of layers with a window in a pair's FLOPs and in a token's K/V bytes."""
        if self.canvas is None:
            return 0.0, 0.0
        windowed = self.n_layers - self.canvas.full_layers
        pairs = 4 * windowed * self.q_width / self.attention_flops_per_pair
        return pairs, 2 * windowed * self.kv_width * self.dtype_bytes / self.kv_bytes_per_token

    @property
    def layer_weight_bytes(self) -> int:
        """Bytes of one number in a layer's weights; norms, biases and scales are too few to count."""
        return self.dtype_bytes if self.precision == "bf16" else 1

    @property
    def dimensions(self) -> dict[str, Any]:
        """The arguments that make this shape."""
        return {each.name: getattr(self, each.name) for each in fields(self) if each.init}

    @staticmethod
    def from_config(config: ModelConfig, *, name: str, dtype_bytes: int = 2) -> "ModelShape":
        return ModelShape(**_sizes(config), mlp_hidden=config.mlp_hidden_size, name=name, dtype_bytes=dtype_bytes)

    def __repr__(self) -> str:
        """Runs are stored under this text. Fields only for FP8, a shared expert, dense layers or canvases are left out of other shapes."""
        left_out = {name for name in _OF_MIXTURES if getattr(self, name) in (None, False)}
        if self.precision == "bf16":
            left_out.add("precision")
        shown = [each.name for each in fields(self) if each.repr and each.name not in left_out]
        return f"ModelShape({', '.join(f'{name}={getattr(self, name)!r}' for name in shown)})"

    @staticmethod
    def from_block_config(config: BlockConfig, *, name: str, dtype_bytes: int = 2) -> "ModelShape":
        experts = config.experts
        mixture: dict[str, Any] = {}
        if experts is not None:
            mixture = {
                "num_experts": experts.num_experts,
                "experts_per_token": experts.experts_per_token,
                "shared_hidden": experts.shared_hidden,
                "router_bias": not isinstance(config, CanvasConfig),
            }
            if experts.dense_layers:
                mixture |= {"dense_layers": experts.dense_layers, "dense_hidden": config.mlp_hidden_size}
        if isinstance(config, CanvasConfig):
            mixture["canvas"] = CanvasLayers(
                config.window, len(config.full_layers), config.full_kv_heads, config.full_head_dim
            )
        return ModelShape(
            **_sizes(config),
            mlp_hidden=config.mlp_hidden_size if experts is None else experts.expert_hidden,
            qk_norm=config.qk_norm,
            name=name,
            dtype_bytes=dtype_bytes,
            **mixture,
        )

    def streamed_weight_bytes_layers(self, query_rows: int | None = None) -> int:
        """Bytes of layer weights (and final norm) one forward reads, once whatever the batch.

        The embedding is gathered by rows, so it is not streamed. With experts, ``query_rows`` rows
        routed uniformly and independently touch E (1 - (1 - k/E)^rows) of E experts on average;
        None means all of them.
        """
        experts = float(self.num_experts)
        if query_rows is not None and self.num_experts > 1:
            experts *= 1 - (1 - self.experts_per_token / self.num_experts) ** query_rows
        layer = self.dense_weights + experts * self.expert_weights
        weights = (self.n_layers - (self.dense_layers or 0)) * layer + self.dense_layer_weights + self.d_model
        return round(weights * self.layer_weight_bytes)

    def on_rank(self, size: int) -> "ModelShape":
        """Return the shape of one of ``size`` ranks, with the largest part if parts differ.

        Its logits are the rank's own columns; reductions that need whole rows must gather them too.
        """
        return replace(
            self,
            n_heads=self.n_heads // size,
            n_kv_heads=self.n_kv_heads // size,
            mlp_hidden=-(-self.mlp_hidden // size),
            shared_hidden=None if self.shared_hidden is None else -(-self.shared_hidden // size),
            dense_hidden=None if self.dense_hidden is None else -(-self.dense_hidden // size),
            vocab_rows=-(-self.vocab_rows // size),
        )


class ReadShape(ModelShape):
    """A shape read from a config.json, for which no table of kernel times was made."""


def _sizes(config: ModelConfig | BlockConfig) -> dict[str, Any]:
    """Return the sizes that configs of all families name alike."""
    names = ("d_model", "n_layers", "n_heads", "n_kv_heads", "head_dim", "qkv_bias")
    return {name: getattr(config, name) for name in names} | {
        "vocab_rows": config.vocab_size,
        "tied": config.weight_tying,
    }


LLADA_8B = ModelShape.from_config(_LLADA_8B_CONFIG, name="LLaDA-8B")


def _published(name: str) -> ModelShape:
    """Return a published shape. Tests compare each with the checkpoint's published parameter count."""
    return ModelShape(name=name, **PUBLISHED["shapes"][name])


QWEN2_5_7B = _published("Qwen2.5-7B")
DREAM_7B = ModelShape.from_config(_DREAM_7B_CONFIG, name="Dream-7B")
QWEN2_5_14B = _published("Qwen2.5-14B")
QWEN2_5_32B = _published("Qwen2.5-32B")
QWEN3 = tuple(_published(f"Qwen3-{size}") for size in ("0.6B", "1.7B", "4B", "8B", "14B", "32B"))
QWEN3_32B = QWEN3[-1]
MISTRAL = (_published("Mistral-7B-v0.1"), _published("Mistral-7B-v0.3"))
LLAMA_3_1_70B = _published("Llama-3.1-70B")
MIXTRAL_8X7B = _published("Mixtral-8x7B")

BLOCK_DIFFUSION = tuple(
    ModelShape.from_block_config(BLOCK_SHAPES[name.lower()], name=name)
    for name in ("LLaDA2-mini", "LLaDA2-flash", "SDAR-8B", "Fast-dLLM-v2-7B")
)
DIFFUSION_GEMMA = ModelShape.from_block_config(BLOCK_SHAPES["diffusiongemma-26b"], name="DiffusionGemma-26B")
LLADA2_MINI, LLADA2_FLASH, SDAR_8B, FAST_DLLM_V2_7B = BLOCK_DIFFUSION

SHAPES = (LLADA_8B, DREAM_7B, QWEN2_5_7B, QWEN2_5_14B, QWEN2_5_32B, QWEN3_32B, LLAMA_3_1_70B, MIXTRAL_8X7B)
"""Shapes whose kernel times we extract from measured tables (``engines.cost.kernels``)."""
DIFFUSION = (LLADA_8B, DREAM_7B)
"""Shapes that no system of prefill and decode workers serves."""
_NAMED = {shape.name for shape in (*SHAPES, *QWEN3, *MISTRAL)}
CATALOGUE = (
    *SHAPES,
    *(shape for shape in QWEN3 if shape not in SHAPES),
    *MISTRAL,
    *(_published(name) for name in PUBLISHED["shapes"] if name not in _NAMED),
)
"""All shapes that simulations know by name."""


def model_shape(name: str) -> ModelShape:
    """Look a shape up by its name, ignoring case."""
    for shape in CATALOGUE:
        if shape.name.lower() == name.lower():
            return shape
    raise UserError(f"model={name!r} is unknown: use one of {', '.join(shape.name for shape in CATALOGUE)}")
