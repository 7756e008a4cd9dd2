"""``repro generate``: one prompt through one system."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from engines.errors import UserError
from repro.cli import options as opt
from repro.cli.output import print_json


def generate(
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
    gen_length: opt.GenLength = None,
    block_length: opt.BlockLength = None,
    steps: opt.Steps = None,
    temperature: opt.Temperature = None,
    top_p: opt.TopP = None,
    top_k: opt.TopK = None,
    threshold: opt.Threshold = None,
    retention_ratio: opt.RetentionRatio = None,
    pool_kernel: opt.PoolKernel = None,
    selection: opt.Selection = None,
    refresh_delay: opt.RefreshDelay = None,
    compat: opt.Compat = None,
    cache: opt.Cache = None,
    factor: opt.Factor = None,
    alg: opt.Alg = None,
    alg_temp: opt.AlgTemp = None,
    prompt_interval: opt.PromptInterval = None,
    gen_interval: opt.GenInterval = None,
    transfer_ratio: opt.TransferRatio = None,
    remasking: opt.Remasking = None,
    cfg_scale: opt.CfgScale = None,
    cfg_interval: opt.CfgInterval = None,
    stop_at_eos: opt.StopAtEos = None,
    tie_policy: opt.TiePolicy = None,
    seed: opt.Seed = 0,
    dtype: opt.Dtype = None,
    device: opt.Device = None,
    weights: opt.Weights = None,
    json: opt.Json = False,
) -> None:
    """Generate from one prompt. --steps defaults to --gen-length, one token per step."""
    from engines.dllm.config import GenerationConfig
    from repro.generation import GenerateOptions, plan_generation, run_plan
    from repro.prompt import TextPrompt, answer_of, find_tokenizer, read_prompt_ids, read_text, tokenizer_of

    length = 64 if gen_length is None else gen_length
    generation = GenerationConfig(
        gen_length=length,
        steps=length if steps is None else steps,
        seed=seed,
        **opt.given(
            block_length=block_length, temperature=temperature, top_p=top_p, top_k=top_k, alg_temp=alg_temp,
            threshold=threshold, factor=factor, remasking=remasking, cfg_scale=cfg_scale, stop_at_eos=stop_at_eos,
        ),
    )  # fmt: skip
    options = GenerateOptions(
        system=system,
        model=model,
        generation=generation,
        knobs=opt.given(
            block_length=block_length, retention_ratio=retention_ratio, pool_kernel=pool_kernel, selection=selection,
            refresh_delay=refresh_delay, compat=compat, threshold=threshold, cache=cache, factor=factor, alg=alg,
            alg_temp=alg_temp, prompt_interval=prompt_interval, gen_interval=gen_interval, transfer_ratio=transfer_ratio,
            remasking=remasking, cfg_scale=cfg_scale, cfg_interval=cfg_interval,
        ),
        **opt.given(tie_policy=tie_policy, dtype=dtype, device=device, weights=weights),
    )  # fmt: skip
    plan = plan_generation(options)
    tokenizer = None
    if prompt is not None and prompt_ids is None:
        tokenizer = tokenizer_of(model)
        text = TextPrompt(text=read_text(prompt), chat=chat, system_prompt=system_prompt)
        ids = text.encode(model, tokenizer)
    elif prompt_ids is not None and prompt is None:
        for name, value in opt.given(chat=chat, system_prompt=system_prompt).items():
            raise UserError(f"{name}={value!r} has no effect with --prompt-ids: leave it out, or give --prompt")
        tokenizer = None if json else find_tokenizer(model)
        ids = read_prompt_ids(prompt_ids)
    else:
        raise UserError("prompt: give either --prompt TEXT or --prompt-ids FILE, and not both")
    result = run_plan(plan, ids)
    answer = None if tokenizer is None else answer_of(result.token_ids, model, tokenizer)
    if json:
        as_text = {} if answer is None else answer._asdict()
        print_json({"token_ids": list(result.token_ids), "forward_passes": result.forward_passes, **as_text})
    else:
        print(" ".join(map(str, result.token_ids)) if answer is None else answer.text)
