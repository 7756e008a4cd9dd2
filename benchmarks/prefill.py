"""Prefill steps of a causal decoder, measured: python benchmarks/prefill.py --help

    times    a step by prompt length L, batch B and history H, eager                     -> floor, knee, launch time
    kappa    a step of one long and many short prompts against its parts                 -> does mixing cost anything?
    graphs   capture time and memory of buckets and rungs, replay against eager          -> does a captured shape pay?
    host     what a step costs the host, beside the device

Rows are written as they are measured, so a run that is cut off loses none.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from time import perf_counter

from common import Rows, add_causal, add_counts, causal_of, parser_of, run, said

from engines.ar.torch.executor import grid
from engines.ar.torch.measured import MeasuredSteps
from engines.policies.step import Bucket, Rung
from repro.prefill.instance import Setting, executor_of, setting_of
from repro.prefill.times import Mix, Row, Shape, host_times, median_s, mixes, penalties, step_shapes, step_times

PARTS = ("kappa", "times", "graphs", "host")


def main() -> None:
    options = _options()
    asked, setting = causal_of(options), setting_of(options.model)
    executor = executor_of(setting, device=asked.device, dtype=asked.dtype)
    steps = MeasuredSteps(executor, timer=asked.timer)
    rows = Rows(options.json, asked.facts(executor))
    began = perf_counter()
    for part in options.parts:
        for values in _measure(part, steps, setting, options):
            rows.rows.append({"part": part, "model": options.model, "values": values})
            rows.save(elapsed_s=perf_counter() - began)
            print(part, said(values), flush=True)


def _measure(part: str, steps: MeasuredSteps, setting: Setting, options: argparse.Namespace) -> Iterator[Row]:
    repeats = options.repeats
    if part == "times":
        shapes = step_shapes(setting.profile_lengths, setting.profile_batches, setting.profile_histories)
        return step_times(steps, shapes, repeats=repeats)
    if part == "kappa":
        return penalties(steps, _mixes(setting, options.mixes), rounds=repeats)
    return captures(steps, setting, repeats) if part == "graphs" else host_times(steps, repeats)


def _mixes(setting: Setting, which: str) -> tuple[Mix, ...]:
    """Each long prompt with each number of each short one; the corners are the extremes of all three, the least one the
    smallest of all three."""
    longs = (setting.longs[0], round((setting.longs[0] * setting.longs[1]) ** 0.5), setting.longs[1])
    numbers = (8, 16, 32) if setting.model == "tiny" else (8, 32, 64)
    step = 1 if which == "all" else 2
    found = mixes(longs[::step], (setting.shorts[0] * 2, setting.shorts[1]), numbers[::step])
    return found[:1] if which == "least" else found


def captures(steps: MeasuredSteps, setting: Setting, repeats: int) -> Iterator[Row]:
    """Yield what a graph costs before it serves, and what it saves: ten buckets from corner to corner of the grid, and four rungs, the
    largest first."""
    lengths, batches = setting.lengths, setting.batches
    chosen: list[Bucket | Rung] = list(grid(lengths[::2], batches[::3]))
    chosen += [Rung(tokens) for tokens in (max(lengths) * 8, max(lengths) * 2, max(lengths), max(lengths) // 4)]
    chosen.sort(key=lambda size: size.tokens, reverse=True)
    for size in chosen:
        cost = steps.executor.capture([size]).get(size)
        parts = [(0, size.length)] * size.batch if isinstance(size, Bucket) else [(0, size.tokens)]
        yield {
            "mode": Shape(length=1, mode=size).mode_name,
            "capture_s": 0.0 if cost is None else cost.seconds,
            "capture_bytes": 0 if cost is None else cost.num_bytes,
            "eager_s": median_s(steps, parts, repeats),
            "replay_s": median_s(steps, parts, repeats, size),
        }


def _options() -> argparse.Namespace:
    parser = parser_of(__doc__)
    add_causal(parser)
    parser.add_argument("--parts", nargs="+", default=list(PARTS), choices=PARTS)
    parser.add_argument("--mixes", default="all", choices=("least", "corners", "all"), help="of kappa: 1, 8 or 18")
    add_counts(parser, repeats=(20, "times that each step is timed"))
    return parser.parse_args()


if __name__ == "__main__":
    run(main)
