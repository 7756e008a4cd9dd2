"""The models behind ``repro serve``, each a ``ServedModel``: diffusion LLMs, block-diffusion models and causal models."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from importlib import import_module
from typing import TYPE_CHECKING, Any, Self

from baselines.dllm.published import PublishedMethod
from engines.blockdiffusion.sequence import BlockAnswer, BlockRequest
from engines.dllm.config import GenerationConfig
from engines.dllm.method import EVERYONES
from engines.errors import UserError, require
from engines.knobs import knobs_of
from engines.machine import machine_memory_bytes
from engines.models.block_config import BLOCK_SHAPES, BLOCK_TYPES, SMALL_BLOCKS
from engines.models.chat import CausalText, load_causal_text, stored_ends
from engines.models.checkpoint import (
    PUBLISHED_CONFIGS,
    checkpoint_digest,
    checkpoint_dir,
    config_of,
    digest_of,
    stored_type,
)
from engines.models.qwen2_config import CAUSAL_SHAPES, CAUSAL_TYPES, CausalConfig, causal_config, tiny_causal
from engines.server.ar import ArGeneration
from engines.server.codec import Codec, IdsAlone, TextCodec
from engines.server.diffusion import BlockGeneration
from engines.server.protocol import Kind, ServedEngine, diffusion_fields
from engines.server.settings import DTYPE_BYTES, SYSTEM, ArSettings
from repro.families.block.settings import (
    DECODING_OF_CANVASES,
    EMBEDDED_DIRS,
    NAME,
    BlockKnobs,
    BlockSettings,
    settings_of_requests,
)
from repro.families.block.system import ON_TORCH, BlockDeployment
from repro.families.block.text import find_text
from repro.families.dllm.deployment import DllmDeployment
from repro.families.dllm.settings import DllmSettings
from repro.families.dllm.system import DllmSystem, dllm_system
from repro.prompt import check_prompt
from repro.runs.cell import Cell
from repro.runs.system import SYSTEMS

if TYPE_CHECKING:
    from engines.ar.torch.executor import PagedExecutor
    from engines.models.decoder import CausalModel

MOST_SETTINGS = 256
"""Distinct request settings whose check is cached."""

# -- diffusion LLMs ----------------------------------------------------------------------------------------

_OF_A_DLLM = ("steps", "block_length", "threshold", "factor", "alg_temp", "remasking", "cfg_scale")
"""Settings that a request may give in addition to those of OpenAI's API."""


