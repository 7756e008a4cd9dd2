"""Every knob of the diffusion-LLM engine: frozen, keyword-only, checked when built.

First come the things that knobs choose among: the phases of a denoising step, and the rules that decide each step's phase (dLLM-Serve
§2.3).
"""

from collections.abc import Collection
from copy import deepcopy
from dataclasses import dataclass, field
from enum import Enum
from itertools import pairwise
from random import Random
from statistics import NormalDist
from typing import Annotated, Literal, NamedTuple, Protocol, get_args, runtime_checkable

from engines.data import ask
from engines.errors import RunError, UserError, require
from engines.knobs import SOMETHING, Checked, Except, Fixed, Names, Needs, Only, Proportion, Range, Seed, Tokens


class Phase(Enum):
    """The kind of forward that a step runs. FULL and BUILD are Refreshes: all T positions are query rows. REUSE computes the block only.
    PARTIAL lies between, and runs as a Reuse does."""

    FULL = "full"
    """Full forward; nothing is cached."""
    BUILD = "build"
    """Full forward, in which every layer selects its context rows and packs them into the cache."""
    REUSE = "reuse"
    """Block rows against the packed context and their own fresh keys and values."""
    PARTIAL = "partial"
    """A BUILD whose rows begin at the previous block: earlier rows keep their keys and values. ``Settling.full_every`` turns some of a
    rule's BUILDs into these."""

    is_refresh: bool

    def __init__(self, label: str) -> None:
        self.is_refresh = label in ("full", "build")


Window = Literal["block", "suffix"]
"""The rows that a Reuse step recomputes: the active block, or everything from its start to the end."""


class Learned(NamedTuple):
    """The facts of a step that a rule that chooses rows may learn (``engines.dllm.rows``)."""

    places: tuple[int, ...]
    """Positions of the tokens that the step committed; in a simulation, the first ones that it could commit."""
    confidences: tuple[float, ...] = ()
    """The confidence at each place of the block, -inf where none was asked for. Like ``importance``, empty unless the rule needs
    attention."""
    importance: tuple[float, ...] = ()
    """The importance of each position, by attention rollout through the step's layers."""


class Seen(NamedTuple):
    """The result of a step for one request, for a rule that asks for it (``SeeingRule``)."""

    block: int
    step_in_block: int
    phase: Phase
    committed: int
    masks_left: int
    """Masks in the block after the step."""
    confidences: tuple[float, ...]
    """The values that ranked the committed tokens, best first: the model's probabilities, unless the method ranks by another measure."""
    learned: Learned | None = None
    """The facts for a rule that chooses rows."""


class RefreshRule(Protocol):
    """A cache policy's schedule. As state machines, cached methods differ in this alone."""

    @property
    def caches(self) -> bool: ...

    @property
    def window(self) -> Window: ...

    def phase(self, step_in_block: int) -> Phase: ...


@runtime_checkable
class SeeingRule(RefreshRule, Protocol):
    """A rule that decides by what a request's steps did. Each request has its own rule, which may keep state: the one that ``of(request)``
    makes, or else a copy. We call ``see`` after each step of the request, before we ask for its next phase."""

    needs: Collection[str]
    """Holds ``confidences`` if the rule heeds them; empty if the counts are enough."""

    def see(self, seen: Seen) -> None: ...


def sees(rule: RefreshRule) -> bool:
    """Whether the rule decides as it goes. Looking for one attribute first is much faster than ``isinstance``."""
    return hasattr(rule, "see") and isinstance(rule, SeeingRule)


def _fault(rule: RefreshRule, phase: object, *, has_cache: bool, at: str = "") -> str | None:
    """Return why no step can run the phase that a rule answered, or None if one can."""
    if not isinstance(phase, Phase) or phase is Phase.PARTIAL:
        return f"answers {phase!r:.80}{at or ','} which is no Phase of FULL, BUILD and REUSE"
    if phase is Phase.REUSE and not has_cache:
        return f"reuses a cache{at} before one was built"
    if phase is Phase.BUILD and not rule.caches:
        return f"builds a cache{at or ','} and says that it has none"
    return None


