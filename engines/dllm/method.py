"""How systems differ that share the phase machine, the schedulers and the executors.

A ``Method`` is one published way to sample from a diffusion LLM, declared once: its names, the options it heeds, and how it runs. For a
model family and options it makes a ``Sampler``: when the cache is refreshed, which rows it keeps, and how tokens are ranked. dLLM-Serve's
own method (§4.5) is for continuous batching alone.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields, is_dataclass, replace
from importlib import import_module
from typing import TYPE_CHECKING, Any, ClassVar

from engines.cost.roofline import StepPrice
from engines.data import ask, load_named
from engines.dllm.config import (
    Cut,
    DecodeConfig,
    DelayedCache,
    EngineConfig,
    GenerationConfig,
    RefreshRule,
    ServeOptions,
    Settling,
    SparsityConfig,
    TiePolicy,
    check_settling,
)
from engines.dllm.engine import Engine
from engines.dllm.memory import cache_rows
from engines.dllm.plan import Request
from engines.dllm.scheduling import KvPool, NoKnobs, PhaseScheduler
from engines.dllm.simulated import RooflineExecutor
from engines.errors import UserError, require
from engines.knobs import knobs_of, with_knobs
from engines.models.shape import ModelShape

if TYPE_CHECKING:
    from engines.dllm.executor.torch import TorchExecutor
    from engines.models.protocol import DiffusionModel


Options = Mapping[str, Any]
"""Options that were asked for; the rest keep the method's defaults."""

DENSE = SparsityConfig(selection="dense")
EVERYONES = frozenset({"gen_length", "steps", "temperature", "top_p", "top_k", "stop_at_eos"})
"""Generation settings that every method heeds; the others are options of some methods."""
BLOCKS = frozenset({"block_length"})
PARALLEL = frozenset({"threshold", "factor"})
SERVED: dict[str, Any] = {"suppress_mask_token": True, "tie_policy": "stable"}
"""Settings of a sampler that never commits the mask, whatever its published code does, and takes the lower of equal places."""
LEAP = frozenset({"anchor_threshold", "neighbor_threshold", "radius"})


@dataclass(frozen=True, kw_only=True)
class Sampler:
    """A method for one model family, with its options."""

    rule: RefreshRule
    sparsity: SparsityConfig = DENSE
    settling: Settling = field(default_factory=Settling)
    cut: Cut = field(default_factory=Cut)
    decode: DecodeConfig = field(default_factory=DecodeConfig)
    exact_steps: bool = True
    """Whether every step of a block runs even if nothing is left to commit, as published."""
    suppress_mask_token: bool = False
    tie_policy: TiePolicy = "parity"
    """The default is for comparisons: the library's own order of ties, which the published samplers get."""
    counts_empty_forward: bool = False
    """The published code spends one more forward on a block that its first forward completed. Ours does not, but reports the published
    count."""

    def checked(self) -> "Sampler":
        """Return the sampler itself; refuse settings that leave out rows that the rule and the cache need."""
        rule = self.rule
        check_settling(self.settling, window=rule.window, selection=self.sparsity.selection, caches=rule.caches)
        return self

    def reduction_bytes_per_value(self, dtype_bytes: int) -> int:
        """Bytes alive per logit while logits are reduced to (token, confidence), beside the logits themselves. They hold a softmax in their
        own dtype, or a float64 copy and its softmax. Dream's other confidences also hold its logarithm and their product."""
        if self.decode.confidence_dtype == "float64":
            return 16
        return dtype_bytes if self.decode.confidence == "max_prob" else 3 * dtype_bytes

    def reduction_traffic_per_value(self, dtype_bytes: int) -> int:
        """Bytes per logit that published code reads and writes in those copies, besides writing logits and reading the argmax. It stores a
        softmax, or a float64 copy and its softmax. Dream's other confidences also need the logarithm, the product and their sum."""
        if self.decode.confidence_dtype == "float64":
            return dtype_bytes + 8 + 8 + 8
        return (2 if self.decode.confidence == "max_prob" else 8) * dtype_bytes

    def rows_of_request(self, total_len: int, generation: GenerationConfig) -> int:
        """Return the cache rows that a request of ``total_len`` tokens holds for life; 0 without a cache."""
        return cache_rows(total_len, generation, self.sparsity, self.rule.window) if self.rule.caches else 0


