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
    prompt: Annotated[str | None, typer.Option(help="Prompt text (needs the checkpoint's tokenizer).")] = None,
    prompt_ids: Annotated[Path | None, typer.Option(help="File of token ids, as a JSON list.")] = None,
    gen_length: opt.GenLength = None,
    block_length: opt.BlockLength = None,
    steps: opt.Steps = None,
    temperature: opt.Temperature = None,
    threshold: opt.Threshold = None,
    retention_ratio: opt.RetentionRatio = None,
    pool_kernel: opt.PoolKernel = None,
    selection: opt.Selection = None,
    refresh_delay: opt.RefreshDelay = None,
    compat: opt.Compat = None,
    cache: opt.Cache = None,
    factor: opt.Factor = None,
    alg: opt.Alg = None,
    prompt_interval: opt.PromptInterval = None,
    gen_interval: opt.GenInterval = None,
    transfer_ratio: opt.TransferRatio = None,
    remasking: opt.Remasking = None,
    cfg_scale: opt.CfgScale = None,
    tie_policy: opt.TiePolicy = None,
    seed: opt.Seed = 0,
    dtype: opt.Dtype = None,
    device: opt.Device = None,
    weights: opt.Weights = None,
    json: opt.Json = False,
) -> None:
    """Generate from one prompt. --steps defaults to --gen-length, one token per step."""
    from engines.dllm.config import GenerationConfig
    from repro.generation import GenerateOptions, plan_generation, read_prompt_ids
    from repro.generation import generate as run

    length = 64 if gen_length is None else gen_length
    generation = GenerationConfig(
        gen_length=length,
        steps=length if steps is None else steps,
        seed=seed,
        **opt.given(
            block_length=block_length, temperature=temperature, threshold=threshold, factor=factor,
            remasking=remasking, cfg_scale=cfg_scale,
        ),
    )  # fmt: skip
    settings = GenerateOptions(
        system=system,
        model=model,
        generation=generation,
        knobs=opt.given(
            retention_ratio=retention_ratio, pool_kernel=pool_kernel, selection=selection, refresh_delay=refresh_delay,
            compat=compat, threshold=threshold, cache=cache, factor=factor, alg=alg, prompt_interval=prompt_interval,
            gen_interval=gen_interval, transfer_ratio=transfer_ratio, remasking=remasking, cfg_scale=cfg_scale,
        ),
        **opt.given(tie_policy=tie_policy, dtype=dtype, device=device, weights=weights),
    )  # fmt: skip
    plan_generation(settings)
    if (prompt is None) == (prompt_ids is None):
        raise UserError("prompt: give either --prompt TEXT or --prompt-ids FILE, and not both")
    tokenizer = None
    if prompt is not None or not json:
        tokenizer = _tokenizer(model, required=prompt is not None)
    if prompt is not None:
        assert tokenizer is not None
        ids = tuple(tokenizer.encode(prompt))
    else:
        assert prompt_ids is not None
        ids = read_prompt_ids(prompt_ids)
    result = run(settings, ids)
    if json:
        print_json({"token_ids": list(result.token_ids), "forward_passes": result.forward_passes})
    elif tokenizer is not None:
        print(tokenizer.decode(result.token_ids))
    else:
        print(" ".join(map(str, result.token_ids)))


def _tokenizer(model: str, *, required: bool):  # type: ignore[no-untyped-def]
    from engines.models.checkpoint import checkpoint_dir
    from engines.models.tokenizer import load_tokenizer

    directory = checkpoint_dir(model)
    if not required and not (directory / "tokenizer.json").is_file():
        return None
    return load_tokenizer(directory)