@dataclass(frozen=True)
class DllmModel:
    """A ``ServedModel``. ``cell`` names the system, its platform and its knobs; ``name`` is the model name in requests."""

    cell: Cell
    name: str

    @classmethod
    def of(cls, *, system: str, platform: str, knobs: Mapping[str, Any], name: str | None) -> Self:
        """Raise UserError for a model that cannot be served."""
        chosen = dllm_system(system)
        merged = {"num_prompts": 1, **knobs}
        if isinstance(chosen.method, PublishedMethod):
            # Only this reading lets requests join between steps.
            merged.setdefault("reading", "policy")
        cell = Cell(system=system, dataset="requests", platform=platform, executor="torch", knobs=tuple(merged.items()))
        settings = chosen.settings(cell)
        if (
            chosen.method.has_blocks(config_of(settings.model).family, settings.options)
            and settings.generation.num_blocks > 1
        ):
            # This gives the engine the checkpoint's stop tokens; each request says whether it ends at one.
            cell = replace(cell, knobs=(*cell.knobs, ("stop_at_eos", True)))
        model = cls(cell, name or settings.model)
        length = settings.generation.gen_length
        require(
            length < model.max_model_len,
            f"gen_length={length} leaves no token for a prompt in max_model_len={model.max_model_len}: lower it",
        )
        _ = model._deployment
        return model

    @property
    def _system(self) -> DllmSystem:
        system = SYSTEMS.get(self.cell.system)
        assert isinstance(system, DllmSystem)
        return system

    @cached_property
    def settings(self) -> DllmSettings:
        return self._system.settings(self.cell)

    @property
    def facts(self) -> Mapping[str, Any]:
        settings = self.settings
        return {"system": self.cell.system, "root": settings.model, "fingerprint": settings.checkpoint_digest}

    @property
    def max_model_len(self) -> int:
        engine = self.settings.engine
        return min(
            engine.max_model_len, engine.max_num_batched_tokens, config_of(self.settings.model).max_sequence_length
        )

    def codec(self) -> Codec:
        """Only token ids if the weights are random, because these shapes have no tokenizer."""
        model = self.settings.model
        if model in PUBLISHED_CONFIGS:
            return IdsAlone()
        return TextCodec.of(checkpoint_dir(model, weights=False), config_of(model))

    @property
    def default_tokens(self) -> int:
        return self.settings.generation.gen_length

    def room(self, prompt_tokens: int) -> int:
        return self.max_model_len - prompt_tokens

    @property
    def options(self) -> Mapping[str, Kind]:
        heeded = self._system.method.heeds[config_of(self.settings.model).family] | EVERYONES
        knobs = knobs_of(GenerationConfig)
        return {name: knobs[name].kind for name in _OF_A_DLLM if name in heeded}

    def generation(self, requested: Mapping[str, Any]) -> GenerationConfig:
        """By default an answer takes as many steps per token as the server's own settings. It ends early if it has several blocks, unless
        an end may come too early to count; the server then looks for a later end."""
        options, seed, ignores_eos = diffusion_fields(requested, config_of(self.settings.model).vocab_size)
        return replace(_generation_config(self, options, ignores_eos=ignores_eos), seed=seed)

    def check_prompt(self, prompt_ids: Sequence[int], generation: GenerationConfig) -> None:
        config = config_of(self.settings.model)
        check_prompt(prompt_ids, generation.gen_length, self.max_model_len, config.vocab_size)
        require(
            config.mask_token_id not in prompt_ids,
            f"prompt has the mask token (id {config.mask_token_id}): take it out",
        )

    def check_machine(self) -> None:
        self._deployment.check_machine()

    @contextmanager
    def serving(self) -> Iterator[ServedEngine]:
        from engines.server.diffusion import ServedDllm

        with self._deployment.serving() as (engine, _):
            yield ServedDllm(engine)

    @property
    def _deployment(self) -> DllmDeployment:
        return self._system.deployment(self.settings, [self.max_model_len])


def _without_cuts_of_no_draw(knobs: Mapping[str, Any], temperature: float) -> dict[str, Any]:
    """Return the knobs of an answer. A greedy one has no ``top_p`` and ``top_k``, whether the request or the server gives them, as in vLLM.
    ``temperature`` is the server's."""
    is_greedy = knobs.get("temperature", temperature) == 0
    return {name: value for name, value in knobs.items() if not (is_greedy and name in ("top_p", "top_k"))}


