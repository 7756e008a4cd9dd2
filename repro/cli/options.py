"""Options that several commands share, and their way into a cell's knobs."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from engines.bounds import MOST, check_most
from engines.errors import UserError
from repro.runs.cell import COMPARISON, NOTES

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")]
ResultDir = Annotated[Path | None, typer.Option(help="Where runs are [default: results/local].")]
Force = Annotated[bool, typer.Option("--force", help="Run again what is already stored.")]
OtherCode = Annotated[
    bool, typer.Option("--accept-other-code", help="Reuse stored runs that other code made, and mark them.")
]
PoolName = Annotated[
    str, typer.Option("--pool", help="Where runs are made: local, on this machine, or ray, on a cluster.")
]
Address = Annotated[
    str | None,
    typer.Option(
        help="With --pool ray: a cluster that is there, auto or host:port [default: one started for the command]."
    ),
]
Jobs = Annotated[
    int | None,
    typer.Option(help="Simulated runs at once [default: as many as pay, at most one a core that may be used]."),
]
Plot = Annotated[
    Path | None, typer.Option(help="Draw the runs into this file, .png or .pdf, with a CSV of the same name beside it.")
]
Seed = Annotated[int, typer.Option(help="Seed of arrivals, lengths, prompts and sampling.")]
Dtype = Annotated[
    str | None, typer.Option(help="float32, float16 or bfloat16 [default: the platform's; float32 in generate].")
]
Device = Annotated[str | None, typer.Option(help="cpu or cuda [default: the platform's; cpu in generate].")]
Model = Annotated[
    str | None,
    typer.Option(help="Checkpoint directory, hub id, 'tiny', or a shape (llada-8b, dream-7b) with --weights random."),
]
Weights = Annotated[str | None, typer.Option(help="checkpoint, or random for a shape without a download.")]
GenLength = Annotated[int | None, typer.Option(help="Tokens to generate [default: the platform's; 64 in generate].")]
BlockLength = Annotated[
    int | None, typer.Option(help="Tokens per diffusion block [default: the platform's; 32 in generate].")
]
Steps = Annotated[int | None, typer.Option(help="Denoising steps, over all blocks [default: one a token].")]
Temperature = Annotated[float | None, typer.Option(help="0 is greedy [default: 0].")]
TopP = Annotated[float | None, typer.Option(help="Sample from the most probable tokens up to this sum, in (0, 1].")]
TopK = Annotated[int | None, typer.Option(help="Sample from this many tokens at most.")]
Threshold = Annotated[float | None, typer.Option(help="Parallel decoding: commit every token at least this confident.")]
RetentionRatio = Annotated[float | None, typer.Option(help="Share of context rows kept, in (0, 1] [default: 0.5].")]
PoolKernel = Annotated[int | None, typer.Option(help="Width of the max-pool over scores; odd, 1 is none [default: 3].")]
Selection = Annotated[str | None, typer.Option(help="head, uniform or dense.")]
RefreshDelay = Annotated[
    int | None, typer.Option(help="1: cache built at a block's second step (as published); 0: at its first.")
]
Reading = Annotated[
    str | None,
    typer.Option(
        help="Of a baseline: published, efficient or policy [default: published where simulated, else efficient]."
    ),
]
Compat = Annotated[str | None, typer.Option(help="paper, or upstream for its first-token rule.")]
Cache = Annotated[str | None, typer.Option(help="Fast-dLLM: none, prefix or dual.")]
Factor = Annotated[float | None, typer.Option(help="Fast-dLLM's factor rule of parallel decoding.")]
Alg = Annotated[
    str | None, typer.Option(help="Dream: origin, maskgit_plus, topk_margin, entropy or confidence_threshold.")
]
AlgTemp = Annotated[
    float | None, typer.Option(help="Dream: draw the positions to commit by confidence / this; 0 takes the best.")
]
PromptInterval = Annotated[int | None, typer.Option(help="dLLM-Cache: steps between refreshes of the prompt.")]
GenInterval = Annotated[int | None, typer.Option(help="dLLM-Cache: steps between refreshes of the response.")]
TransferRatio = Annotated[
    float | None, typer.Option(help="dLLM-Cache: share of response rows updated between refreshes.")
]
Remasking = Annotated[str | None, typer.Option(help="LLaDA: low_confidence or random.")]
CfgScale = Annotated[float | None, typer.Option(help="LLaDA: classifier-free guidance, 0 is none.")]
CfgInterval = Annotated[
    int | None, typer.Option(help="dLLM-Cache: steps between forwards without the prompt, for --cfg-scale.")
]
StopAtEos = Annotated[
    bool | None, typer.Option("--stop-at-eos", help="End at a finished block that holds an end-of-text token.")
]
TiePolicy = Annotated[str | None, typer.Option(help="stable, or parity (the library's order of ties).")]


def given(**options: Any) -> dict[str, Any]:
    """The options the user set; what is None keeps its default further down."""
    return {name: value for name, value in options.items() if value is not None}


def parse_rate(text: str) -> float | None:
    """Requests per second; 'inf' (everything at once) is None."""
    if text == "inf":
        return None
    try:
        rate = float(text)
    except ValueError:
        rate = -1.0
    if not 0 < rate < float("inf"):
        raise UserError(f"request_rate={text!r} must be a positive number of requests/s, or 'inf'")
    check_most("rate", rate, prefix="request_")
    return rate


def parse_knobs(texts: Sequence[str], given: Mapping[str, Any]) -> dict[str, Any]:
    """``NAME=VALUE`` of knobs without an option; a value that is JSON (a number, true) is that, else text."""
    knobs: dict[str, Any] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not name or not equals:
            raise UserError(f"knob={text!r} is no setting: write NAME=VALUE")
        if name in (*NOTES, COMPARISON):
            raise UserError(f"knob={text!r} is a note about a run and asks nothing of it: leave it out")
        if name in given or name in knobs:
            raise UserError(f"knob={text!r} is given more than once: keep one")
        try:
            parsed = json.loads(value)
        except ValueError:
            parsed = value
        knobs[name] = value if isinstance(parsed, list | dict) else parsed
    return knobs


RANGES = {
    "delay_mean_s": (0.0, 1e6),
    "planning_rate": (1e-6, 1e6),
    "slo_ttft_s": (1e-6, 1e6),
    "slo_itl_s": (1e-6, 1e6),
    "think_s": (0.0, 1e6),
    "kappa": (0.0, 1e3),
    "layer_launch_s": (0.0, 1.0),
    "min_window_s": (0.0, 1e6),
    "max_window_s": (0.0, 1e6),
    "max_long_wait_s": (0.0, 1e6),
    "longest_wait_s": (0.0, 1e6),
    "aging": (0.0, 1e6),
    "graph_budget_gb": (0.0, 1e6),
}
"""Least and largest number of knobs of simulated families; a planner's program, and sums of times, lose their digits beyond."""