def rule_class(name: str) -> type:
    """Load a user's refresh rule, a dataclass whose fields have defaults. Raises UserError for any other."""
    rule_type = load_named("refresh rule", name, attributes=("phase", "caches", "window"))
    if not (isinstance(rule_type, type) and is_dataclass(rule_type)):
        raise UserError(f"refresh_rule={name!r} is no dataclass: make it one, whose fields are its knobs")
    bare = [knob.name for knob in fields(rule_type) if knob.default is MISSING and knob.default_factory is MISSING]
    require(not bare, f"refresh_rule={name!r} has a field {bare[0] if bare else ''!r} without a default: give it one")
    return rule_type


class Method(ABC):
    name: ClassVar[str]
    title: ClassVar[str]
    heeds: ClassVar[Mapping[str, frozenset[str]]]
    """Model family -> generation settings that have an effect there, beside ``EVERYONES``; any other is refused."""
    own: ClassVar[type] = NoKnobs
    """A dataclass whose fields are the method's own options; those of one family are ``Only(family=...)``."""
    torch_executors: ClassVar[Mapping[str, str]] = {"packed": "engines.dllm.executor.compose:packed_executor"}
    """Batching -> ``module:NAME`` of the executor: a simulation never loads it, nor depends on its code."""

    def options_in(self, requested: Mapping[str, Any]) -> dict[str, Any]:
        """Return the given knobs that only some methods heed."""
        names = knobs_of(GenerationConfig).keys() - EVERYONES
        for kind in (self.own, *self.plugged_in(requested)):
            names |= knobs_of(kind).keys()
        return {name: value for name, value in requested.items() if name in names}

    def plugged_in(self, requested: Mapping[str, Any]) -> tuple[type, ...]:
        """Return the settings classes of the policies that the given knobs name."""
        named = requested.get("refresh_rule") if "refresh_rule" in knobs_of(self.own) else None
        return () if named is None else (rule_class(named),)

    def sampler(self, family: str, options: Options) -> Sampler:
        if family not in self.heeds:
            raise UserError(
                f"system={self.name!r} has no method for a {family} model: use a {' or '.join(self.heeds)} checkpoint"
            )
        knobs, plugged = knobs_of(self.own), {n: kind for kind in self.plugged_in(options) for n in knobs_of(kind)}
        for name, value in options.items():
            require(
                name in self.heeds[family] or name in knobs or name in plugged,
                f"{name}={value!r} has no effect with system={self.name!r} on a {family} model: leave it out",
            )
        own_options = {name: value for name, value in options.items() if name in knobs}
        sampler = self._sampler(family, with_knobs(self.own(), own_options, family=family), options)
        if (named := options.get("refresh_rule")) is None:
            return sampler.checked()
        require(
            "refresh_delay" not in options, f"refresh_delay has no effect with refresh_rule={named!r}: leave it out"
        )
        rule = with_knobs(ask(rule_class(named)), {name: value for name, value in options.items() if name in plugged})
        tells = "confidences" in getattr(rule, "needs", ())
        decode = replace(sampler.decode, tells_confidences=tells)
        return replace(sampler, rule=rule, decode=decode).checked()

    @abstractmethod
    def _sampler(self, family: str, own: Any, options: Options) -> Sampler:
        """Make the sampler; ``own`` holds the method's settings, with the ``options`` that were asked for."""

    def has_blocks(self, family: str, options: Options) -> bool:
        """Whether the method denoises block by block, not the whole answer at once."""
        return True

    def generation(
        self, family: str, options: Options, generation: GenerationConfig, *, tie_policy: str | None = None
    ) -> GenerationConfig:
        """Return the generation settings as the method runs them. Raises UserError for those without effect."""
        if not self.has_blocks(family, options):
            require(
                not generation.stop_at_eos,
                f"stop_at_eos=True has no effect with system={self.name!r} here, whose loop has no blocks to stop after: "
                f"leave it out",
            )
            generation = replace(generation, block_length=generation.gen_length)
        require(
            not generation.stop_at_eos or generation.num_blocks > 1,
            f"stop_at_eos=True has no effect on a single block of gen_length={generation.gen_length}, where nothing "
            f"follows: leave it out or use a smaller block_length",
        )
        generation = self._run_as(family, options, generation)
        require(
            not (generation.is_parallel and tie_policy == "parity"),
            "tie_policy='parity' has no effect with parallel decoding, which commits by level: leave it out",
        )
        return generation

    def _run_as(self, family: str, options: Options, generation: GenerationConfig) -> GenerationConfig:
        """Return the settings with the method's own defaults; refuse those that its code does not run."""
        return generation

    # ---- packed steps, logits in chunks ---------------------------------------------------

    def packed(self, sampler: Sampler, *, is_simulated: bool) -> Sampler:
        """Return the sampler as continuous batching runs it; refuse one that it cannot run."""
        return sampler

    def cache_row_bytes(self, shape: ModelShape) -> int:
        """Bytes of one token's K and V in the cache, over all layers."""
        return shape.kv_bytes_per_token

    def packed_roofline(self, roofline: StepPrice, config: EngineConfig, sampler: Sampler) -> RooflineExecutor:
        return RooflineExecutor(roofline, config)

    def packed_torch(
        self, model: "DiffusionModel", config: EngineConfig, kv_rows: int, *, block_length: int, **options: Any
    ) -> "TorchExecutor":
        """Make the executor of packed steps; ``options`` are those of ``packed_executor``."""
        executor = self.torch_executor("packed")(model, config, kv_rows, **options)
        executor.prepare(block_length)
        return executor  # type: ignore[no-any-return]

    def alone(
        self, model: "DiffusionModel", config: EngineConfig, sampler: Sampler, request: Request, **options: Any
    ) -> Engine:
        """Make an engine whose memory is sized for one request; ``options`` are the executor's."""
        rows = sampler.rows_of_request(request.total_len, request.generation)
        scheduler = PhaseScheduler(config, KvPool(rows), sampler.rule, exact_steps=sampler.exact_steps)
        return Engine(scheduler, self.torch_executor("packed")(model, config, rows, num_slots=1, **options))

    def torch_executor(self, batching: str) -> Any:
        module, _, name = self.torch_executors[batching].partition(":")
        return getattr(import_module(module), name)


