"""``repro generate``: answer one prompt with one system."""

import os
import stat
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import typer

from engines.dllm.config import GenerationConfig
from engines.errors import UserError, require
from engines.knobs import with_knobs
from engines.models.checkpoint import is_base
from repro.cli import options as opt
from repro.cli.options import Given, Knobs, Some, answer_knobs
from repro.cli.output import print_json, say
from repro.families.dllm.settings import Device

if TYPE_CHECKING:
    from repro.prompt import TextAnswer

ENDED_AT_ONCE = (
    "the model ended at once: it was trained on other prompts, or asks for a chat template; see 'repro generate' in docs/using.md "
    "for one it answers"
)


KNOBS = Knobs(answer_knobs, defaults=lambda: {"gen_length": 64, "steps": "one a token", "weights": "checkpoint"})
LOADED = Knobs(lambda: {opt.ENGINE: (Some(Device, ("dtype", "quantization", "device", "weights")),)})


@dataclass(frozen=True, kw_only=True)
class PromptOptions:
    panel: ClassVar[str] = opt.WHAT
    system: str = "dllm-serve"
    """dllm-serve, fast-dllm, dllm-cache, sparse-dllm, the plain llada or dream sampler, or block-diffusion."""
    model: str | None = None
    """Checkpoint directory or hub id. Embedded are tiny, tiny-long, tiny-far and tiny-roll; for block-diffusion tiny-block and
    tiny-canvas [default: tiny, tiny-block]."""
    prompt: str | None = None
    """Prompt text; '-' reads standard input."""
    prompt_ids: Path | None = None
    """File of token ids, a JSON list."""
    chat: Annotated[
        bool | None,
        typer.Option(
            "--chat/--no-chat",
            help="Prompt as a user's turn or raw [default: chat where the checkpoint has a template, and no base model's name].",
            rich_help_panel=opt.WHAT,
        ),
    ] = None
    system_prompt: str | None = None
    """System turn before the prompt, in a chat."""

    def encode(self, model: str, *, is_text_wanted: bool) -> tuple[tuple[int, ...], Any]:
        """Return the prompt's ids, and a tokenizer to print the answer as words; None if there is none, or none is wanted."""
        from repro.prompt import TextPrompt, find_tokenizer, tokenizer_of

        if self.is_text:
            tokenizer = tokenizer_of(model)
            text = TextPrompt(text=self.text(), chat=self.chat, system_prompt=self.system_prompt)
            return text.encode(model, tokenizer), tokenizer
        return self.ids(), find_tokenizer(model) if is_text_wanted else None

    @property
    def is_text(self) -> bool:
        if (self.prompt is None) == (self.prompt_ids is None):
            raise UserError("prompt: give either --prompt TEXT or --prompt-ids FILE, and not both")
        return self.prompt is not None

    def text(self) -> str:
        from repro.prompt import read_text

        assert self.prompt is not None
        _check_input(self.prompt)
        return read_text(self.prompt)

    def ids(self) -> tuple[int, ...]:
        from repro.prompt import read_prompt_ids

        for name, value in opt.given_options(chat=self.chat, system_prompt=self.system_prompt).items():
            raise UserError(f"{name}={value!r} has no effect with --prompt-ids: leave it out, or give --prompt")
        assert self.prompt_ids is not None
        return read_prompt_ids(self.prompt_ids)


def generate(
    *,
    prompted: PromptOptions,
    decoding: Annotated[Given, KNOBS],
    seed: Annotated[
        int, typer.Option(help="Seed of arrivals, lengths, prompts and sampling.", rich_help_panel=opt.WORKLOAD)
    ] = 0,
    loaded: Annotated[Given, LOADED],
    json: opt.Json = False,
) -> None:
    """Generate from one prompt. --steps defaults to --gen-length, one token per step; for block-diffusion it is per block."""
    from repro.families.block.settings import NAME

    model, system = prompted.model, prompted.system
    if system == NAME:
        _generate_blocks({**opt.given_options(model=model), **decoding, **loaded}, prompted, seed=seed, json=json)
        return
    from repro.serving import is_block, is_causal

    if model is not None and is_block(model):
        raise UserError(f"model={model!r} is one of block diffusion: add --system {NAME}")
    if model is not None and is_causal(model):
        raise UserError(
            f"model={model!r} is a causal model, which generate does not run: use repro serve --model {model}"
        )
    model = "tiny" if model is None else model
    from engines.dllm.method import EVERYONES
    from repro.generation import GenerateOptions, prepare_generation, run_prepared
    from repro.prompt import answer_of

    settings = {"gen_length": 64, "steps": 64, **opt.with_steps(decoding)}
    options = GenerateOptions(
        system=system,
        model=model,
        generation=with_knobs(GenerationConfig(seed=seed), settings),
        knobs={name: value for name, value in settings.items() if name not in {*EVERYONES, "tie_policy"}},
        tie_policy=settings.get("tie_policy"),
        **loaded,
    )
    prepared = prepare_generation(options)
    ids, tokenizer = prompted.encode(model, is_text_wanted=not json)
    result = run_prepared(prepared, ids)
    answer = None if tokenizer is None else answer_of(result.token_ids, model, tokenizer)
    _print(result.token_ids, answer, {"forward_passes": result.forward_passes}, json=json)


def _generate_blocks(knobs: Mapping[str, Any], prompted: PromptOptions, *, seed: int, json: bool) -> None:
    from repro.families.block.settings import settings_of_requests
    from repro.families.block.text import answer_of, encoded, find_text, text_of
    from repro.serving import answer_alone

    settings = settings_of_requests(knobs)
    answer_text: TextAnswer | None
    if prompted.is_text:
        text = text_of(settings)
        ids = encoded(
            text,
            prompted.text(),
            chat=prompted.chat,
            system_prompt=prompted.system_prompt,
            by_default=not is_base(settings.model),
        )
        answer = answer_alone(settings, ids, seed=seed)
        answer_text = answer_of(answer.ids, text)
    else:
        answer, tokenizer = answer_alone(settings, prompted.ids(), seed=seed), None if json else find_text(settings)
        answer_text = None if tokenizer is None else answer_of(answer.ids, tokenizer)
    counts = {name: getattr(answer, name) for name in ("denoised", "committed", "prefilled", "rows")}
    _print(answer.ids, answer_text, counts, json=json)


def _print(token_ids: Sequence[int], answer: "TextAnswer | None", counts: Mapping[str, int], *, json: bool) -> None:
    if answer is not None and not answer.text.strip():
        say(ENDED_AT_ONCE if answer.finish_reason == "stop" else "the model generated no text", file=sys.stderr)
    if json:
        as_text = {} if answer is None else answer._asdict()
        print_json({"token_ids": list(token_ids), **counts, **as_text})
    else:
        print(" ".join(map(str, token_ids)) if answer is None else answer.text)


def _check_input(prompt: str) -> None:
    """Refuse a prompt from standard input if that is closed or never ends."""
    if prompt != "-":
        return
    require(sys.stdin is not None, "prompt='-': standard input is closed: give it a text, or the prompt itself")
    try:
        status = os.fstat(sys.stdin.fileno())
    except (OSError, ValueError):
        return  # no file of the operating system
    is_endless = (
        stat.S_ISCHR(status.st_mode) and not sys.stdin.isatty() and not os.path.samestat(status, os.stat(os.devnull))
    )
    require(not is_endless, "prompt='-': standard input is a device: give it a text, or the prompt itself")
