"""The settings of a block-diffusion system. This module imports little, because the command line reads its options from it."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Literal

import engines.models
from engines.blockdiffusion.rules import (
    DecodeRule,
    Dynamic,
    EntropyBudget,
    JointThreshold,
    Level,
    LowConfidence,
    Sequential,
    Static,
    Steps,
    SubBlocks,
)
from engines.blockdiffusion.scheduler import Batching, BlockEngineConfig, check_batching
from engines.blockdiffusion.sequence import BlockSampling
from engines.blockdiffusion.simulated import HostCost, pool_tokens
from engines.cost.kernels import check_kernels
from engines.cost.roofline import gpu
from engines.errors import require
from engines.knobs import Memory, Needs, Only, Proportion, Range, Tokens, build
from engines.knobs import resolve as resolve_knobs
from engines.models.block_config import (
    BLOCK_SHAPES,
    CANVAS_TYPE,
    SMALL_BLOCKS,
    BlockConfig,
    BlockLength,
    CanvasConfig,
    block_config,
)
from engines.models.checkpoint import checkpoint_digest, checkpoint_dir, stored_type
from engines.models.shape import BLOCK_DIFFUSION, DIFFUSION_GEMMA, ModelShape, Precision
from repro.families.cost import CostKnobs, load_calibration
from repro.families.platforms import BlockPart, Platform, platform
from repro.runs.cell import Cell
from repro.tasks.registry import TASKS
from repro.workloads.knobs import TraceKnobs
from repro.workloads.served import workload_knobs

RULES: Mapping[str, type[DecodeRule]] = {
    "low-confidence": LowConfidence,
    "joint-threshold": JointThreshold,
    "static": Static,
    "dynamic": Dynamic,
    "sequential": Sequential,
    "sub-blocks": SubBlocks,
    "entropy-budget": EntropyBudget,
}
RuleName = Literal[
    "low-confidence", "joint-threshold", "static", "dynamic", "sequential", "sub-blocks", "entropy-budget"
]
EMBEDDED = "tiny-block"
EMBEDDED_DIRS = MappingProxyType(
    {f"tiny-{name}": Path(engines.models.__file__).parent / f"tiny_{name}" for name in ("block", "canvas")}
)
"""Embedded checkpoints by name: a small SDAR and a small DiffusionGemma."""
EMBEDDED_TASKS = ("mini-gsm", "mini-code")
"""The tasks that they were trained on."""

_IN_BLOCKS = Needs(autoregressive=False)
"""Marks a setting that only blocks have. An autoregressive run decodes one token at a time and has nothing to decide."""
_HAS_THRESHOLD = Only(rule=tuple(name for name, rule in RULES.items() if "threshold" in rule.__dataclass_fields__))
_HAS_STEPS = Only(rule=("static", "dynamic", "sequential", "entropy-budget"))
_OF_CANVASES = Only(rule="entropy-budget")


@dataclass(frozen=True, kw_only=True)
class BlockKnobs(TraceKnobs):
    model: str | None = None
    """Embedded checkpoints: tiny-block (default for graded tasks), tiny-canvas. Random weights: tiny-llada2 (default otherwise), tiny-sdar,
    tiny-fast-dllm-v2, tiny-diffusiongemma, llada2-mini, llada2-flash, sdar-8b, fast-dllm-v2-7b, diffusiongemma-26b. Any other
    checkpoint: its directory or hub id."""
    device: str = "cpu"
    """cpu, cuda or cuda:N."""
    dtype: Literal["float32", "float16", "bfloat16"] = "float32"
    """Dtype of the weights."""
    quantization: Annotated[
        Literal["none", "int8"], Only(executor="torch"), Needs(device="cpu", dtype=("float32", "bfloat16"))
    ] = "none"
    """int8 stores the weights of matrix products as int8, with one scale per output. Only on a CPU, for models without experts."""
    num_prompts: Annotated[int, Range(1, 10**5)] = 16
    """How many requests to run. On a graded task: how many problems, from the first on, all unless given."""
    input_len: Tokens | None = None
    """Fix every prompt to this many tokens."""
    length_scale: Annotated[float, Range(above=0, most=1e3), Only(input_len=None)] = 0.25
    """Factor on the data set's prompt lengths."""
    gen_length: Tokens = 64
    """Tokens to generate."""
    block_length: Annotated[BlockLength, _IN_BLOCKS] | None = None
    """Tokens per block; the checkpoint's own unless given."""
    rule: Annotated[RuleName, _IN_BLOCKS] = "low-confidence"
    """The rule by which a step decides tokens of a block. entropy-budget is for DiffusionGemma, and its default."""
    threshold: Annotated[Level, _IN_BLOCKS, _HAS_THRESHOLD] | None = None
    """Confidence above which a token is taken; the rule's own default unless given."""
    edit_threshold: Annotated[Level, Only(rule="joint-threshold")] = 0.0
    """Confidence above which a written token is replaced."""
    max_post_steps: Annotated[int, Range(0, 4096), Only(rule="joint-threshold")] = 16
    """The most forwards that edit a block after it is full."""
    steps: Annotated[Steps, _HAS_STEPS] | None = None
    """Forwards per block: one per token unless given. A canvas takes at most 48."""
    sub_block: Annotated[int, Range(1, 4096), Only(rule="sub-blocks")] = 8
    """Tokens of a sub-block."""
    dual_cache: Annotated[bool, Only(rule="sub-blocks")] = False
    """Compute only the sub-block, against stale K/V of the rest of its block. This is an approximation."""
    entropy_bound: Annotated[float, Range(above=0, most=1e9), _OF_CANVASES] = EntropyBudget.entropy_bound
    """The entropy, in nats, that all tokens accepted in one forward of a canvas share."""
    stability: Annotated[int, Range(0, 4096), _OF_CANVASES] = EntropyBudget.stability
    """How many previous forwards in a row must agree with the latest before a canvas ends early."""
    confidence: Annotated[float, Range(0, 1e9), _OF_CANVASES] = EntropyBudget.confidence
    """Mean entropy below which a canvas may end early; 0 gives every canvas all its steps."""
    t_min: Annotated[float, Range(0, 1e6), _OF_CANVASES] = 0.4
    """The temperature towards which a canvas falls from t_max."""
    t_max: Annotated[float, Range(0, 1e6), _OF_CANVASES] = EntropyBudget.t_max
    """The temperature of a canvas's first forward."""
    temperature: Annotated[float, Range(0, 1e6), _IN_BLOCKS] = 0.0
    """0 is greedy."""
    top_p: Proportion = 1.0
    """Sample from the fewest likely tokens that hold this probability."""
    top_k: Annotated[int, Range(1, 2**31 - 1)] | None = None
    """Sample from this many tokens at most, before top_p."""
    max_num_batched_tokens: Tokens = BlockEngineConfig().max_num_batched_tokens
    """The most rows in a packed step."""
    max_num_seqs: Annotated[int, Range(1, 2**14)] = 64
    """Requests running at once."""
    max_model_len: Annotated[int, Range(1, 2**20)] | None = None
    """Tokens of the longest request, with its last block whole [default: 2048, or the model's positions if they are fewer]."""
    memory_limit: Memory | None = None
    """Bytes that weights, a step and K/V share on a GPU; the card's memory unless given."""
    num_tokens: Tokens | None = None
    """Tokens of K/V [default: 32768 on a CPU, on a GPU what the memory holds]."""
    prefix_cache: bool = True
    """Keep the K/V of whole final blocks, and reuse it for requests with the same prefix."""
    shared_len: Annotated[int, Range(0, 2**20)] = 0
    """How many tokens at the start of a prompt all requests share, such as examples of a task."""
    batching: Annotated[Batching, _IN_BLOCKS] = BlockEngineConfig().batching
    """mixed packs all work that is due into one step. first-done and synchronous are SGLang's: prompts and blocks run in separate steps,
    and every block ends with one more forward. synchronous also ends all blocks of a batch together."""
    autoregressive: bool = False
    """Decode one token at a time, as the model that this one was trained from: blocks of one token, each predicted from the one before.
    A model of canvases can do this in simulations only."""
    tokens_per_forward: Annotated[float, Range(1, 4096), Only(executor="roofline")] | None = None
    """Tokens that a simulated forward decides on average; the platform's assumption unless given."""
    precision: Annotated[Precision, Only(executor="roofline")] = "bf16"
    """The number format in which a simulated model stores and multiplies its layers' matrices; the embedding stays in bf16."""
    charged: CostKnobs = field(default_factory=CostKnobs)
    host: HostCost = field(default_factory=HostCost)


