"""Every knob of the diffusion-LLM engine; frozen, keyword-only, checked when built."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, get_args

from engines.bounds import check_fields
from engines.errors import require

Selection = Literal["head", "uniform", "dense"]
SCHEDULER_NAMES = ("phase", "request", "lookahead")
LogitRows = Literal["decomposed", "monolithic"]
TiePolicy = Literal["stable", "parity"]
Remasking = Literal["low_confidence", "random"]
Confidence = Literal["max_prob", "margin", "neg_entropy"]
ConfidenceOf = Literal["model", "sampler"]
ConfidenceDtype = Literal["native", "float64"]
AttentionName = Literal["auto", "flash-attn", "torch-varlen", "sdpa-padded", "sdpa"]
Quota = Literal["even", "timestep", "origin"]
FirstStep = Literal["ranked", "first_and_ranked", "first_position"]


def _one_of(name: str, value: str, alias: object) -> None:
    allowed = get_args(alias)
    require(value in allowed, f"{name}={value!r} is unknown: use one of {', '.join(allowed)}")


@dataclass(frozen=True, kw_only=True)
class GenerationConfig:
    """What one request asks for.

    ``steps`` is the total over all blocks; ``threshold`` switches to parallel decoding (every
    masked position of the block whose confidence reaches it is committed, the best one always).
    """

    gen_length: int = 256
    block_length: int = 32
    steps: int = 256
    temperature: float = 0.0
    top_p: float = 1.0
    """Sample from the shortest prefix of the most probable tokens whose probabilities sum to more; 1 is all."""
    top_k: int | None = None
    """Sample from this many tokens at most, after ``top_p``."""
    alg_temp: float = 0.0
    """Dream: draw the positions to commit from softmax(confidence / alg_temp); 0 takes the most confident."""
    threshold: float | None = None
    factor: float | None = None
    """Fast-dLLM's other parallel rule: the j-th most confident token needs confidence 1 - factor / (j + 1)."""
    remasking: Remasking = "low_confidence"
    cfg_scale: float = 0.0
    """Classifier-free guidance: logits = un + (cfg_scale + 1) (cond - un), un with the prompt masked."""
    seed: int = 0
    stop_at_eos: bool = False
    """End at the first finished block that holds a stop token; what is left of gen_length becomes end-of-text."""

    def __post_init__(self) -> None:
        check_fields(self)
        require(self.gen_length >= 1, f"gen_length={self.gen_length} must be at least 1")
        require(self.block_length >= 1, f"block_length={self.block_length} must be at least 1")
        require(
            self.steps >= self.num_blocks,
            f"steps={self.steps} is fewer than the {self.num_blocks} blocks of gen_length={self.gen_length}: "
            f"raise steps or block_length",
        )
        require(
            0 <= self.temperature < float("inf"), f"temperature={self.temperature} must be a finite number, 0 or above"
        )
        require(0 < self.top_p <= 1, f"top_p={self.top_p} must be in (0, 1]")
        require(self.top_k is None or self.top_k >= 1, f"top_k={self.top_k} must be at least 1")
        for name, is_set in (("top_p", self.top_p < 1), ("top_k", self.top_k is not None)):
            require(
                self.temperature > 0 or not is_set,
                f"{name}={getattr(self, name)} has no effect at temperature=0, which draws nothing: raise the "
                f"temperature or leave it out",
            )
        require(0 <= self.alg_temp < float("inf"), f"alg_temp={self.alg_temp} must be a finite number, 0 or above")
        require(
            self.alg_temp == 0 or not self.is_parallel,
            f"alg_temp={self.alg_temp} has no effect with parallel decoding, which commits by level: leave it out",
        )
        require(self.threshold is None or 0 < self.threshold <= 1, f"threshold={self.threshold} must be in (0, 1]")
        require(
            self.factor is None or 0 < self.factor < float("inf"), f"factor={self.factor} must be above 0 and finite"
        )
        require(
            self.threshold is None or self.factor is None,
            f"threshold={self.threshold} and factor={self.factor} are two rules for one thing: give one of them",
        )
        _one_of("remasking", self.remasking, Remasking)
        require(0 <= self.cfg_scale < float("inf"), f"cfg_scale={self.cfg_scale} must not be negative, and finite")

    @property
    def num_blocks(self) -> int:
        return -(-self.gen_length // self.block_length)

    @property
    def is_parallel(self) -> bool:
        """Whether the model's confidences, not the schedule, decide how many tokens a step commits."""
        return self.threshold is not None or self.factor is not None


@dataclass(frozen=True, kw_only=True)
class SparsityConfig:
    """Which context rows survive a Refresh (dLLM-Serve §4.5).

    ``selection``: ``head`` keeps each head's own top-k, ``uniform`` one set for all heads of a
    layer (Sparse-dLLM), ``dense`` every row. ``pool_kernel`` 1 means no pooling.
    ``refresh_delay`` 1 builds the cache at a block's second step (as published), 0 at its first
    (a single Refresh per block).
    """

    selection: Selection = "head"
    retention_ratio: float = 0.5
    pool_kernel: int = 3
    refresh_delay: int = 1
    min_kept: int = 1
    """Rows kept at the least; Sparse-dLLM's floor may reach 0."""

    def __post_init__(self) -> None:
        check_fields(self)
        _one_of("selection", self.selection, Selection)
        require(0 < self.retention_ratio <= 1, f"retention_ratio={self.retention_ratio} must be in (0, 1]")
        require(
            self.pool_kernel >= 1 and self.pool_kernel % 2 == 1,
            f"pool_kernel={self.pool_kernel} must be odd and at least 1 (1 means no pooling)",
        )
        require(self.min_kept in (0, 1), f"min_kept={self.min_kept} must be 0 or 1")
        require(self.refresh_delay in (0, 1), f"refresh_delay={self.refresh_delay} must be 0 or 1")

    def kept_rows(self, num_outside: int) -> int:
        """Rows retained of ``num_outside`` context rows: floor(r * N), at least ``min_kept`` of them."""
        if self.selection == "dense":
            return num_outside
        return min(num_outside, max(self.min_kept, int(num_outside * self.retention_ratio)))


@dataclass(frozen=True, kw_only=True)
class DecodeConfig:
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

    def __post_init__(self) -> None:
        _one_of("confidence", self.confidence, Confidence)
        _one_of("confidence_of", self.confidence_of, ConfidenceOf)
        _one_of("confidence_dtype", self.confidence_dtype, ConfidenceDtype)
        _one_of("quota", self.quota, Quota)
        _one_of("first_step", self.first_step, FirstStep)


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """One serving engine. Token counts are query tokens of one packed step."""

    max_num_batched_tokens: int = 16384
    max_num_logits: int = 2048
    logit_rows: LogitRows = "decomposed"
    """``decomposed``: logits of the wanted rows, in chunks of max_num_logits (§4.3); ``monolithic``: of every query
    row of a step at once, as a standard engine makes them (§3.2)."""
    max_num_seqs: int = 512
    max_model_len: int = 4096
    scheduler: str = "phase"
    """One of SCHEDULER_NAMES, or a class of one's own as ``module:NAME``."""
    sparsity: SparsityConfig = field(default_factory=SparsityConfig)
    decode: DecodeConfig = field(default_factory=DecodeConfig)
    tie_policy: TiePolicy = "stable"
    attention_backend: AttentionName = "auto"
    """Attention of the torch executor (``engines.attention``)."""
    cuda_graphs: bool = True
    """Capture the forwards of small Reuse steps, on CUDA, where the attention backend allows it."""
    fused_kernels: bool = True
    """Triton kernels for 16-bit models, on CUDA, where Triton is installed."""
    suppress_mask_token: bool = True
    """Never commit the mask id itself; confidences of other tokens are not affected."""

    def __post_init__(self) -> None:
        check_fields(self)
        require(
            self.scheduler in SCHEDULER_NAMES or ":" in self.scheduler,
            f"scheduler={self.scheduler!r} is unknown: use one of {', '.join(SCHEDULER_NAMES)}",
        )
        _one_of("logit_rows", self.logit_rows, LogitRows)
        _one_of("tie_policy", self.tie_policy, TiePolicy)
        _one_of("attention_backend", self.attention_backend, AttentionName)
        for name in ("max_num_batched_tokens", "max_num_logits", "max_num_seqs", "max_model_len"):
            require(getattr(self, name) >= 1, f"{name}={getattr(self, name)} must be at least 1")