def check_rule(rule: RefreshRule, num_steps: int) -> None:
    """Raise UserError for a rule that reuses what was not cached in a block of ``num_steps`` steps. Nobody can check beforehand a rule that
    decides by what a model gives (``needs``)."""
    name = type(rule).__name__
    for option, value, allowed in (("caches", rule.caches, (True, False)), ("window", rule.window, get_args(Window))):
        if value not in allowed:
            raise UserError(f"refresh rule {name} has {option}={value!r}: give one of {', '.join(map(str, allowed))}")
    if getattr(rule, "needs", None) or sees(rule):
        return
    has_cache, copy = False, deepcopy(rule)  # the rule may count its calls
    for step in range(num_steps):
        phase = ask(copy.phase, step)
        if (fault := _fault(rule, phase, has_cache=has_cache, at=f" in step {step} of a block,")) is not None:
            raise UserError(f"refresh rule {name} {fault}")
        has_cache = has_cache or phase is Phase.BUILD


def is_constant(policy: object) -> bool:
    """Whether the policy can hold nothing that changes while it runs."""
    try:
        hash(policy)  # fails if one of its values can change
    except TypeError:
        return False
    return bool(getattr(getattr(policy, "__dataclass_params__", None), "frozen", False))


def check_phase(rule: RefreshRule, phase: object, *, has_cache: bool) -> None:
    """Raise RunError if a rule answers, in the middle of a run, a phase that no step can run."""
    if (fault := _fault(rule, phase, has_cache=has_cache)) is not None:
        raise RunError(f"refresh rule {type(rule).__name__} {fault}: correct it")


@dataclass(frozen=True, kw_only=True)
class DelayedCache:
    """Full steps until ``delay``, then one that builds the cache, then reuse.

    Delay 1 is Sparse-dLLM and dLLM-Serve; delay 0 with every row kept is Fast-dLLM's dual cache, and
    with the ``suffix`` window its prefix cache.
    """

    delay: int = 1
    window: Window = "block"
    caches: bool = True

    def phase(self, step_in_block: int) -> Phase:
        if step_in_block == self.delay:
            return Phase.BUILD
        return Phase.FULL if step_in_block < self.delay else Phase.REUSE


@dataclass(frozen=True, kw_only=True)
class NoCache:
    """Every step is a full forward (the LLaDA reference sampler)."""

    caches: bool = False
    window: Window = "block"

    def phase(self, step_in_block: int) -> Phase:
        return Phase.FULL


@dataclass(frozen=True, kw_only=True)
class Settling(Checked):
    """The rows that a step may leave out because their K and V are good enough as they are (ours). The defaults leave out nothing: a
    Refresh computes every row, and a Reuse step its window.

    A row's K and V follow from its own token and from what it attends to. When a mask becomes a token, its row changes, and the next step
    computes it once more. After that only its context changes the row, and a step may keep its K and V. dKV-Cache calls this delayed
    caching, over the whole answer. The same holds for the prompt and for older blocks when a later block refreshes.

    A row predicts its own token (LLaDA). If it predicts the next one (Dream), a mask needs the row before it, settled or not.
    """

    settle_after: Annotated[int, Range(1, 2**10), Only(family="llada")] | None = None
    """A Reuse step leaves out tokens of the block committed more than this many steps ago, which keep their K and V; none by default."""
    full_every: Annotated[int, Range(1, 2**17)] = 1
    """Every this many blocks a Refresh computes all rows. The others begin at the previous block, and earlier rows keep their K and V."""
    renew_at: Annotated[int, Range(0, 2**17), Needs(settle_after=SOMETHING)] = 0
    """The first step of a block that has this many masks left, or fewer, leaves out nothing; 0 for no such step."""

    @property
    def settles(self) -> bool:
        """Whether Reuse steps leave rows out."""
        return self.settle_after is not None

    def is_partial(self, block: int) -> bool:
        """Whether the Refresh that begins a block leaves out the rows before the previous block."""
        return block % self.full_every != 0

    def settled_before(self, masks: tuple[int, ...]) -> int:
        """Return the step before which the block's settled tokens were committed, 0 if none is settled. ``masks`` counts the block's masks
        at the start of each of its steps, the current step last."""
        if self.settle_after is None or len(masks) < 2 or masks[-1] <= self.renew_at < masks[-2]:
            return 0
        return max(0, len(masks) - 1 - self.settle_after)


