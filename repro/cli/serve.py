"""``repro serve``: a diffusion-LLM system behind OpenAI's API."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from engines.errors import require
from repro.cli import options as opt
from repro.cli.option_groups import Decoding, spread
from repro.cli.output import say


@spread
def serve(
    *,
    system: Annotated[str, typer.Option(help="dllm-serve, or a sampler under its continuous batching.")] = "dllm-serve",
    platform: Annotated[str, typer.Option(help="cpu-tiny, rtx4090, l40s, h200, or module:NAME.")] = "cpu-tiny",
    model: opt.Model = None,
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
        str | None, typer.Option(help="phase, request, lookahead or module:NAME [default: phase].")
    ] = None,
    max_num_batched_tokens: Annotated[
        int | None, typer.Option(help="Query tokens per packed step [default: the platform's].")
    ] = None,
    max_num_logits: Annotated[
        int | None, typer.Option(help="Logit rows alive at once [default: the platform's].")
    ] = None,
    max_num_seqs: Annotated[
        int | None, typer.Option(help="Requests running at once [default: the platform's].")
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
    from repro.serving import DllmModel

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
    served = DllmModel.of(
        system=system,
        platform=platform,
        knobs=opt.given(
            model=model,
            weights=weights,
            dtype=dtype,
            device=device,
            scheduler=scheduler,
            max_num_batched_tokens=max_num_batched_tokens,
            max_num_logits=max_num_logits,
            max_num_seqs=max_num_seqs,
            memory_limit=opt.parse_memory_limit(memory_limit),
            attention_backend=attention_backend,
            cuda_graphs=cuda_graphs,
            fused_kernels=fused_kernels,
            **decoding.given(),
        ),
        name=served_model_name,
    )
    run(served, served.codec(), settings, lambda line: say(line, file=sys.stderr))