@dataclass(frozen=True, kw_only=True)
class BlockSettings:
    platform: Platform
    executor: str
    knobs: BlockKnobs
    model: str
    config: BlockConfig
    directory: Path | None
    """The checkpoint's directory; None if weights are random."""
    rule: DecodeRule
    max_model_len: int
    basis: str
    """A digest of the model, and of the costs that a simulated run charges."""

    @property
    def is_simulated(self) -> bool:
        return self.executor == "roofline"

    @property
    def block(self) -> int:
        return 1 if self.knobs.autoregressive else self.knobs.block_length or self.config.block_length

    @property
    def shifts(self) -> bool:
        return self.knobs.autoregressive or self.config.shifts_logits

    @property
    def pool_block(self) -> int:
        """Tokens of K/V in one block of the pool: a diffusion block, or 16 if final tokens are causal (autoregressive or canvases)."""
        return 16 if self.knobs.autoregressive or self.is_of_canvases else self.block

    @property
    def is_of_canvases(self) -> bool:
        return isinstance(self.config, CanvasConfig) and not self.knobs.autoregressive

    @property
    def most_tokens(self) -> int:
        """The most tokens of a prompt and its answer together, if the answer may end within a block."""
        if self.is_of_canvases:
            return self.max_model_len - self.block + 1
        return self.max_model_len // self.block * self.block

    @property
    def engine(self) -> BlockEngineConfig:
        return BlockEngineConfig(max_num_batched_tokens=self.knobs.max_num_batched_tokens, batching=self.knobs.batching)

    @property
    def shape(self) -> ModelShape:
        shape = shape_of(self.config, self.model, 4 if self.knobs.dtype == "float32" else 2)
        if shape.canvas is not None and self.knobs.autoregressive:  # Gemma 4: what a step expects goes nowhere
            shape = replace(shape, canvas=shape.canvas._replace(takes_back=0))
        return replace(shape, precision=self.knobs.precision)

    @property
    def num_tokens(self) -> int:
        """Tokens of K/V in the pool: the number that is asked for, or as many as requests can use and memory holds."""
        knobs = self.knobs
        if knobs.num_tokens is not None:
            return knobs.num_tokens
        if knobs.memory_limit is None:
            return CPU_TOKENS
        need = knobs.max_num_seqs * self.max_model_len
        rows = knobs.max_num_batched_tokens
        return min(need, pool_tokens(self.shape, knobs.memory_limit, rows=rows, logit_rows=min(rows, MAX_NUM_LOGITS)))

    def sampling(self, seed: int) -> BlockSampling:
        return replace(_sampling(self.knobs), seed=seed)


