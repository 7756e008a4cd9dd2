"""``repro generate``, ``serve`` and ``install``: answer one prompt, serve a language model behind OpenAI's API, or install another project's server."""

import logging
import os
import shlex
import stat
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import typer

from engines.dllm.config import EngineConfig, GenerationConfig
from engines.errors import UserError, require
from engines.knobs import check_requested, knobs_of, with_knobs
from engines.models.checkpoint import is_base
from engines.server.settings import SCHEDULERS, SYSTEM, ArSettings, ServerSettings, scheduler_knobs
from repro.cli import options as opt
from repro.cli.options import Given, Knobs, Some, answer_knobs, model_knobs, platform_defaults
from repro.cli.output import print_json, say
from repro.families.dllm.settings import Device

if TYPE_CHECKING:
    from repro.prompt import TextAnswer
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


ENDED_AT_ONCE = (
    "the model ended at once: it was trained on other prompts, or asks for a chat template; see 'repro generate' in docs/using.md "
    "for one it answers"
)


DECODED = Knobs(answer_knobs, defaults=lambda: {"gen_length": 64, "steps": "one a token", "weights": "checkpoint"})
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
    decoding: Annotated[Given, DECODED],
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
