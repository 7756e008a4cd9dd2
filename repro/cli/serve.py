"""``repro serve`` and ``repro install``: serve a language model, or install another project's server, behind OpenAI's API."""

import logging
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import typer

from engines.dllm.config import EngineConfig
from engines.errors import require
from engines.knobs import check_requested, knobs_of, with_knobs
from engines.server.settings import SCHEDULERS, SYSTEM, ArSettings, ServerSettings, scheduler_knobs
from repro.cli import options as opt
from repro.cli.options import Given, Knobs, Some, answer_knobs, model_knobs, platform_defaults
from repro.cli.output import say

if TYPE_CHECKING:
    from repro.serving import ArModel, BlockModel, DllmModel


def _knob_groups() -> dict[str, Sequence[type | Some]]:
    model = model_knobs()
    return {**model, opt.ENGINE: (*model[opt.ENGINE], EngineConfig, ArSettings), **answer_knobs()}


def _defaults() -> Mapping[str, object]:
    """Return defaults as the help shows them: for a diffusion LLM, its platform's."""
    values = dict(platform_defaults())
    for name in ("max_num_batched_tokens", "max_num_seqs", "gen_length"):
        values[name] = f"{values[name]}; of ar {knobs_of(ArSettings)[name].default}"
    return {**values, "scheduler": f"phase; of ar the first of {', '.join(SCHEDULERS)}", "memory_limit": "the device's"}


KNOBS = Knobs(_knob_groups, without=("model", "tensor_parallel", "profile_every", "logit_rows"), defaults=_defaults)


@dataclass(frozen=True, kw_only=True)
class ServeOptions:
    panel: ClassVar[str] = opt.WHAT
    system: str | None = None
    """dllm-serve, a sampler under its continuous batching, block-diffusion, or ar for causal models [default: what fits the model]."""
    platform: str | None = None
    """Platform of a diffusion LLM: cpu-tiny, rtx4090, l40s, a100, h100, h200, b200, or module:NAME."""
    model: str | None = None
    """Checkpoint directory or hub id of a LLaDA, Dream, LLaDA2, SDAR, Fast-dLLM v2, Qwen2, Qwen3, Llama or Mistral;
    'tiny', 'tiny-long', 'tiny-far', 'tiny-roll', 'tiny-block' or 'tiny-canvas'; or a shape (llada-8b, dream-7b, qwen2.5-7b, qwen3-8b, tiny-qwen2) with --weights random."""
    served_model_name: str | None = None
    """The name that requests call the model by [default: the model]."""

    @property
    def chosen_system(self) -> str:
        from repro.families.block.settings import NAME
        from repro.serving import is_block, is_causal

        if self.system is not None:
            return self.system
        if self.model is not None and is_block(self.model):
            return NAME
        return SYSTEM if self.model is not None and is_causal(self.model) else "dllm-serve"


LISTENING = Some(ServerSettings, ("host", "port", "max_queue", "request_timeout", "drain_timeout", "unknown_fields"))
ApiKey = Annotated[
    str | None,
    typer.Option(
        envvar="REPRO_API_KEY",
        help="Asked of every request under /v1, and of /tokenize and /detokenize.",
        show_envvar=True,
        rich_help_panel=opt.SERVER,
    ),
]
AllowOrigin = Annotated[
    list[str] | None,
    typer.Option(
        metavar="URL",
        help="An origin whose pages may use the server, as https://example.org; '*' is any. Again for another.",
        rich_help_panel=opt.SERVER,
    ),
]


def serve(
    *,
    options: ServeOptions,
    listening: Annotated[Given, Knobs(lambda: {opt.SERVER: (LISTENING,)})],
    api_key: ApiKey = None,
    allow_origin: AllowOrigin = None,
    knobs: Annotated[Given, KNOBS],
    knob: opt.KnobTexts = None,
) -> None:
    """Serve completions and chat over HTTP until SIGTERM or Ctrl-C. Generation options set the defaults of requests."""
    from engines.server.run import run

    settings = ServerSettings(**listening, api_key=api_key, allow_origin=tuple(allow_origin or ()))
    name = options.served_model_name
    require(
        name is None or name.strip() != "",
        f"served_model_name={name!r} is empty: give the name that requests call the model, or leave it out",
    )
    require(
        "stop_at_eos" not in knobs,
        "stop_at_eos has no effect on a server, where a request ends at its end unless it says ignore_eos: leave it out",
    )
    served = _served_model(options, knobs | opt.parse_knobs(knob or (), knobs), name)
    for handler in logging.getLogger().handlers:
        handler.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
    run(served, served.codec(), settings, lambda line: say(line, file=sys.stderr))


def _served_model(
    options: ServeOptions, knobs: Mapping[str, Any], name: str | None
) -> "DllmModel | BlockModel | ArModel":
    from repro.families.block.settings import NAME
    from repro.serving import ArModel, BlockModel, DllmModel

    knobs = {**opt.given_options(model=options.model), **knobs}
    if options.chosen_system == NAME:
        return BlockModel.of(platform=options.platform or "cpu-tiny", knobs=knobs, name=name)
    if options.chosen_system != SYSTEM:
        platform = options.platform or "cpu-tiny"
        return DllmModel.of(system=options.chosen_system, platform=platform, knobs=opt.with_steps(knobs), name=name)
    names = scheduler_knobs(str(knobs.get("scheduler", SCHEDULERS[0])), tuple(knobs.items()))
    check_requested(
        opt.given_options(platform=options.platform, **knobs), ArSettings, names, owner=f"system={SYSTEM!r}"
    )
    require(
        options.model is not None,
        f"model is missing with system={SYSTEM!r}: give a Qwen2, Qwen3, Llama or Mistral checkpoint, or tiny-qwen2",
    )
    scheduling = tuple((name, value) for name, value in knobs.items() if name in names)
    return ArModel.of(with_knobs(ArSettings(model=str(options.model), own=scheduling), knobs), name)


def install(
    server: Annotated[str, typer.Argument(help="vllm, dynamo, sglang or sglang-router.")],
    device: Annotated[
        str | None, typer.Option(help="cpu or cuda [default: cuda where there is an NVIDIA driver].")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the commands, and run none.")] = False,
) -> None:
    """Install a server into its own virtual environment: .venv-SERVER, here or in REPRO_SERVERS_DIR. The same command again finishes an
    interrupted install, and does nothing if all is done."""
    from repro.families.http.system import environment_of

    environment = environment_of(server, device)
    if dry_run:
        for command in environment.commands():
            print(shlex.join(command))
        say(f"{server}: {environment.folder}, {environment.cost}", file=sys.stderr)
        return
    # Installers print to stderr, like our own progress.
    environment.install(
        lambda command: subprocess.run(command, stdout=sys.stderr.fileno()).returncode,
        lambda line: say(line, file=sys.stderr),
    )