def _sampling(knobs: BlockKnobs) -> BlockSampling:
    return BlockSampling(temperature=knobs.temperature, top_p=knobs.top_p, top_k=knobs.top_k)


CPU_TOKENS = 32768
MAX_NUM_LOGITS = 2048
"""The most rows of logits in memory at once."""


def shape_of(config: BlockConfig, name: str, dtype_bytes: int = 2) -> ModelShape:
    """The shape of a model. A full-size model gets its catalogued shape, by whose name we find its tables; any other keeps ``name``."""
    shape = ModelShape.from_block_config(config, name=name, dtype_bytes=dtype_bytes)
    catalogued = (entry for entry in (*BLOCK_DIFFUSION, DIFFUSION_GEMMA) if replace(shape, name=entry.name) == entry)
    return next(catalogued, shape)


def is_random(model: str) -> bool:
    return model in SMALL_BLOCKS or model.lower() in BLOCK_SHAPES


def resolve(cell: Cell) -> BlockSettings:
    """Return the platform's defaults with the cell's knobs over them. Raises UserError for all that a user can get wrong."""
    target = platform(cell.platform)
    require(
        cell.executor in ("torch", "roofline"),
        f"executor={cell.executor!r}: block-diffusion is measured (torch) or simulated (roofline), use one of them",
    )
    defaults = _platform_defaults(target, cell.executor)
    model_name = cell.requested.get("model", defaults.get("model"))
    decodes_tokens = bool(cell.requested.get("autoregressive")) and cell.executor == "roofline"
    has_canvases = _has_canvases(model_name) and not decodes_tokens
    if has_canvases:
        defaults["rule"] = "entropy-budget"
    knobs = resolve_knobs(
        BlockKnobs,
        cell.requested,
        workload_knobs(cell.requested),
        system=NAME,
        defaults=defaults,
        other_values={"executor": cell.executor},
    )
    _check_canvases(knobs, cell.requested, has_canvases=has_canvases)
    is_graded = cell.dataset in TASKS and knobs.workload is None
    model = knobs.model or (EMBEDDED if is_graded else "tiny-llada2")
    config = _config_of(model)
    block = 1 if knobs.autoregressive else knobs.block_length or config.block_length
    check_batching(knobs.batching, config.shifts_logits)
    rule = rule_of(knobs, block, has_canvases=has_canvases)
    rule.check_block(block)
    max_model_len = knobs.max_model_len or 2048
    if "max_model_len" not in cell.requested:
        max_model_len = min(max_model_len, config.max_sequence_length)
    require(
        knobs.gen_length + block <= max_model_len <= config.max_sequence_length,
        f"max_model_len={max_model_len} must hold gen_length={knobs.gen_length} and a block of {block} tokens, and be at "
        f"most the model's {config.max_sequence_length} positions",
    )
    directory = None
    if not is_random(model):
        directory = EMBEDDED_DIRS.get(model) or checkpoint_dir(model)
    basis = repr((config, _sampling(knobs))) if directory is None else checkpoint_digest(directory)
    if cell.executor == "roofline":
        card, shape = target.gpu, replace(shape_of(config, model), precision=knobs.precision)
        charged = knobs.charged.on(card, shape)
        check_kernels(shape, gpu(card), charged.framework)
        basis += repr((shape, gpu(card), load_calibration(card))) + charged.basis(card, shape) + target.digest
        knobs = replace(knobs, charged=charged)
    settings = BlockSettings(
        platform=target,
        executor=cell.executor,
        knobs=knobs,
        model=model,
        config=config,
        directory=directory,
        rule=rule,
        max_model_len=max_model_len,
        basis=hashlib.sha256(basis.encode()).hexdigest()[:12],
    )
    assert settings.num_tokens > 0, "pool_tokens refuses a card that holds none"
    return settings


