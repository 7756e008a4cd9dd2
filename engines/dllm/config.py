"""Every knob of the diffusion-LLM engine; frozen, keyword-only, checked when built."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from engines.dllm.phase import Settling
from engines.errors import require
from engines.knobs import Checked, Except, Fixed, Names, Needs, Only, Proportion, Range, Seed, Tokens

Selection = Literal["head", "uniform", "attended", "dense"]
LogitRows = Literal["decomposed", "monolithic"]
TiePolicy = Literal["stable", "parity"]
Remasking = Literal["low_confidence", "random"]
Confidence = Literal["max_prob", "margin", "neg_entropy"]
ConfidenceOf = Literal["model", "sampler"]
ConfidenceDtype = Literal["native", "float64"]
AttentionName = Literal["auto", "flash-attn", "torch-varlen", "sdpa-padded", "sdpa"]
Compat = Literal["paper", "upstream"]
Preset = Literal["exact", "balanced", "fast"]
Quota = Literal["even", "timestep", "origin"]
FirstStep = Literal["ranked", "first_and_ranked", "first_position"]


MOST_TOKENS = 2**17
"""The most tokens of one answer."""
AnswerTokens = Annotated[int, Range(1, MOST_TOKENS)]
Level = Annotated[float, Range(0, 1e6)]
MEASURED = Only(executor="torch")
"""What a simulation cannot know: which ids a model gives, on what device."""
DRAWS = Needs(temperature=Range(above=0))
"""Marks a setting that a sampler which draws nothing does not heed."""
PACKED = Only(reading="policy")
"""What a static batch does not heed: that of a baseline in any other reading."""
ON_CUDA = Only(device=Except("cpu"))
SELECTS = Only(selection=("head", "uniform", "attended"))
"""What has no effect where every row is kept."""


@dataclass(frozen=True, kw_only=True)
class GenerationConfig(Checked):
    """What one request asks for."""

    gen_length: AnswerTokens = 256
    """Tokens to generate."""
    block_length: AnswerTokens = 32
    """Tokens per diffusion block."""
    steps: AnswerTokens = 256
    """Denoising steps, over all blocks."""
    temperature: Annotated[Level, MEASURED] = 0.0
    """0 is greedy."""
    top_p: Annotated[Proportion, MEASURED, DRAWS] = 1.0
    """Sample from the shortest prefix of the most probable tokens whose probabilities sum to more; 1 is all."""
    top_k: Annotated[int, Range(1, 2**31 - 1), MEASURED, DRAWS] | None = None
    """Sample from this many tokens at most, after top_p."""
    alg_temp: Annotated[Level, MEASURED, Needs(threshold=None, factor=None)] = 0.0
    """Dream: draw the positions to commit from softmax(confidence / alg_temp); 0 takes the most confident."""
    threshold: Annotated[Proportion, MEASURED, Needs(factor=None)] | None = None
    """Parallel decoding: commit every masked token of a block that is at least this confident, and the best one always."""
    factor: Annotated[float, Range(above=0, most=1e6), MEASURED] | None = None
    """Fast-dLLM's other rule of parallel decoding: the j-th most confident token needs confidence 1 - factor / (j + 1)."""
    remasking: Annotated[Remasking, MEASURED] = "low_confidence"
    """LLaDA: which tokens are committed first."""
    cfg_scale: Annotated[Level, MEASURED] = 0.0
    """LLaDA's classifier-free guidance, 0 is none: logits = un + (cfg_scale + 1) (cond - un), un with the prompt masked."""
    seed: Annotated[Seed, Fixed] = 0
    stop_at_eos: bool = False
    """End at the first finished block that holds a stop token; what is left of gen_length becomes end-of-text."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            self.steps >= self.num_blocks,
            f"steps={self.steps} is fewer than the {self.num_blocks} blocks of gen_length={self.gen_length}: "
            f"raise steps or block_length",
        )

    @property
    def num_blocks(self) -> int:
        return -(-self.gen_length // self.block_length)

    @property
    def is_parallel(self) -> bool:
        """Whether the model's confidences, not the schedule, decide how many tokens a step commits."""
        return self.threshold is not None or self.factor is not None


@dataclass(frozen=True, kw_only=True)
class Retention(Checked):
    """How many context rows survive a Refresh, and by what score."""

    retention_ratio: Annotated[Proportion, SELECTS] = 0.5
    """Proportion of context rows kept."""
    pool_kernel: Annotated[int, Range(1, 2**16 - 1), SELECTS] = 3
    """Width of the max-pool over scores; odd, 1 is none."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.pool_kernel % 2 == 1, f"pool_kernel={self.pool_kernel} must be odd (1 means no pooling)")


@dataclass(frozen=True, kw_only=True)
class SparsityConfig(Retention):
    """Which context rows survive a Refresh (dLLM-Serve §4.5)."""

    selection: Selection = "head"
    """Which rows are kept: head keeps each head's own top-k, uniform one set for all heads of a layer (Sparse-dLLM), attended one set too, of
    the largest attention probabilities (ours), dense every row."""
    refresh_delay: Annotated[int, Range(0, 1)] = 1
    """1: the cache is built at a block's second step (as published); 0: at its first, with a single Refresh a block."""
    min_kept: Annotated[int, Range(0, 1), Fixed] = 1
    """Rows kept at the least; Sparse-dLLM's floor may reach 0."""
    whole_layer: Annotated[int, Range(0, 2**10), SELECTS] | None = None
    """A layer, counted from 0, that keeps every row whatever the others keep; the pool then has room for all rows in every layer."""

    def check_layers(self, num_layers: int) -> None:
        require(
            self.whole_layer is None or self.whole_layer < num_layers,
            f"whole_layer={self.whole_layer} is none of the model's layers: give one from 0 to {num_layers - 1}",
        )

    def kept_rows(self, num_outside: int) -> int:
        """Rows of the pool for ``num_outside`` context rows, the same in every layer: those selected, or all where one layer keeps them."""
        return num_outside if self.whole_layer is not None else self.selected_rows(num_outside)

    def selected_rows(self, num_outside: int) -> int:
        """Rows that a layer which selects retains of N context rows: floor(r * N), at least ``min_kept`` of them."""
        if self.selection == "dense":
            return num_outside
        return min(num_outside, max(self.min_kept, int(num_outside * self.retention_ratio)))

    def mean_rows(self, num_outside: int, num_layers: int) -> int:
        """Rows of N that a layer retains on average, rounded up."""
        selected = self.selected_rows(num_outside)
        return selected if self.whole_layer is None else selected - (selected - num_outside) // num_layers


