"""A diffusion-LLM system as a model to serve: the checked settings behind ``repro serve``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any

from baselines.dllm.published import PublishedMethod
from engines.dllm.config import GenerationConfig
from engines.dllm.method import EVERYONES
from engines.errors import UserError, require
from engines.knobs import knobs_of
from engines.models.checkpoint import PUBLISHED_CONFIGS, checkpoint_dir, config_of
from engines.server.codec import Codec, IdsAlone, TextCodec
from engines.server.protocol import Kind, ServedEngine, asked_of_diffusion
from repro.families.dllm.deployment import DllmDeployment
from repro.families.dllm.settings import DllmSettings
from repro.families.dllm.system import DllmSystem, dllm_system
from repro.prompt import check_prompt
from repro.runs.cell import Cell
from repro.runs.system import SYSTEMS

_OF_A_REQUEST = ("steps", "block_length", "threshold", "factor", "alg_temp", "remasking", "cfg_scale")
"""Settings of a generation that a request may ask for, beside those of OpenAI's API."""

MOST_SETTINGS = 256
"""Distinct settings of requests that are kept checked."""


@dataclass(frozen=True)
class DllmModel:
    """A ``ServedModel``. ``cell`` names the system, its platform and its knobs; ``name`` is what requests call it."""

    cell: Cell
    name: str

    @classmethod
    def of(cls, *, system: str, platform: str, knobs: Mapping[str, Any], name: str | None) -> DllmModel:
        """Raise UserError for what cannot be served."""
        chosen = dllm_system(system)
        own = {"num_prompts": 1, **knobs}
        if isinstance(chosen.method, PublishedMethod):
            # The only reading whose steps take new requests.
            own.setdefault("reading", "policy")
        cell = Cell(
            system=system,
            dataset="requests",
            platform=platform,
            executor="torch",
            rate=None,
            seed=0,
            knobs=tuple(own.items()),
        )
        settings = chosen.settings(cell)
        if (
            chosen.method.has_blocks(config_of(settings.model).family, settings.options)
            and settings.generation.num_blocks > 1
        ):
            # The engine then knows the checkpoint's stop tokens; requests say whether they end at one.
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
        """Ids alone where the weights are random, and belong to no tokenizer."""
        model = self.settings.model
        if model in PUBLISHED_CONFIGS:
            return IdsAlone()
        return TextCodec.of(checkpoint_dir(model, weights=False), config_of(model))

    # -- requests ------------------------------------------------------------------------------------------

    @property
    def default_tokens(self) -> int:
        return self.settings.generation.gen_length

    def room(self, prompt_tokens: int) -> int:
        return self.max_model_len - prompt_tokens

    @property
    def options(self) -> Mapping[str, Kind]:
        heeded = self._system.method.heeds[config_of(self.settings.model).family] | EVERYONES
        knobs = knobs_of(GenerationConfig)
        return {name: knobs[name].kind for name in _OF_A_REQUEST if name in heeded}

    def generation(self, asked: Mapping[str, Any]) -> GenerationConfig:
        """Without a number of steps as many a token as the server's own; ends early where there are blocks to end
        after, unless an end may come too early to count: the server then ends the answer at a later one."""
        given = asked_of_diffusion(asked, config_of(self.settings.model).vocab_size)
        seed, ignores_eos = given.pop("seed", 0), given.pop("ignore_eos", False)
        if "max_tokens" in given:
            given["gen_length"] = given.pop("max_tokens")
        return replace(_checked(self, tuple(sorted(given.items())), ignores_eos=ignores_eos), seed=seed)

    def without_seed(self, given: Mapping[str, Any], *, ignores_eos: bool) -> GenerationConfig:
        base = self.settings.generation
        knobs = {name: value for name, value in self.cell.knobs if name != "stop_at_eos"}
        length = given.get("gen_length", base.gen_length)
        most = self.room(1)
        require(
            length <= most,
            f"max_tokens={length} is more than {most}, which a prompt of one token leaves: ask for fewer",
        )
        knobs |= given
        block_length = given.get("block_length", base.block_length)
        require(block_length >= 1, f"block_length={block_length} must be at least 1")
        if "gen_length" in given and "steps" not in given:
            blocks = -(-length // block_length)
            knobs["steps"] = max(blocks, round(base.steps * length / base.gen_length))
        settings = self._system.settings(replace(self.cell, knobs=tuple(knobs.items())))
        method, family, generation = self._system.method, config_of(settings.model).family, settings.generation
        if method.sampler(family, settings.options) != method.sampler(family, self.settings.options):
            # It would change more than the one request.
            name = next(iter(method.options_in(given)))
            raise UserError(f"{name}={given[name]!r} is the whole server's to set: leave it out")
        has_blocks = method.has_blocks(family, settings.options)
        return replace(generation, stop_at_eos=has_blocks and not ignores_eos and generation.num_blocks > 1)

    def check_prompt(self, prompt_ids: Sequence[int], generation: GenerationConfig) -> None:
        config = config_of(self.settings.model)
        check_prompt(prompt_ids, generation.gen_length, self.max_model_len, config.vocab_size)
        require(
            config.mask_token_id not in prompt_ids,
            f"prompt has the mask token (id {config.mask_token_id}): take it out",
        )

    # -- the engine ----------------------------------------------------------------------------------------

    def check_machine(self) -> None:
        self._deployment.check_machine()

    @contextmanager
    def serving(self) -> Iterator[ServedEngine]:
        from engines.server.dllm import ServedDllm

        with self._deployment.serving() as (engine, _):
            yield ServedDllm(engine)

    @property
    def _deployment(self) -> DllmDeployment:
        return self._system.deployment(self.settings, [self.max_model_len])


@lru_cache(maxsize=MOST_SETTINGS)
def _checked(model: DllmModel, given: tuple[tuple[str, Any], ...], *, ignores_eos: bool) -> GenerationConfig:
    """Requests of one kind are checked once."""
    return model.without_seed(dict(given), ignores_eos=ignores_eos)
