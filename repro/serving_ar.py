"""A causal language model to serve with the autoregressive engine."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any

from engines.errors import UserError, require
from engines.machine import machine_memory_bytes
from engines.models.chat import CausalText, load_causal_text
from engines.models.checkpoint import checkpoint_digest, checkpoint_dir, digest_of, stored_type
from engines.models.qwen2_config import CAUSAL_SHAPES, CAUSAL_TYPES, CausalConfig, causal_config, tiny_causal
from engines.server.ar import ArGeneration
from engines.server.ar_settings import DTYPE_BYTES, SYSTEM, ArSettings
from engines.server.codec import Codec, IdsAlone
from engines.server.protocol import Kind, ServedEngine
from repro.prompt import check_prompt

if TYPE_CHECKING:
    from engines.ar.torch.executor import PagedExecutor
    from engines.models.decoder import CausalModel

SHAPES: Mapping[str, CausalConfig] = {"tiny-qwen2": tiny_causal(), **CAUSAL_SHAPES}
"""Served with random weights: the full-size ones, and one for a CPU."""

ID_BYTES = 8
"""Bytes of a token id in its slot."""
CPU_KV_BYTES = 1 << 30
"""K/V on a CPU, where nothing else is said."""
_MOST_WORDS = 64
"""Lists of bad words whose tokens are kept."""
CUDA_SHARE = 0.9
"""Share of a card's memory, where no limit is given."""


def is_causal(model: str) -> bool:
    """Whether the model is one of those that generate from left to right; where it is none at all, it is not."""
    return model.lower() in SHAPES or stored_type(model) in CAUSAL_TYPES


@dataclass(frozen=True, kw_only=True)
class ArModel:
    """A ``ServedModel``; ``name`` is what requests call it."""

    settings: ArSettings
    name: str

    @classmethod
    def of(cls, settings: ArSettings, name: str | None) -> ArModel:
        """Raise UserError for what cannot be served."""
        own = settings.model
        is_shape = own.lower() in SHAPES
        require(
            not is_shape or settings.weights == "random",
            f"model={own!r} is a shape without weights: add --weights random, or give a checkpoint",
        )
        model = cls(settings=settings, name=name or own)
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
        """Digest of the checkpoint's files; of the shape alone where weights are random."""
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
        """A card's pool may turn out to hold less than the model's positions; the engine refuses what it cannot hold."""
        settings = self.settings
        most = [self.config.max_sequence_length, settings.max_model_len, settings.kv_tokens]
        if settings.kv_tokens is None and settings.device == "cpu":
            most.append(self._cpu_kv_tokens)
        return min(each for each in most if each is not None)

    def codec(self) -> Codec:
        """Ids alone where there is no tokenizer."""
        return self._text or IdsAlone()

    @cached_property
    def _text(self) -> CausalText | None:
        model = self.settings.model
        return None if model.lower() in SHAPES else load_causal_text(checkpoint_dir(model, weights=False))

    # -- requests ------------------------------------------------------------------------------------------

    @property
    def default_tokens(self) -> int:
        return self.settings.gen_length

    def room(self, prompt_tokens: int) -> int:
        return self.max_model_len - prompt_tokens

    @property
    def options(self) -> Mapping[str, Kind]:
        return {}

    def generation(self, asked: Mapping[str, Any]) -> ArGeneration:
        most = self.max_model_len - 1
        given: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value for name, value in asked.items()
        }
        given.pop("echo", None)  # is the server's to do
        length = given.get("max_tokens")
        require(
            length is None or length <= most,
            f"max_tokens={length} is more than {most}, which a prompt of one token leaves: ask for fewer",
        )
        given["ignores_eos"] = given.pop("ignore_eos", False)
        if "bad_words" in given:
            given["bad_words"] = _spellings(self, given["bad_words"])
        if "logit_bias" in given:
            given["logit_bias"] = tuple(given["logit_bias"].items())
        own = {name: getattr(self.settings, name) for name in ("temperature", "top_p")}
        found = ArGeneration(**{**own, "default_tokens": self.settings.gen_length, **given})
        found.check_ids(self.config.vocab_size)
        return found

    def check_prompt(self, prompt_ids: Sequence[int], generation: ArGeneration) -> None:
        most = self.max_model_len
        check_prompt(prompt_ids, generation.length(len(prompt_ids), most), most, self.config.vocab_size)

    # -- the engine ----------------------------------------------------------------------------------------

    def check_machine(self) -> None:
        import torch

        from engines.models.loader import check_device, parse_dtype

        settings, device = self.settings, self.settings.device
        check_device(device)
        parse_dtype(self._dtype)
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
                keeps=settings.keep_kv,
                estimate_s=by.estimate_s,
            )
        finally:
            executor.close()

    def _executor(self, model: CausalModel) -> PagedExecutor:
        from engines.ar.torch.executor import PagedExecutor
        from repro.ar_schedulers import LONGEST_BUCKET, card_kv_tokens, decode_sizes

        settings = self.settings
        kv_tokens = settings.kv_tokens
        if kv_tokens is None and settings.device == "cpu":
            # More than all places can fill is of no use.
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
        """Kept K/V lies in slots of its own, and as much may be waiting to be gone on from."""
        return self.settings.max_num_seqs * (2 if self.settings.keep_kv else 1)

    @property
    def _dtype(self) -> str:
        return self.settings.dtype or ("float32" if self.settings.device == "cpu" else "bfloat16")

    @property
    def _token_bytes(self) -> int:
        """K/V of a token."""
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
def _spellings(model: ArModel, words: tuple[str, ...]) -> tuple[tuple[int, ...], ...]:
    """Tokens of the bad words of one request, whose answers all have them, are looked up once."""
    text = model._text
    if text is None:
        raise UserError("bad_words: the model has no tokenizer: leave them out")
    return text.spellings(words)