def check_settling(settling: Settling, *, window: str, selection: str, caches: bool) -> None:
    """Refuse settings that the cache does not allow: rows that settle or are kept lie in it, at places that are known beforehand."""
    is_set = settling.settle_after is not None or settling.full_every > 1
    option = f"settle_after={settling.settle_after}" if settling.settles else f"full_every={settling.full_every}"
    require(caches or not is_set, f"{option} has no effect without a cache: leave it out")
    require(
        window == "block" or not is_set,
        f"{option} needs Reuse steps that compute the block alone, and those of this refresh rule compute what follows too: leave it out",
    )
    require(
        selection == "dense" or settling.full_every == 1,
        f"full_every={settling.full_every} needs every row of the context, and selection={selection!r} keeps some of each head: use "
        f"selection='dense'",
    )


@dataclass(frozen=True, kw_only=True)
class Cut(Checked):
    """Masks behind the active block that its steps leave out, as rows and as keys, as if they were not there. Each block keeps some, at
    their true positions, drawn anew from the request's seed alone.

    DPad (arXiv:2508.14148) had the idea, and draws the kept masks. Streaming-dLLM (arXiv:2601.17917) keeps the nearest ones and the last.
    """

    suffix: Annotated[Literal["whole", "gaussian", "uniform", "ends"], Only(family="llada")] = "whole"
    """Masks kept behind a block: whole keeps all, gaussian and uniform draw some (DPad), ends keeps the first ones and the last."""
    suffix_window: Annotated[int, Range(1, 2**17), Needs(suffix=("gaussian", "uniform", "ends"))] = 256
    """How many masks right behind a block may be kept."""
    suffix_k: Annotated[float, Range(above=0, most=1e3), Needs(suffix="gaussian")] = 4.0
    """How many standard deviations the window spans."""
    suffix_scale: Annotated[float, Range(above=0, most=1e3), Needs(suffix="gaussian")] = 2.0
    """A mask is kept with the normal density times this factor as its probability."""
    suffix_number: Annotated[int, Range(1, 2**17), Needs(suffix="uniform")] = 32
    """How many masks are drawn from the window."""
    suffix_kept: Annotated[str, Needs(suffix=("gaussian", "uniform"))] | None = None
    """Places of the answer to keep, as 8,9;16 for two blocks, instead of drawn ones; drawn by default."""

    @property
    def cuts(self) -> bool:
        return self.suffix != "whole"

    def kept(self, generation: "GenerationConfig", block: int) -> tuple[int, ...]:
        """Return the places of the answer behind ``block`` that it keeps."""
        end = min((block + 1) * generation.block_length, generation.gen_length)
        num_behind = generation.gen_length - end
        if self.suffix_kept is not None:
            blocks = self.suffix_kept.split(";")
            texts = filter(None, blocks[block].replace(" ", "").split(",")) if block < len(blocks) else ()
            places = tuple(int(text) if text.isdecimal() else -1 for text in texts)
            require(
                all(a < b for a, b in pairwise((end - 1, *places, generation.gen_length))),
                f"suffix_kept={self.suffix_kept!r} has places for block {block} that do not rise from {end} on: correct it",
            )
            return places
        draw, window = Random(f"{generation.seed} {block}"), min(num_behind, self.suffix_window)
        if self.suffix == "uniform":
            if self.suffix_number < num_behind:
                return tuple(end + d for d in sorted(draw.sample(range(window), min(self.suffix_number, window))))
        elif self.suffix == "ends":
            if num_behind > self.suffix_window:
                return (*range(end, end + window), generation.gen_length - 1)
        elif self.suffix == "gaussian":
            step = self.suffix_k / max(1, min(self.suffix_window, generation.gen_length) - 1)
            return tuple(end + d for d in range(window) if draw.random() < self.suffix_scale * _NORMAL.pdf(step * d))
        return tuple(range(end, generation.gen_length))


