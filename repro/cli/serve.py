"""``repro serve``: a diffusion-LLM system, or a causal language model, behind OpenAI's API."""

from __future__ import annotations

import logging
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from engines.errors import UserError, require
from repro.cli import options as opt
from repro.cli.option_groups import Decoding, spread
from repro.cli.output import say

if TYPE_CHECKING:
    from repro.serving import DllmModel
    from repro.serving_ar import ArModel


@spread
def serve(
    *,
    system: Annotated[
        str | None,
        typer.Option(
            help="dllm-serve, a sampler under its continuous batching, or ar for causal models [default: the model's]."
        ),
    ] = None,
    platform: Annotated[
        str | None,
        typer.Option(help="Of a diffusion LLM: cpu-tiny, rtx4090, l40s, a100, h100, h200, b200, or module:NAME."),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            help="Checkpoint directory or hub id of a LLaDA, Dream, Qwen2 or Llama; 'tiny'; or a shape (llada-8b, "
            "dream-7b, qwen2.5-7b, tiny-qwen2) with --weights random."
        ),
    ] = None,
    served_model_name: Annotated[str | None, typer.Option(help="What requests call it [default: the model].")] = None,
    weights: opt.Weights = None,
    dtype: opt.Dtype = None,
    device: opt.Device = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on; 0 is any that is free.")] = 8000,
    api_key: Annotated[
        str | None, typer.Option(envvar="REPRO_API_KEY", help="Asked of every request under /v1.", show_envvar=True)
    ] = None,
    max_queue: Annotated[int, typer.Option(help="Requests that may wait; one more is refused with 429.")] = 256,
    request_timeout: Annotated[float, typer.Option(help="Seconds for a request, waiting included.")] = 600.0,
    drain_timeout: Annotated[float, typer.Option(help="Seconds for requests to end after SIGTERM.")] = 60.0,
    scheduler: Annotated[
        str | None,
        typer.Option(
            help="phase, request, lookahead or module:NAME [default: phase]; of ar chunked, prefill-first, sglang, laps, "
            "reserve or module:NAME [default: chunked]."
        ),
    ] = None,
    max_num_batched_tokens: Annotated[
        int | None, typer.Option(help="Query tokens per packed step [default: the platform's; of ar 2048].")
    ] = None,
    max_num_logits: Annotated[
        int | None, typer.Option(help="Logit rows alive at once [default: the platform's].")
    ] = None,
    max_num_seqs: Annotated[
        int | None, typer.Option(help="Requests running at once [default: the platform's; of ar 256].")
    ] = None,
    max_model_len: Annotated[
        int | None, typer.Option(help="Of ar: most tokens of a prompt and its answer [default: the model's positions].")
    ] = None,
    kv_tokens: Annotated[
        int | None,
        typer.Option(help="Of ar: tokens of K/V in the pool [default: what memory leaves; on a CPU 1 GiB of them]."),
    ] = None,
    keep_kv: Annotated[
        bool | None,
        typer.Option(help="Of ar: keep the K/V of answers for the prompts that go on from them [default: yes]."),
    ] = None,
    memory_limit: Annotated[
        str | None, typer.Option(help="Device memory to plan with, e.g. 24GB [default: the platform's].")
    ] = None,
    attention_backend: Annotated[
        str | None, typer.Option(help="auto, flash-attn, torch-varlen, sdpa-padded or sdpa.")
    ] = None,
    cuda_graphs: Annotated[
        bool | None, typer.Option(help="Replay the forwards of small Reuse steps, on CUDA [default: yes].")
    ] = None,
    fused_kernels: Annotated[
        bool | None, typer.Option(help="Triton kernels for 16-bit models, on CUDA [default: yes].")
    ] = None,
    decoding: Decoding,
) -> None:
    """Serve completions and chat over HTTP until SIGTERM or Ctrl-C. Settings of a generation are the defaults of requests."""
    from engines.server.run import run
    from engines.server.settings import ServerSettings
    from repro.serving_ar import SYSTEM, is_causal

    require(host.strip() != "", f"host={host!r} is empty: give an address, or 0.0.0.0 for all of this machine's")
    settings = ServerSettings(
        host=host,
        port=port,
        max_queue=max_queue,
        request_timeout_s=request_timeout,
        drain_timeout_s=drain_timeout,
        api_key=api_key,
    )
    require(
        decoding.stop_at_eos is None,
        "stop_at_eos has no effect on a server, where a request ends at its end unless it says ignore_eos: leave it out",
    )
    require(
        served_model_name is None or served_model_name.strip() != "",
        "served_model_name is empty: give the name that requests call the model, or leave it out",
    )
    of_both = opt.given(
        model=model,
        weights=weights,
        dtype=dtype,
        device=device,
        scheduler=scheduler,
        max_num_batched_tokens=max_num_batched_tokens,
        max_num_seqs=max_num_seqs,
        memory_limit=opt.parse_memory_limit(memory_limit),
    )
    of_diffusion = opt.given(
        platform=platform,
        max_num_logits=max_num_logits,
        attention_backend=attention_backend,
        cuda_graphs=cuda_graphs,
        fused_kernels=fused_kernels,
    )
    of_ar = opt.given(max_model_len=max_model_len, kv_tokens=kv_tokens, keep_kv=keep_kv)
    is_ar = system == SYSTEM or (system is None and model is not None and is_causal(model))
    chosen = system or (SYSTEM if is_ar else "dllm-serve")
    for name, value in (of_diffusion if is_ar else of_ar).items():
        raise UserError(f"{name}={value!r} has no effect with system={chosen!r}: leave it out")
    served: DllmModel | ArModel
    if is_ar:
        served = _causal({**of_both, **of_ar}, decoding, served_model_name)
    else:
        knobs = {**of_both, **of_diffusion, **decoding.given()}
        served = _diffusion(chosen, knobs, served_model_name)
    for handler in logging.getLogger().handlers:
        handler.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
    run(served, served.codec(), settings, lambda line: say(line, file=sys.stderr))


def _diffusion(system: str, knobs: dict[str, Any], name: str | None) -> DllmModel:
    from repro.serving import DllmModel

    return DllmModel.of(system=system, platform=knobs.pop("platform", "cpu-tiny"), knobs=knobs, name=name)


def _causal(options: dict[str, Any], decoding: Decoding, name: str | None) -> ArModel:
    from repro.serving_ar import SYSTEM, ArModel, ArSettings

    require(
        "model" in options, f"model is missing with system={SYSTEM!r}: give a Qwen2 or Llama checkpoint, or tiny-qwen2"
    )
    generation = {key: value for key, value in decoding.given().items() if key != "steps" or decoding.steps is not None}
    for key, value in generation.items():
        require(
            key in ("gen_length", "temperature", "top_p"),
            f"{key}={value!r} has no effect with system={SYSTEM!r}: leave it out",
        )
    return ArModel.of(ArSettings(**options, **generation), name)
