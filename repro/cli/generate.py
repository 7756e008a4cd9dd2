"""``repro generate``: one prompt through one system."""

from __future__ import annotations

import os
import stat
import sys
from pathlib import Path
from typing import Annotated

import typer

from engines.errors import UserError, require
from repro.cli import options as opt
from repro.cli.option_groups import Decoding, spread
from repro.cli.output import print_json, say


@spread
def generate(
    *,
    system: Annotated[
        str, typer.Option(help="dllm-serve, fast-dllm, dllm-cache, sparse-dllm, or the plain llada or dream sampler.")
    ] = "dllm-serve",
    model: Annotated[str, typer.Option(help="Checkpoint directory, hub id or 'tiny'.")] = "tiny",
    prompt: Annotated[str | None, typer.Option(help="Prompt text; '-' reads standard input.")] = None,
    prompt_ids: Annotated[Path | None, typer.Option(help="File of token ids, as a JSON list.")] = None,
    chat: Annotated[
        bool | None,
        typer.Option(
            "--chat/--no-chat",
            help="Prompt as a user's turn or raw [default: chat where the checkpoint has a template].",
        ),
    ] = None,
    system_prompt: Annotated[str | None, typer.Option(help="System turn in front of the prompt, in a chat.")] = None,
    decoding: Decoding,
    seed: opt.Seed = 0,
    dtype: opt.Dtype = None,
    device: opt.Device = None,
    weights: opt.Weights = None,
    json: opt.Json = False,
) -> None:
    """Generate from one prompt. --steps defaults to --gen-length, one token per step."""
    from engines.dllm.config import GenerationConfig
    from engines.dllm.method import EVERYONES
    from engines.knobs import given_to
    from repro.generation import GenerateOptions, prepare_generation, run_prepared
    from repro.prompt import TextPrompt, answer_of, find_tokenizer, read_prompt_ids, read_text, tokenizer_of

    given = {"gen_length": 64, "steps": 64, **decoding.given()}
    options = GenerateOptions(
        system=system,
        model=model,
        generation=given_to(GenerationConfig(seed=seed), given),
        knobs={name: value for name, value in given.items() if name not in {*EVERYONES, "tie_policy"}},
        **opt.given(tie_policy=decoding.tie_policy, dtype=dtype, device=device, weights=weights),
    )
    prepared = prepare_generation(options)
    tokenizer = None
    if prompt is not None and prompt_ids is None:
        tokenizer = tokenizer_of(model)
        _check_input(prompt)
        text = TextPrompt(text=read_text(prompt), chat=chat, system_prompt=system_prompt)
        ids = text.encode(model, tokenizer)
    elif prompt_ids is not None and prompt is None:
        for name, value in opt.given(chat=chat, system_prompt=system_prompt).items():
            raise UserError(f"{name}={value!r} has no effect with --prompt-ids: leave it out, or give --prompt")
        tokenizer = None if json else find_tokenizer(model)
        ids = read_prompt_ids(prompt_ids)
    else:
        raise UserError("prompt: give either --prompt TEXT or --prompt-ids FILE, and not both")
    result = run_prepared(prepared, ids)
    answer = None if tokenizer is None else answer_of(result.token_ids, model, tokenizer)
    if answer is not None and not answer.text.strip():
        say(
            "the model ended at once: it was trained on other prompts, or asks for a chat template; see 'repro generate' in "
            "the README for one it answers"
            if answer.finish_reason == "stop"
            else "the model generated no text",
            file=sys.stderr,
        )
    if json:
        as_text = {} if answer is None else answer._asdict()
        print_json({"token_ids": list(result.token_ids), "forward_passes": result.forward_passes, **as_text})
    else:
        print(" ".join(map(str, result.token_ids)) if answer is None else answer.text)


def _check_input(prompt: str) -> None:
    """Refuse standard input that is closed or never ends, where the prompt comes from there."""
    if prompt != "-":
        return
    require(sys.stdin is not None, "prompt='-': standard input is closed: give it a text, or the prompt itself")
    try:
        found = os.fstat(sys.stdin.fileno())
    except (OSError, ValueError):
        return  # not a file of the system's
    is_endless = (
        stat.S_ISCHR(found.st_mode) and not sys.stdin.isatty() and not os.path.samestat(found, os.stat(os.devnull))
    )
    require(not is_endless, "prompt='-': standard input is a device: give it a text, or the prompt itself")