_NORMAL = NormalDist()

Selection = Literal["head", "uniform", "attended", "dense"]
LogitRows = Literal["decomposed", "monolithic"]
TiePolicy = Literal["stable", "parity"]
Remasking = Literal["low_confidence", "random"]
Confidence = Literal["max_prob", "margin", "neg_entropy"]
ConfidenceOf = Literal["model", "sampler"]
ConfidenceDtype = Literal["native", "float64"]
FirstStep = Literal["ranked", "first_and_ranked", "first_position"]


MOST_TOKENS = 2**17
"""The most tokens that one answer may have."""
AnswerTokens = Annotated[int, Range(1, MOST_TOKENS)]
Level = Annotated[float, Range(0, 1e6)]
MEASURED = Only(executor="torch")
"""Marks a setting that a simulation cannot heed: it does not know which ids a model gives, nor the device."""
DRAWS = Needs(temperature=Range(above=0))
"""Marks a setting that has no effect if the sampler draws nothing."""
PACKED = Only(reading="policy")
"""Marks a setting of packed batches. In any other reading baselines run static batches, which do not heed it."""
ON_CUDA = Only(device=Except("cpu"))
SELECTS = Only(selection=("head", "uniform", "attended"))
"""Marks a setting that has no effect if every row is kept."""


@dataclass(frozen=True, kw_only=True)
class GenerationConfig(Checked):
    """The generation settings of one request."""

    gen_length: AnswerTokens = 256
    """Tokens to generate."""
    block_length: AnswerTokens = 32
    """Tokens per diffusion block."""
    steps: AnswerTokens = 256
    """Denoising steps, over all blocks."""
    temperature: Annotated[Level, MEASURED] = 0.0
    """Sampling temperature; 0 is greedy."""
    top_p: Annotated[Proportion, MEASURED, DRAWS] = 1.0
    """Sample from the fewest most probable tokens whose probabilities sum to more than this; 1 keeps all tokens."""
    top_k: Annotated[int, Range(1, 2**31 - 1), MEASURED, DRAWS] | None = None
    """Sample from this many tokens at most, after top_p."""
    alg_temp: Annotated[Level, MEASURED, Needs(threshold=None, factor=None)] = 0.0
    """Dream: draw the positions to commit from softmax(confidence / alg_temp); 0 takes the most confident."""
    threshold: Annotated[Proportion, MEASURED, Needs(factor=None)] | None = None
    """Parallel decoding: commit every masked token of a block that has at least this confidence, and always the most confident one."""
    factor: Annotated[float, Range(above=0, most=1e6), MEASURED] | None = None
    """Fast-dLLM's other rule of parallel decoding: the j-th most confident token needs confidence 1 - factor / (j + 1)."""
    anchor_threshold: Annotated[Proportion, MEASURED, Needs(threshold=None, factor=None)] | None = None
    """LocalLeap (arXiv:2510.07081): a step's scheduled tokens with at least this confidence are anchors; 0.9 as published."""
    neighbor_threshold: Annotated[Proportion, MEASURED, Needs(anchor_threshold=SOMETHING)] = 0.75
    """LocalLeap: masks near an anchor that have at least this confidence are committed too."""
    radius: Annotated[int, Range(0, MOST_TOKENS), MEASURED, Needs(anchor_threshold=SOMETHING)] = 4
    """LocalLeap: how many places on either side of an anchor are near it."""
    remasking: Annotated[Remasking, MEASURED] = "low_confidence"
    """LLaDA: which tokens are committed first."""
    cfg_scale: Annotated[Level, MEASURED] = 0.0
    """LLaDA's classifier-free guidance, 0 is none: logits = un + (cfg_scale + 1) (cond - un), un with the prompt masked."""
    seed: Annotated[Seed, Fixed] = 0
    stop_at_eos: bool = False
    """End at the first finished block that holds a stop token; the rest of gen_length becomes end-of-text."""

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
        return self.parallel_by is not None

    @property
    def parallel_by(self) -> tuple[str, float] | None:
        """The setting that makes decoding parallel, and its value; None if the schedule decides."""
        values = {name: getattr(self, name) for name in ("threshold", "factor", "anchor_threshold")}
        return next(((name, value) for name, value in values.items() if value is not None), None)