@lru_cache(maxsize=MOST_SETTINGS)
def _generation_config(model: DllmModel, fields: tuple[tuple[str, Any], ...], *, ignores_eos: bool) -> GenerationConfig:
    """Checks requests with equal settings only once."""
    options = dict(fields)
    system = model._system
    base = model.settings.generation
    knobs = {name: value for name, value in model.cell.knobs if name != "stop_at_eos"}
    length = options.get("gen_length", base.gen_length)
    limit = model.room(1)
    require(
        length <= limit, f"max_tokens={length} is more than {limit}, which a prompt of one token leaves: ask for fewer"
    )
    knobs = _without_cuts_of_no_draw({**knobs, **options}, base.temperature)
    block_length = options.get("block_length", base.block_length)
    require(block_length >= 1, f"block_length={block_length} must be at least 1")
    if "gen_length" in options and "steps" not in options:
        blocks = -(-length // block_length)
        knobs["steps"] = max(blocks, round(base.steps * length / base.gen_length))
    settings = system.settings(replace(model.cell, knobs=tuple(knobs.items())))
    method, family, generation = system.method, config_of(settings.model).family, settings.generation
    if method.sampler(family, settings.options) != method.sampler(family, model.settings.options):
        # Such an option would change other requests as well.
        name = next(iter(method.options_in(options)))
        raise UserError(f"{name}={options[name]!r} is the whole server's to set: leave it out")
    has_blocks = method.has_blocks(family, settings.options)
    return replace(generation, stop_at_eos=has_blocks and not ignores_eos and generation.num_blocks > 1)


# -- block diffusion ---------------------------------------------------------------------------------------

_OF_A_BLOCK = ("rule", "threshold", "edit_threshold", "max_post_steps", "steps", "sub_block")
_OF_A_CANVAS = ("steps", *DECODING_OF_CANVASES)
"""Settings that a request may give in addition to those of OpenAI's API. Requests with different rules can share a step."""


def is_block(model: str) -> bool:
    """Whether this names a block-diffusion model; False also for a name that is no model."""
    is_shape = model in EMBEDDED_DIRS or model in SMALL_BLOCKS or model.lower() in BLOCK_SHAPES
    return is_shape or stored_type(model) in BLOCK_TYPES


@dataclass(frozen=True, kw_only=True)
class BlockModel:
    """A ``ServedModel``; ``name`` is the model name in requests."""

    knobs: tuple[tuple[str, Any], ...]
    platform: str
    name: str

    @classmethod
    def of(cls, *, platform: str, knobs: Mapping[str, Any], name: str | None) -> Self:
        """Raise UserError for a model that cannot be served."""
        settings = settings_of_requests(knobs, platform)
        return cls(knobs=tuple(knobs.items()), platform=platform, name=name or settings.model)

    @cached_property
    def settings(self) -> BlockSettings:
        return settings_of_requests(dict(self.knobs), self.platform)

    @property
    def facts(self) -> Mapping[str, Any]:
        settings = self.settings
        return {"system": NAME, "root": settings.model, "fingerprint": settings.basis}

    @property
    def max_model_len(self) -> int:
        return self.settings.max_model_len

    def codec(self) -> Codec:
        return find_text(self.settings) or IdsAlone()

    @property
    def default_tokens(self) -> int:
        return self.settings.knobs.gen_length

    def room(self, prompt_tokens: int) -> int:
        """Tokens left for an answer. A prompt and its answer fill whole blocks."""
        return self.settings.most_tokens - prompt_tokens

    @property
    def options(self) -> Mapping[str, Kind]:
        knobs = knobs_of(BlockKnobs)
        return {name: knobs[name].kind for name in (_OF_A_CANVAS if self.settings.is_of_canvases else _OF_A_BLOCK)}

    def generation(self, requested: Mapping[str, Any]) -> BlockGeneration:
        """If an end may come too early to count, the engine gets no stop tokens, and the server ends the answer at a later one."""
        options, seed, ignores_eos = diffusion_fields(requested, self.settings.config.vocab_size)
        settings = _block_settings(self, options)
        return BlockGeneration(
            gen_length=settings.knobs.gen_length,
            rule=settings.rule,
            sampling=settings.sampling(seed),
            stop_ids=frozenset() if ignores_eos else stop_ids_of(settings),
        )

    def check_prompt(self, prompt_ids: Sequence[int], generation: BlockGeneration) -> None:
        settings = self.settings
        _check_prompt(settings, prompt_ids, generation.gen_length)

    def check_machine(self) -> None:
        import_module(ON_TORCH).check_machine(self.settings)

    @contextmanager
    def serving(self) -> Iterator[ServedEngine]:
        from engines.server.diffusion import ServedBlocks

        with BlockDeployment(settings=self.settings).serving() as (engine, _):
            yield ServedBlocks(engine)


_OF_EVERY_CANVAS = {"temperature": (0, 1), "top_p": (1,)}
"""Values that change no canvas: it ends with its likeliest tokens, and its forwards' own temperatures are not scaled."""


@lru_cache(maxsize=MOST_SETTINGS)
def _block_settings(model: BlockModel, options: tuple[tuple[str, Any], ...]) -> BlockSettings:
    """Checks requests with equal settings only once."""
    knobs = {**dict(model.knobs), **dict(options)}
    if not model.settings.is_of_canvases:
        knobs = _without_cuts_of_no_draw(knobs, model.settings.knobs.temperature)
    else:
        knobs = {name: value for name, value in knobs.items() if value not in _OF_EVERY_CANVAS.get(name, ())}
    return settings_of_requests(knobs, model.platform)


def _check_prompt(settings: BlockSettings, prompt_ids: Sequence[int], length: int, **options: Any) -> None:
    """An answer fills whole canvases, which do not contain the prompt; blocks hold the prompt and the answer."""
    block, vocabulary = settings.block, settings.config.vocab_size
    if settings.is_of_canvases:
        length, block = -(-length // block) * block, 1
    check_prompt(prompt_ids, length, settings.max_model_len, vocabulary, block=block, **options)


def answer_alone(settings: BlockSettings, prompt_ids: tuple[int, ...], *, seed: int) -> BlockAnswer:
    """The answer to one prompt, up to its end token, from an engine that serves nothing else."""
    length = settings.knobs.gen_length
    _check_prompt(settings, prompt_ids, length, option="gen_length")
    import_module(ON_TORCH).check_machine(settings)
    request = BlockRequest(
        request_id=0,
        prompt_ids=prompt_ids,
        gen_length=length,
        rule=settings.rule,
        sampling=settings.sampling(seed),
        stop_ids=stop_ids_of(settings),
    )
    with BlockDeployment(settings=settings).serving() as (engine, _):
        return engine.run([request])[0]


def stop_ids_of(settings: BlockSettings) -> frozenset[int]:
    """End tokens of the checkpoint, or else the model's end of text. Empty for random weights, because they make any id equally likely."""
    if settings.directory is None:
        return frozenset()
    text = find_text(settings)
    ends = stored_ends(settings.directory) if text is None else text.end_ids
    return ends or frozenset({settings.config.eos_token_id})


# -- causal models -----------------------------------------------------------------------------------------

SHAPES: Mapping[str, CausalConfig] = {"tiny-qwen2": tiny_causal(), **CAUSAL_SHAPES}
"""Shapes served with random weights: full-size ones, and a tiny one for a CPU."""

ID_BYTES = 8
"""Bytes that a slot takes for each token id."""
CPU_KV_BYTES = 1 << 30
"""Bytes of K/V on a CPU without a ``memory_limit``."""
_MOST_WORDS = 64
"""Lists of bad words whose tokens are cached."""
CUDA_SHARE = 0.9
"""Share of a card's memory to use without a ``memory_limit``."""


def is_causal(model: str) -> bool:
    """Whether this names a model that generates from left to right; False also for a name that is no model."""
    return model.lower() in SHAPES or stored_type(model) in CAUSAL_TYPES


@dataclass(frozen=True, kw_only=True)
class ArModel:
    """A ``ServedModel``; ``name`` is the model name in requests."""

    settings: ArSettings
    name: str

    @classmethod
    def of(cls, settings: ArSettings, name: str | None) -> Self:
        """Raise UserError for a model that cannot be served."""
        model_name = settings.model
        is_shape = model_name.lower() in SHAPES
        require(
            not is_shape or settings.weights == "random",
            f"model={model_name!r} is a shape without weights: add --weights random, or give a checkpoint",
        )
        model = cls(settings=settings, name=name or model_name)
        if settings.max_model_len is not None:
            model.config.check_length("max_model_len", settings.max_model_len)
        require(
            settings.memory_limit is None or settings.memory_limit > model._weight_bytes,
            f"memory_limit={settings.memory_limit} is less than the {model._weight_bytes} bytes of the model's weights: "
            f"raise it",
        )
        require(
            model.max_model_len >= 2,
            f"the K/V of {model.max_model_len} tokens is all there is room for: raise --memory-limit",
        )
        _ = model.fingerprint
        return model

    @cached_property
    def config(self) -> CausalConfig:
        return SHAPES.get(self.settings.model.lower()) or causal_config(self.settings.model)

    @cached_property
    def fingerprint(self) -> str:
        """Digest of the checkpoint's files, or of the shape if the weights are random."""
        model = self.settings.model
        if self.settings.weights == "random":
            return digest_of(repr(self.config))
        return checkpoint_digest(checkpoint_dir(model))

    @property
    def facts(self) -> Mapping[str, Any]:
        settings = self.settings
        return {
            "system": SYSTEM,
            "root": settings.model,
            "scheduler": settings.scheduler,
            "fingerprint": self.fingerprint,
        }

    @property
    def max_model_len(self) -> int:
        """Longest prompt with its answer. A card's pool may turn out smaller, and the engine refuses requests that do not fit in it."""
        settings = self.settings
        limits = [self.config.max_sequence_length, settings.max_model_len, settings.kv_tokens]
        if settings.kv_tokens is None and settings.device == "cpu":
            limits.append(self._cpu_kv_tokens)
        return min(limit for limit in limits if limit is not None)

    def codec(self) -> Codec:
        """Only token ids if there is no tokenizer."""
        return self._text or IdsAlone()

    @cached_property
    def _text(self) -> CausalText | None:
        model = self.settings.model
        return None if model.lower() in SHAPES else load_causal_text(checkpoint_dir(model, weights=False))

    @property
    def default_tokens(self) -> int:
        """``gen_length``, or the room that a prompt of one token leaves if that is less."""
        return min(self.settings.gen_length, self.max_model_len - 1)

    def room(self, prompt_tokens: int) -> int:
        return self.max_model_len - prompt_tokens

    @property
    def options(self) -> Mapping[str, Kind]:
        return {}

    def generation(self, requested: Mapping[str, Any]) -> ArGeneration:
        limit = self.max_model_len - 1
        options: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value for name, value in requested.items()
        }
        options.pop("echo", None)  # is the server's to do
        length = options.get("max_tokens")
        require(
            length is None or length <= limit,
            f"max_tokens={length} is more than {limit}, which a prompt of one token leaves: ask for fewer",
        )
        options["ignores_eos"] = options.pop("ignore_eos", False)
        if "bad_words" in options:
            options["bad_words"] = _bad_word_ids(self, options["bad_words"])
        if "logit_bias" in options:
            options["logit_bias"] = tuple(options["logit_bias"].items())
        defaults = {name: getattr(self.settings, name) for name in ("temperature", "top_p")}
        generation = ArGeneration(**{**defaults, "default_tokens": self.settings.gen_length, **options})
        generation.check_ids(self.config.vocab_size)
        return generation

    def check_prompt(self, prompt_ids: Sequence[int], generation: ArGeneration) -> None:
        limit = self.max_model_len
        check_prompt(prompt_ids, generation.length(len(prompt_ids), limit), limit, self.config.vocab_size)

    def check_machine(self) -> None:
        import torch

        from engines.models.loader import check_device, check_quantization, parse_dtype

        settings, device = self.settings, self.settings.device
        check_device(device)
        check_quantization(settings.quantization, parse_dtype(self._dtype), device)
        total = machine_memory_bytes() if device == "cpu" else torch.cuda.get_device_properties(device).total_memory
        if total is None:
            return
        limit, ids = settings.memory_limit, self._num_slots * self.max_model_len * ID_BYTES
        require(
            limit is None or limit <= total,
            f"memory_limit={limit} is more than the {total} bytes of device={device!r}: give at most {total // 10**9}GB",
        )
        needed = self._weight_bytes + (settings.kv_tokens or 0) * self._token_bytes + ids
        require(
            needed <= total,
            f"kv_tokens={settings.kv_tokens or 'as many as fit'} and max_num_seqs={settings.max_num_seqs} take "
            f"{needed / 1e9:.1f} GB with the model's weights, and device={device!r} has {total / 1e9:.1f}: lower them",
        )

    @contextmanager
    def serving(self) -> Iterator[ServedEngine]:
        from engines.models.loader import load_causal, parse_dtype
        from engines.server.ar import ServedAr
        from repro.ar_schedulers import scheduled

        settings = self.settings
        model = load_causal(
            self.config if settings.weights == "random" else settings.model,
            dtype=parse_dtype(self._dtype),
            device=settings.device,
            weights="random" if settings.weights == "random" else "checkpoint",
            quantization=settings.quantization,
            keeps_weights=False,
        )
        executor = self._executor(model)
        try:
            sizes = settings.max_num_batched_tokens, settings.max_num_seqs
            by = scheduled(settings.scheduler, executor, *sizes, settings.own, slo_ttft_s=settings.slo_ttft_s)
            yield ServedAr(
                executor,
                by.batching,
                by.queue,
                end_ids=self._text.end_ids if self._text is not None else frozenset(),
                budget=settings.max_num_batched_tokens,
                keep_kv=settings.keep_kv,
                estimate_s=by.estimate_s,
            )
        finally:
            executor.close()

    def _executor(self, model: "CausalModel") -> "PagedExecutor":
        from engines.ar.torch.executor import PagedExecutor
        from repro.ar_schedulers import LONGEST_BUCKET, card_kv_tokens, decode_sizes

        settings = self.settings
        kv_tokens = settings.kv_tokens
        if kv_tokens is None and settings.device == "cpu":
            # More K/V than all sequences can fill would be unused.
            kv_tokens = min(self._cpu_kv_tokens, settings.max_num_seqs * self.max_model_len)
        elif kv_tokens is None:
            kv_tokens = card_kv_tokens(
                model,
                bytes_per_token=self._token_bytes,
                limit=settings.memory_limit,
                share=CUDA_SHARE,
                step_tokens=settings.max_num_batched_tokens,
                max_num_seqs=settings.max_num_seqs,
            )
        executor = PagedExecutor(
            model,
            num_slots=self._num_slots,
            max_len=min(self.max_model_len, kv_tokens),
            num_tokens=kv_tokens,
            longest_bucket=LONGEST_BUCKET,
        )
        executor.capture(decode_sizes(settings.max_num_seqs))
        return executor

    @property
    def _num_slots(self) -> int:
        """With ``keep_kv``, kept K/V needs slots of its own, as many as running sequences."""
        return self.settings.max_num_seqs * (2 if self.settings.keep_kv else 1)

    @property
    def _dtype(self) -> str:
        return self.settings.dtype or ("float32" if self.settings.device == "cpu" else "bfloat16")

    @property
    def _token_bytes(self) -> int:
        """Bytes of K/V per token."""
        config = self.config
        return 2 * config.n_layers * config.n_kv_heads * config.head_dim * DTYPE_BYTES[self._dtype]

    @cached_property
    def _weight_bytes(self) -> int:
        config = self.config
        heads = (2 * config.n_heads + 2 * config.n_kv_heads) * config.head_dim
        layer = config.d_model * (heads + 3 * config.mlp_hidden_size)
        tables = config.vocab_size * config.d_model * (1 if config.weight_tying else 2)
        return (config.n_layers * layer + tables) * DTYPE_BYTES[self._dtype]

    @property
    def _cpu_kv_tokens(self) -> int:
        limit = self.settings.memory_limit
        return (CPU_KV_BYTES if limit is None else limit - self._weight_bytes) // self._token_bytes


@lru_cache(maxsize=_MOST_WORDS)
def _bad_word_ids(model: ArModel, words: tuple[str, ...]) -> tuple[tuple[int, ...], ...]:
    """Tokens of a request's bad words. All answers of one request share them, so we look them up once."""
    text = model._text
    if text is None:
        raise UserError("bad_words: the model has no tokenizer: leave them out")
    return text.spellings(words)