_EXACT: Options = {"selection": "dense", "refresh_delay": 0}
_BALANCED: Options = {**_EXACT, "settle_after": 1, "renew_at": 2, "full_every": 4}
PRESETS: Mapping[str, Options] = {
    "exact": _EXACT,
    "balanced": _BALANCED,
    "trimmed": {**_BALANCED, "suffix": "gaussian"},
    "fast": {**_BALANCED, "full_every": 8},
}
FAST_THRESHOLD = 0.9


class DllmServe(Method):
    name = "dllm-serve"
    title = "dLLM-Serve"
    heeds = {"llada": BLOCKS | PARALLEL | LEAP, "dream": BLOCKS | PARALLEL}
    own = ServeOptions

    def sampler(self, family: str, options: Options) -> Sampler:
        preset = dict(PRESETS.get(str(options.get("preset")), {}))
        if "refresh_rule" in options:
            preset.pop("refresh_delay", None)
        return super().sampler(family, {**preset, **options})

    def _run_as(self, family: str, options: Options, generation: GenerationConfig) -> GenerationConfig:
        if options.get("preset") == "fast" and not generation.is_parallel:
            return replace(generation, threshold=FAST_THRESHOLD)
        return generation

    def _sampler(self, family: str, own: ServeOptions, options: Options) -> Sampler:
        sparsity, settling = own.sparsity, own.settling
        require(
            settling.full_every == 1 or sparsity.refresh_delay == 0 or own.refresh_rule is not None,
            f"full_every={settling.full_every} needs blocks that begin with the cache's Refresh, and refresh_delay=1 computes them in full "
            f"before it: add refresh_delay=0",
        )
        # Dream shifts logits inside the computed rows, so a block's first position is right only in a full forward, which always commits
        # it. Upstream does so on LLaDA too, in its first, uncached step.
        commits_first = family == "dream" or own.compat == "upstream"
        return Sampler(
            rule=DelayedCache(delay=sparsity.refresh_delay),
            sparsity=sparsity,
            settling=settling,
            cut=own.cut,
            decode=DecodeConfig(first_step="first_and_ranked" if commits_first else "ranked"),
            exact_steps=False,
            suppress_mask_token=True,
            tie_policy="stable",
        )


DLLM_SERVE = DllmServe()