@dataclass(frozen=True, kw_only=True)
class Retention(Checked):
    """How many context rows survive a Refresh, and by which score."""

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
    """Which context rows are kept. head: each head's own top-k. uniform: one set for all heads of a layer (Sparse-dLLM). attended: one set
    too, by the largest attention probabilities (ours). dense: every row."""
    refresh_delay: Annotated[int, Range(0, 1)] = 1
    """1: the cache is built at a block's second step (as published); 0: at its first, with a single Refresh per block."""
    min_kept: Annotated[int, Range(0, 1), Fixed] = 1
    """The least number of rows kept; Sparse-dLLM's floor may reach 0."""
    whole_layer: Annotated[int, Range(0, 2**10), SELECTS] | None = None
    """A layer, counted from 0, that keeps every row even if others do not; the pool then has room for all rows in every layer."""

    def check_layers(self, num_layers: int) -> None:
        require(
            self.whole_layer is None or self.whole_layer < num_layers,
            f"whole_layer={self.whole_layer} is none of the model's layers: give one from 0 to {num_layers - 1}",
        )

    def kept_rows(self, num_outside: int) -> int:
        """Return the pool rows for ``num_outside`` context rows, equal in all layers: those selected, or all if ``whole_layer`` is set."""
        return num_outside if self.whole_layer is not None else self.selected_rows(num_outside)

    def selected_rows(self, num_outside: int) -> int:
        """Return how many of N context rows a selecting layer retains: floor(r * N), at least ``min_kept``."""
        if self.selection == "dense":
            return num_outside
        return min(num_outside, max(self.min_kept, int(num_outside * self.retention_ratio)))

    def mean_rows(self, num_outside: int, num_layers: int) -> int:
        """Return how many of N context rows a layer retains on average, rounded up."""
        selected = self.selected_rows(num_outside)
        return selected if self.whole_layer is None else selected - (selected - num_outside) // num_layers


@dataclass(frozen=True, kw_only=True)
class DecodeConfig(Checked):
    """How a system ranks and counts the tokens it commits; the defaults are LLaDA's sampler.

    ``quota``: ``even`` shares a block's masks over its steps, ``timestep`` follows Dream's schedule, ``origin`` commits each mask with the
    schedule's probability. ``confidence_of``: confidences are read from the model's own distribution, or from the one that tokens are drawn
    from, with temperature, top_p and top_k (Dream's sampler). ``first_step`` is a block's first, full forward. ``first_and_ranked`` commits
    the block's first position whatever its confidence, and ranks the rest of the quota. ``first_position`` commits that position alone.
    """

    confidence: Confidence = "max_prob"
    confidence_of: ConfidenceOf = "model"
    confidence_dtype: ConfidenceDtype = "native"
    quota: Literal["even", "timestep", "origin"] = "even"
    first_step: FirstStep = "ranked"
    tells_confidences: bool = False
    """Whether a refresh rule needs the confidences of the committed tokens; the host then waits for them after every step."""
    relax: float = 0.0
    """Streaming-dLLM: after a block's first step, thresholds shrink by this factor times the share of known tokens among its rows."""
    learns: Literal["nothing", "places", "attention"] = "nothing"
    """The parts of ``Learned`` that a rule that chooses rows needs; the host waits for them after every step."""