@dataclass(frozen=True, kw_only=True)
class DecodeConfig(Checked):
    """How a system ranks and counts the tokens it commits; the defaults are LLaDA's sampler.

    ``quota``: ``even`` shares a block's masks over its steps, ``timestep`` follows Dream's schedule,
    ``origin`` commits each mask with the schedule's probability. ``confidence_of`` is where confidences
    are read: from the model's own distribution, or from the one tokens are drawn from, with its
    temperature, top_p and top_k (Dream's sampler). ``first_step`` is a block's first,
    full forward: ``first_and_ranked`` commits the block's first position whatever its confidence and
    ranks the rest of the quota, ``first_position`` commits that position alone.
    """

    confidence: Confidence = "max_prob"
    confidence_of: ConfidenceOf = "model"
    confidence_dtype: ConfidenceDtype = "native"
    quota: Quota = "even"
    first_step: FirstStep = "ranked"
    tells_confidences: bool = False
    """Whether the host waits after every step to hear how sure the model was of what it committed: a refresh rule asks."""


@dataclass(frozen=True, kw_only=True)
class EngineConfig(Checked):
    """One serving engine. Token counts are query tokens of one packed step."""

    max_num_batched_tokens: Annotated[Tokens, PACKED] = 16384
    """Query tokens per packed step."""
    max_num_logits: Annotated[Tokens, PACKED] = 2048
    """Logit rows alive at once."""
    logit_rows: Annotated[LogitRows, PACKED] = "decomposed"
    """Logits of the wanted rows, in chunks of max_num_logits (decomposed, §4.3), or of every query row of a step at once, as a
    standard engine makes them (monolithic, §3.2)."""
    max_num_seqs: Annotated[int, Range(1, 2**14)] = 512
    """Requests running at once; each takes a slot, used or not."""
    max_model_len: Annotated[int, Range(1, 2**20), Fixed] = 4096
    scheduler: Annotated[str, PACKED, Names("phase", "request", "lookahead")] = "phase"
    """phase, request, lookahead, or a class of one's own as module:NAME."""
    sparsity: Annotated[SparsityConfig, Fixed] = field(default_factory=SparsityConfig)
    settling: Annotated[Settling, Fixed] = field(default_factory=Settling)
    decode: Annotated[DecodeConfig, Fixed] = field(default_factory=DecodeConfig)
    tie_policy: Annotated[TiePolicy, MEASURED] = "stable"
    """Among equal confidences: stable, or parity (the library's order of ties)."""
    attention_backend: Annotated[AttentionName, MEASURED, PACKED] = "auto"
    """Attention of measured packed steps."""
    cuda_graphs: Annotated[bool, MEASURED, PACKED, ON_CUDA] = True
    """Replay the forwards of small Reuse steps, on CUDA, where the attention backend allows it."""
    fused_kernels: Annotated[bool, MEASURED, ON_CUDA] = True
    """Triton kernels for 16-bit models, on CUDA, where Triton is installed."""
    suppress_mask_token: Annotated[bool, Fixed] = True
    """Never commit the mask id itself; confidences of other tokens are not affected."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            self.settling == Settling() or self.tie_policy == "stable",
            f"tie_policy={self.tie_policy!r} has no effect with settle_after={self.settling.settle_after} and "
            f"full_every={self.settling.full_every}, which no published sampler has: leave it out",
        )
        require(
            self.suppress_mask_token or not self.settling.settles,
            f"settle_after={self.settling.settle_after} needs suppress_mask_token: a mask that is committed never settles",
        )


@dataclass(frozen=True, kw_only=True)
class ServeOptions:
    sparsity: SparsityConfig = field(default_factory=SparsityConfig)
    settling: Settling = field(default_factory=Settling)
    preset: Annotated[Preset, Only(family="llada")] | None = None
    """Knobs set together, each of which may be given beside it: exact keeps and computes every row after one Refresh a block, balanced
    leaves rows out, fast also commits by a threshold."""
    compat: Annotated[Compat, Only(family="llada"), Needs(refresh_delay=1)] = "paper"
    """paper, or upstream for its first-token rule."""
    refresh_rule: str | None = None
    """When to refresh the cache: a class of one's own as module:NAME, its fields as knobs, in place of refresh_delay."""
