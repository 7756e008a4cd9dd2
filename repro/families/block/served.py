"""A block-diffusion model to serve: the checked settings behind ``repro serve``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, lru_cache
from importlib import import_module
from typing import Any

from engines.blockdiffusion.sequence import BlockAnswer, BlockRequest
from engines.knobs import knobs_of
from engines.models.block_config import BLOCK_SHAPES, BLOCK_TYPES
from engines.models.chat import stored_ends
from engines.models.checkpoint import stored_type
from engines.server.block import BlockGeneration
from engines.server.codec import Codec, IdsAlone
from engines.server.protocol import Kind, ServedEngine, asked_of_diffusion
from repro.families.block.settings import EMBEDDED, NAME, TINY, BlockKnobs, BlockSettings, settings_of_requests
from repro.families.block.system import ON_TORCH, BlockDeployment
from repro.families.block.text import find_text
from repro.prompt import check_prompt

_OF_A_REQUEST = ("rule", "threshold", "edit_threshold", "max_post_steps", "steps", "sub_block")
"""Settings of an answer that a request may ask for, beside those of OpenAI's API: requests of any rules share a step."""
_MOST_SETTINGS = 256
"""Distinct settings of requests that are kept checked."""


def is_block(model: str) -> bool:
    """Whether the model is one of block diffusion; where it is none at all, it is not."""
    is_shape = model == EMBEDDED or model in TINY or model.lower() in BLOCK_SHAPES
    return is_shape or stored_type(model) in BLOCK_TYPES


@dataclass(frozen=True, kw_only=True)
class BlockModel:
    """A ``ServedModel``; ``name`` is what requests call it."""

    knobs: tuple[tuple[str, Any], ...]
    platform: str
    name: str

    @classmethod
    def of(cls, *, platform: str, knobs: Mapping[str, Any], name: str | None) -> BlockModel:
        """Raise UserError for what cannot be served."""
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

    # -- requests ------------------------------------------------------------------------------------------

    @property
    def default_tokens(self) -> int:
        return self.settings.knobs.gen_length

    def room(self, prompt_tokens: int) -> int:
        """A prompt and its answer fill whole blocks."""
        return self.max_model_len // self.settings.block * self.settings.block - prompt_tokens

    @property
    def options(self) -> Mapping[str, Kind]:
        knobs = knobs_of(BlockKnobs)
        return {name: knobs[name].kind for name in _OF_A_REQUEST}

    def generation(self, asked: Mapping[str, Any]) -> BlockGeneration:
        """An end that may come too early to count is none to the engine: the server ends the answer at a later one."""
        given = asked_of_diffusion(asked, self.settings.config.vocab_size)
        seed, ignores_eos = given.pop("seed", 0), given.pop("ignore_eos", False)
        if "max_tokens" in given:
            given["gen_length"] = given.pop("max_tokens")
        settings = _settings(self, tuple(sorted(given.items())))
        return BlockGeneration(
            gen_length=settings.knobs.gen_length,
            rule=settings.rule,
            sampling=settings.sampling(seed),
            stop_ids=frozenset() if ignores_eos else stop_ids_of(settings),
        )

    def check_prompt(self, prompt_ids: Sequence[int], generation: BlockGeneration) -> None:
        settings = self.settings
        most, vocabulary = settings.max_model_len, settings.config.vocab_size
        check_prompt(prompt_ids, generation.gen_length, most, vocabulary, block=settings.block)

    # -- the engine ----------------------------------------------------------------------------------------

    def check_machine(self) -> None:
        import_module(ON_TORCH).check_machine(self.settings)

    @contextmanager
    def serving(self) -> Iterator[ServedEngine]:
        from engines.server.block import ServedBlocks

        with BlockDeployment(settings=self.settings).serving() as (engine, _):
            yield ServedBlocks(engine)


@lru_cache(maxsize=_MOST_SETTINGS)
def _settings(model: BlockModel, given: tuple[tuple[str, Any], ...]) -> BlockSettings:
    """Requests of one kind are checked once."""
    return settings_of_requests({**dict(model.knobs), **dict(given)}, model.platform)


def answer_alone(settings: BlockSettings, prompt_ids: tuple[int, ...], *, seed: int) -> BlockAnswer:
    """The answer to one prompt, up to its end token, by an engine with nothing else to do."""
    most, vocabulary, length = settings.max_model_len, settings.config.vocab_size, settings.knobs.gen_length
    check_prompt(prompt_ids, length, most, vocabulary, asked_as="gen_length", block=settings.block)
    import_module(ON_TORCH).check_machine(settings)
    asked = BlockRequest(
        request_id=0,
        prompt_ids=prompt_ids,
        gen_length=length,
        rule=settings.rule,
        sampling=settings.sampling(seed),
        stop_ids=stop_ids_of(settings),
    )
    with BlockDeployment(settings=settings).serving() as (engine, _):
        return engine.run([asked])[0]


def stop_ids_of(settings: BlockSettings) -> frozenset[int]:
    """The end tokens of a checkpoint, else the model's end of text; none where weights are random and any id is as likely."""
    if settings.directory is None:
        return frozenset()
    text = find_text(settings)
    ends = stored_ends(settings.directory) if text is None else text.end_ids
    return ends or frozenset({settings.config.eos_token_id})