def check_ranges(knobs: Mapping[str, Any]) -> None:
    for name, (least, most) in RANGES.items():
        value = knobs.get(name)
        if isinstance(value, int | float) and not least <= value <= most:
            raise UserError(f"{name}={value} must be between {least:g} and {most:g}")


KNOB_OF = {
    "variant": "wait",
    "low": "min_tokens",
    "high": "max_tokens",
    "itl": "itl_stat",
    "degree": "deployment's degree",
    "rate": "request_rate",
}
"""Fields of the parts of a system or workload -> the knob or option that sets each, where it has another name."""


@contextmanager
def named_as_given() -> Iterator[None]:
    """What the body refuses is named as the user named it."""
    try:
        yield
    except UserError as error:
        said = re.sub(r"(?:^|(?<=, ))(\w+)(?==)", lambda field: KNOB_OF.get(field[0], field[0]), str(error))
        raise UserError(said) from error


@contextmanager
def plugged_in(knob: str, named: object) -> Iterator[None]:
    """The body calls what the knob names, if it is given: one that cannot be called so is refused."""
    try:
        yield
    except TypeError as error:
        if named is None:
            raise
        raise UserError(f"{knob}={named!r} cannot be called as a {knob} is ({error}): name a class of one") from error


def parse_memory_limit(text: str | None) -> int | None:
    """'24GB' (10^9), '64MiB' (2^20) or plain bytes."""
    if text is None:
        return None
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(B|KB|MB|GB|KIB|MIB|GIB)?", text.strip(), re.IGNORECASE)
    if match is None or float(match[1]) <= 0:
        raise UserError(f"memory_limit={text!r} is not a size: write it like 24GB or 64MiB")
    unit = (match[2] or "B").upper()
    scale = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}[unit]
    value = float(match[1]) * scale
    if value > MOST["memory_limit"]:
        raise UserError(
            f"memory_limit={text!r} is more than {MOST['memory_limit'] / 1e12:g} TB, the most that is taken"
        )
    return int(value)
