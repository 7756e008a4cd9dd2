"""Requests that are a user's own: of ``repro generate``, one alone, and of ``repro serve``."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module

from engines.blockdiffusion.request import Answer, BlockRequest
from engines.errors import require
from engines.models.causal_text import stored_ends
from repro.systems.block.settings import Settings
from repro.systems.block.system import ON_TORCH, Deployment
from repro.systems.block.text import find_text


def check_prompt(
    settings: Settings, prompt_ids: Sequence[int], gen_length: int, *, asked_as: str = "gen_length"
) -> None:
    """Raise UserError for a prompt that the model cannot be asked; ``asked_as`` is what the user calls the length of the answer."""
    block, vocabulary, most = settings.block, settings.config.vocab_size, settings.max_model_len
    require(len(prompt_ids) > 0, "prompt has no token: give some text")
    total = -(-(len(prompt_ids) + gen_length) // block) * block
    require(
        total <= most,
        f"prompt of {len(prompt_ids)} tokens and {asked_as}={gen_length} make {total} tokens in whole blocks of {block}, more than "
        f"max_model_len={most}: shorten the prompt or ask for fewer tokens",
    )
    wrong = next((i for i in prompt_ids if not 0 <= i < vocabulary), None)
    require(wrong is None, f"prompt has the id {wrong} and the vocabulary {vocabulary}: use this model's tokenizer")


def answer_alone(settings: Settings, prompt_ids: tuple[int, ...], *, seed: int) -> Answer:
    """The answer to one prompt, up to its end token, by an engine with nothing else to do."""
    check_prompt(settings, prompt_ids, settings.knobs.gen_length)
    import_module(ON_TORCH).check_machine(settings)
    asked = BlockRequest(
        request_id=0,
        prompt_ids=prompt_ids,
        gen_length=settings.knobs.gen_length,
        rule=settings.rule,
        sampling=settings.sampling(seed),
        stop_ids=stop_ids_of(settings),
    )
    with Deployment(settings=settings).serving() as (engine, _):
        return engine.run([asked])[0]


def stop_ids_of(settings: Settings) -> frozenset[int]:
    """The end tokens of a checkpoint, else the model's end of text; none where weights are random and any id is as likely."""
    if settings.directory is None:
        return frozenset()
    text = find_text(settings)
    ends = stored_ends(settings.directory) if text is None else text.end_ids
    return ends or frozenset({settings.config.eos_token_id})