@dataclass(frozen=True, kw_only=True)
class EngineConfig(Checked):
    """One serving engine. Token counts are query tokens of one packed step."""

    max_num_batched_tokens: Annotated[Tokens, PACKED] = 16384
    """Query tokens per packed step."""
    max_num_logits: Annotated[Tokens, PACKED] = 2048
    """Most logit rows in memory at once."""
    logit_rows: Annotated[LogitRows, PACKED] = "decomposed"
    """decomposed makes only the logits that are wanted, in chunks of max_num_logits (§4.3). monolithic makes those of every query row of a
    step at once, as a standard engine does (§3.2)."""
    max_num_seqs: Annotated[int, Range(1, 2**14)] = 512
    """Most requests that run at once; each has a slot, used or not."""
    max_model_len: Annotated[int, Range(1, 2**20), Fixed] = 4096
    scheduler: Annotated[str, PACKED, Names("phase", "request", "lookahead")] = "phase"
    """phase, request, lookahead, or your own class as module:NAME."""
    sparsity: Annotated[SparsityConfig, Fixed] = field(default_factory=SparsityConfig)
    settling: Annotated[Settling, Fixed] = field(default_factory=Settling)
    cut: Annotated[Cut, Fixed] = field(default_factory=Cut)
    decode: Annotated[DecodeConfig, Fixed] = field(default_factory=DecodeConfig)
    tie_policy: Annotated[TiePolicy, MEASURED] = "stable"
    """Which of equal confidences comes first: stable takes the lower position, parity the library's order of ties."""
    attention_backend: Annotated[
        Literal["auto", "flash-attn", "torch-varlen", "sdpa-padded", "sdpa"], MEASURED, PACKED
    ] = "auto"
    """Attention backend of measured packed steps."""
    cuda_graphs: Annotated[bool, MEASURED, PACKED, ON_CUDA] = True
    """Replay the forwards of small steps that build no cache as CUDA graphs, if the attention backend allows it."""
    fused_kernels: Annotated[bool, MEASURED, ON_CUDA] = True
    """Use Triton kernels for 16-bit models on CUDA, if Triton is installed."""
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
            self.tie_policy == "stable" or not (self.cut.cuts or self.decode.learns != "nothing"),
            "tie_policy='parity' is the library's order over rows that this rule leaves out: leave it out",
        )
        require(
            self.suppress_mask_token or not self.settling.settles,
            f"settle_after={self.settling.settle_after} needs suppress_mask_token: a mask that is committed never settles",
        )


@dataclass(frozen=True, kw_only=True)
class ServeOptions:
    sparsity: SparsityConfig = field(default_factory=SparsityConfig)
    settling: Settling = field(default_factory=Settling)
    cut: Cut = field(default_factory=Cut)
    preset: Annotated[Literal["exact", "balanced", "trimmed", "fast"], Only(family="llada")] | None = None
    """Sets several knobs, each of which you may still give. exact keeps and computes every row after one Refresh per block, balanced leaves
    rows out. trimmed also leaves out masks behind the block, fast commits by a threshold."""
    compat: Annotated[Literal["paper", "upstream"], Only(family="llada"), Needs(refresh_delay=1)] = "paper"
    """paper, or upstream for the first-token rule of the published code."""
    refresh_rule: str | None = None
    """When to refresh the cache: your own class as module:NAME, whose fields become knobs. It replaces refresh_delay."""
