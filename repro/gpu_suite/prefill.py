"""LAPS on one card, in order of worth: what mixing short and long prompts costs decides its throughput claims, so it is
measured first, on 7B within the first minutes. Random weights; every stage is a script of ``benchmarks``, on 7B alone where
the card is too small for more, and skipped where it is too small for that.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from repro.systems.platforms import GB

MIXING, PREFILL = "mixing", "prefill"
LEAST_MEMORY, LEAST_MEMORY_7B = 100 * GB, 60 * GB
"""32B takes 65 GB of weights and 34 GB of K/V; 7B takes 15 of each, and its captured graphs."""


class Script(NamedTuple):
    stage: str
    name: str
    options: str
    estimate_s: float


SCRIPTS = (
    Script(MIXING, "prefill", "--model qwen2.5-7b --parts kappa --mixes corners --repeats 5", 26.0),
    Script(PREFILL, "prefill", "--model qwen2.5-14b --parts kappa --repeats 6", 110.0),
    Script(PREFILL, "prefill", "--model qwen2.5-14b --parts times host --repeats 12", 120.0),
    Script(PREFILL, "prefill", "--model qwen2.5-14b --parts graphs --repeats 10", 180.0),
    Script(
        PREFILL,
        "prefill_loops",
        "--model qwen2.5-14b --figures fig6 --concurrency 1 8 64 --seeds 1 --num-turns 800",
        270.0,
    ),
    Script(PREFILL, "prefill", "--model qwen2.5-32b --parts kappa --mixes corners --repeats 6", 120.0),
    Script(
        PREFILL,
        "prefill_loops",
        "--model qwen2.5-32b --figures fig1 --systems sglang-pd laps --seeds 1 --num-turns 100",
        180.0,
    ),
    Script(PREFILL, "prefill_loops", "--model qwen2.5-14b --figures fig5 --seeds 1 --num-turns 2000", 110.0),
    Script(PREFILL, "prefill", "--model qwen2.5-7b --parts times --repeats 8", 60.0),
)
SCRIPTS_7B = (
    Script(MIXING, "prefill", "--model qwen2.5-7b --parts kappa --mixes corners --repeats 5", 26.0),
    Script(PREFILL, "prefill", "--model qwen2.5-7b --parts kappa --repeats 6", 60.0),
    Script(PREFILL, "prefill", "--model qwen2.5-7b --parts times host --repeats 12", 80.0),
    Script(PREFILL, "prefill", "--model qwen2.5-7b --parts graphs --repeats 10", 120.0),
    Script(
        PREFILL,
        "prefill_loops",
        "--model qwen2.5-7b --figures fig6 --concurrency 1 8 64 --seeds 1 --num-turns 800",
        180.0,
    ),
    Script(
        PREFILL,
        "prefill_loops",
        "--model qwen2.5-7b --figures fig1 --systems sglang-pd laps --seeds 1 --num-turns 100",
        90.0,
    ),
    Script(PREFILL, "prefill_loops", "--model qwen2.5-7b --figures fig5 --seeds 1 --num-turns 2000", 80.0),
)
"""For cards that hold 14B and 32B without room for their K/V."""
SMALL_SCRIPTS = (
    Script(MIXING, "prefill", "--parts kappa --mixes least --repeats 2 --threads 1", 5.0),
    Script(PREFILL, "prefill", "--parts times graphs host --repeats 1 --threads 1", 20.0),
    Script(
        PREFILL,
        "prefill_loops",
        "--figures fig6 --systems sglang-pd laps --concurrency 2 --seeds 1 --num-turns 24 --repeats 1 --threads 1",
        20.0,
    ),
)
"""The same paths on the tiny model, for machines without a card."""


def scripts(stage: str, memory_bytes: int | None) -> Iterator[Script]:
    """The scripts of a stage, in order; ``memory_bytes`` is the card's, None without one."""
    chosen: tuple[Script, ...] = ()
    if memory_bytes is None:
        chosen = SMALL_SCRIPTS
    elif memory_bytes >= LEAST_MEMORY:
        chosen = SCRIPTS
    elif memory_bytes >= LEAST_MEMORY_7B:
        chosen = SCRIPTS_7B
    return (script for script in chosen if script.stage == stage)