def _config_of(model: str) -> BlockConfig:
    if model in SMALL_BLOCKS:
        return SMALL_BLOCKS[model]
    model_names = (*EMBEDDED_DIRS, *SMALL_BLOCKS, *BLOCK_SHAPES)
    return block_config(str(EMBEDDED_DIRS.get(model, model)), known=model_names)


def _has_canvases(model: object) -> bool:
    if not isinstance(model, str):
        return False
    config = SMALL_BLOCKS.get(model) or BLOCK_SHAPES.get(model.lower())
    return (
        isinstance(config, CanvasConfig) if config else stored_type(str(EMBEDDED_DIRS.get(model, model))) == CANVAS_TYPE
    )


def _check_canvases(knobs: BlockKnobs, asked: Mapping[str, Any], *, has_canvases: bool) -> None:
    """Raise UserError for a rule of the other kind of model, and for knobs that mean nothing for a canvas."""
    require(
        RULES[knobs.rule].of_canvases == has_canvases,
        f"rule={knobs.rule!r} does not fit model={knobs.model!r}: entropy-budget is for canvases, and nothing else is",
    )
    name = next((knob for knob in ("temperature", "top_p", "top_k", "autoregressive") if asked.get(knob)), None)
    name = "temperature" if "temperature" in asked else name
    require(
        not has_canvases or name is None,
        f"{name}={asked.get(name or '')!r} has no meaning for canvases, which are drawn between t_max and t_min: leave it out, or give those",
    )


def _platform_defaults(target: Platform, executor: str) -> dict[str, Any]:
    """A platform's defaults by name. A CPU has only the defaults of the fields."""
    if target.gpu is None:
        require(
            executor == "torch",
            f"executor={executor!r}: platform={target.name!r} names no card to simulate, use --executor torch or a platform such as "
            "h200-sdar-8b",
        )
        return {}
    parts = [part for part in target.parts if isinstance(part, BlockPart)]
    if executor == "torch" and not parts:
        parts = [BlockPart(model="sdar-8b", memory_limit=gpu(target.gpu).memory_bytes)]
    part = parts[0] if parts else target.part(BlockPart)
    defaults = {knob.name: getattr(part, knob.name) for knob in fields(part)}
    if executor == "torch":
        del defaults["tokens_per_forward"]
    return defaults


NAME = "block-diffusion"
DECODING_OF_CANVASES = ("entropy_bound", "stability", "confidence", "t_min", "t_max")
DECODING = ("rule", "edit_threshold", "max_post_steps", "sub_block", "dual_cache", *DECODING_OF_CANVASES)
"""Knobs of decoding that only block diffusion has."""


def settings_of_requests(knobs: Mapping[str, Any], platform: str = "cpu-tiny") -> BlockSettings:
    """The settings of ``repro generate`` and ``repro serve``, whose requests come from a user and not from a data set."""
    options = tuple({"model": EMBEDDED, **knobs}.items())
    return resolve(Cell(system=NAME, dataset="requests", platform=platform, executor="torch", knobs=options))


def rule_of(knobs: BlockKnobs, block: int, *, has_canvases: bool = False) -> DecodeRule:
    steps, length = knobs.steps or (None if has_canvases else block), min(knobs.sub_block, block)
    options = {**vars(knobs), "steps": steps, "length": length}
    return build(RULES[knobs.rule], {name: value for name, value in options.items() if value is not None})
