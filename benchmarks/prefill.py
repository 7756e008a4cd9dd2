"""Prefill steps of a causal decoder, measured: python benchmarks/prefill.py --help

    times    a step by prompt length L, batch B and history H, eager                     -> floor, knee, launch time
    kappa    a step of one long and many short prompts against its parts                 -> does mixing cost anything?
    graphs   capture time and memory of buckets and rungs, replay against eager          -> does a captured shape pay?
    host     what a step costs the host, beside the device

Rows are written as they are measured, so a run that is cut off loses none.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from statistics import median
from time import perf_counter
from typing import Any

from common import add_causal, causal_facts, causal_of, run, save, short

from engines.ar.step_mode import Bucket, Rung
from engines.ar.torch.executor import grid
from engines.ar.torch.measured import MeasuredSteps
from repro.prefill.host import host_times
from repro.prefill.instance import Setting, executor_of, setting_of
from repro.prefill.mixing import Mix, mixes, penalties
from repro.prefill.times import Shape, step_shapes, step_times

PARTS = ("kappa", "times", "graphs", "host")


@dataclass(frozen=True, kw_only=True)
class Row:
    part: str
    model: str
    values: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Capture:
    """Measured: what a graph costs before it serves, and what it saves."""

    mode: str
    capture_s: float
    capture_bytes: int
    eager_s: float
    replay_s: float


def main() -> None:
    options = _options()
    asked, setting = causal_of(options), setting_of(options.model)
    executor = executor_of(setting, device=asked.device, dtype=asked.dtype)
    facts = causal_facts(asked, executor)
    steps = MeasuredSteps(executor, timer=asked.timer)
    rows: list[Row] = []
    began = perf_counter()
    for part in options.parts:
        for values in _measure(part, steps, setting, options):
            rows.append(Row(part=part, model=options.model, values=asdict(values)))
            print(part, *(f"{name}={short(value)}" for name, value in asdict(values).items()), flush=True)
            save(options.json, rows, **facts, elapsed_s=perf_counter() - began)


def _measure(part: str, steps: MeasuredSteps, setting: Setting, options: argparse.Namespace) -> Iterator[Any]:
    repeats = options.repeats
    kinds: dict[str, Callable[[], Iterator[Any]]] = {
        "times": lambda: step_times(
            steps,
            step_shapes(setting.profile_lengths, setting.profile_batches, setting.profile_histories),
            repeats=repeats,
        ),
        "kappa": lambda: penalties(steps, _mixes(setting, options.mixes), rounds=repeats),
        "graphs": lambda: captures(steps, setting, repeats),
        "host": lambda: host_times(steps, repeats),
    }
    return kinds[part]()


def _mixes(setting: Setting, which: str) -> tuple[Mix, ...]:
    """Each long prompt with each number of each short one; the corners are the extremes of all three, the least one the
    smallest of all three."""
    longs = (setting.longs[0], round((setting.longs[0] * setting.longs[1]) ** 0.5), setting.longs[1])
    numbers = (8, 16, 32) if setting.model == "tiny" else (8, 32, 64)
    step = 1 if which == "all" else 2
    found = mixes(longs[::step], (setting.shorts[0] * 2, setting.shorts[1]), numbers[::step])
    return found[:1] if which == "least" else found


def captures(steps: MeasuredSteps, setting: Setting, repeats: int) -> Iterator[Capture]:
    """Ten buckets from corner to corner of the grid, and four rungs, the largest first."""
    lengths, batches = setting.lengths, setting.batches
    chosen: list[Bucket | Rung] = list(grid(lengths[::2], batches[::3]))
    chosen += [Rung(tokens) for tokens in (max(lengths) * 8, max(lengths) * 2, max(lengths), max(lengths) // 4)]
    chosen.sort(key=lambda size: size.tokens, reverse=True)
    for size in chosen:
        cost = steps.executor.capture([size]).get(size)
        parts = [(0, size.length)] * size.batch if isinstance(size, Bucket) else [(0, size.tokens)]
        yield Capture(
            mode=Shape(length=1, mode=size).mode_name,
            capture_s=0.0 if cost is None else cost.seconds,
            capture_bytes=0 if cost is None else cost.num_bytes,
            eager_s=_median(steps, parts, None, repeats),
            replay_s=_median(steps, parts, size, repeats),
        )


def _median(steps: MeasuredSteps, parts: list[tuple[int, int]], mode: object, repeats: int) -> float:
    steps.timed(parts, mode)
    return median(steps.timed(parts, mode)[0] for _ in range(repeats))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_causal(parser)
    parser.add_argument("--parts", nargs="+", default=list(PARTS), choices=PARTS)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--mixes", default="all", choices=("least", "corners", "all"), help="of kappa: 1, 8 or 18")
    return parser.parse_args()


if __name__ == "__main__":
    run(main)
