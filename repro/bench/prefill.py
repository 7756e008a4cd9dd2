"""Prefill steps of a causal decoder, measured: python -m repro.bench.prefill --help

    times    a step by prompt length L, batch B and history H, eager                     -> floor, knee, launch time
    kappa    a step of one long and many short prompts against its parts                 -> does mixing cost anything?
    graphs   capture time and memory of buckets and rungs, replay against eager          -> does a captured shape pay?

Rows are written as they are measured, so a run that is cut off loses none.

The mixing penalty tells how much slower a step with short and long prompts is than its parts. LAPS's throughput gains at high
concurrency need a penalty of 0.20 to 0.25; a roofline gives none or less. There are two readings. Both come from rounds that time all
steps one after the other, so a slow moment of the machine affects all alike:

    kappa_sum   T(mixed) / (T(long) + T(shorts)) - 1                what running the classes apart would cost or gain
    kappa_work  T(mixed) / (T(long) + T(shorts) - T(1 token)) - 1   the same with the fixed cost of a step counted once,
                                                                    as in a mixed step: interference alone

Exclusive steps pay where kappa_sum is above 0.
"""

import argparse
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np

from engines.ar.torch.executor import MeasuredSteps, grid
from engines.errors import require
from engines.policies.views import Bucket, Rung
from repro.bench.common import Rows, add_causal, add_counts, causal_facts, causal_of, parser_of, row_text, run
from repro.families.cluster.instance import Setting, executor_of, setting_of

PARTS = ("kappa", "times", "graphs")


def main() -> None:
    options = _options()
    device_options, setting = causal_of(options), setting_of(options.model)
    executor = executor_of(setting, **device_options)
    steps = MeasuredSteps(executor)
    rows = Rows(options.json, causal_facts(device_options, executor))
    start = perf_counter()
    for part in options.parts:
        for values in _measure(part, steps, setting, options):
            rows.rows.append({"part": part, "model": options.model, "values": values})
            rows.save(elapsed_s=perf_counter() - start)
            print(part, row_text(values), flush=True)


def _measure(part: str, steps: MeasuredSteps, setting: Setting, options: argparse.Namespace) -> "Iterator[Row]":
    repeats = options.repeats
    if part == "times":
        shapes = step_shapes(setting.profile_lengths, setting.profile_batches, setting.profile_histories)
        return step_times(steps, shapes, repeats=repeats)
    if part == "kappa":
        return penalties(steps, _mixes(setting, options.mixes), rounds=repeats)
    return capture_rows(steps, setting, repeats)


def _mixes(setting: Setting, selection: str) -> "tuple[Mix, ...]":
    """Mixes of each long prompt with each number of each short one. "corners" takes the extremes of all three, "least" the smallest of all
    three."""
    longs = (setting.longs[0], round((setting.longs[0] * setting.longs[1]) ** 0.5), setting.longs[1])
    numbers = (8, 16, 32) if setting.model == "tiny" else (8, 32, 64)
    step = 1 if selection == "all" else 2
    candidates = mixes(longs[::step], (setting.shorts[0] * 2, setting.shorts[1]), numbers[::step])
    return candidates[:1] if selection == "least" else candidates


def capture_rows(steps: MeasuredSteps, setting: Setting, repeats: int) -> "Iterator[Row]":
    """Yield the cost of capturing each graph, and the time it saves. Captures ten buckets from corner to corner of the grid, and four
    rungs, largest first."""
    lengths, batches = setting.lengths, setting.batches
    sizes: list[Bucket | Rung] = list(grid(lengths[::2], batches[::3]))
    sizes += [Rung(tokens) for tokens in (max(lengths) * 8, max(lengths) * 2, max(lengths), max(lengths) // 4)]
    sizes.sort(key=lambda size: size.tokens, reverse=True)
    for size in sizes:
        cost = steps.executor.capture([size]).get(size)
        name, parts = f"rung {size.tokens}", [(0, size.tokens)]
        if isinstance(size, Bucket):
            name, parts = f"bucket {size.length}x{size.batch}", [(0, size.length)] * size.batch
        yield {
            "mode": name,
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


# -- what is measured --------------------------------------------------------------------------------------

WARMUP = 3


Row = dict[str, Any]
"""A row of a table: values by column."""


Shape = tuple[int, int, int]
"""Prompts of a step, tokens of each, and history tokens of each."""


def step_shapes(
    lengths: Sequence[int], batches: Iterable[tuple[int, int]], histories: Sequence[int]
) -> tuple[Shape, ...]:
    """Single prompts of every length over every history, and ``batches`` (prompts, tokens of each) of equal prompts."""
    singles = [(1, length, history) for history, length in product(histories, lengths)]
    return (*singles, *((batch, length, 0) for batch, length in batches))


def step_times(steps: MeasuredSteps, shapes: Sequence[Shape], *, repeats: int) -> Iterator[Row]:
    """Yield, as measured, the seconds of steps of ``batch`` prompts with ``length`` tokens over ``history`` each."""
    for batch, length, history in shapes:
        parts = [(history, length)] * batch
        for _ in range(WARMUP):
            steps.timed(parts)
        times = np.array([steps.timed(parts)[0] for _ in range(repeats)])
        yield {
            "length": length,
            "batch": batch,
            "history": history,
            "min_s": float(times.min()),
            "median_s": float(np.median(times)),
            "p90_s": float(np.quantile(times, 0.9)),
            "repeats": repeats,
        }


CONFIDENCE = 0.95
RESAMPLES = 2000


@dataclass(frozen=True, kw_only=True)
class Mix:
    """A step with one long prompt and ``shorts`` short ones."""

    long: int
    short: int
    shorts: int

    @property
    def parts(self) -> list[tuple[int, int]]:
        return [(0, self.long), *self.short_parts]

    @property
    def short_parts(self) -> list[tuple[int, int]]:
        return [(0, self.short)] * self.shorts


def mixes(longs: Sequence[int], shorts: Sequence[int], numbers: Sequence[int]) -> tuple[Mix, ...]:
    return tuple(Mix(long=long, short=short, shorts=number) for long, short, number in product(longs, shorts, numbers))


def penalties(steps: MeasuredSteps, step_mixes: Sequence[Mix], *, rounds: int, seed: int = 0) -> Iterator[Row]:
    """Yield, as measured, medians over ``rounds`` rounds with 95 % bootstrap intervals of both readings.

    The order of the steps is drawn anew in every round. ``noise`` is half the interval of T(long) against itself, first repeat to second.
    It shows how large no effect looks."""
    require(rounds >= 2, f"rounds={rounds} must be at least 2 for an interval")
    random = np.random.default_rng(seed)
    for mix in step_mixes:
        kinds = {
            "mixed": mix.parts,
            "long": [(0, mix.long)],
            "shorts": mix.short_parts,
            "floor": [(0, 1)],
            "again": [(0, mix.long)],
        }
        for parts in kinds.values():
            steps.timed(parts)
        samples: dict[str, list[float]] = {name: [] for name in kinds}
        for _ in range(rounds):
            for name in random.permutation(list(kinds)):
                samples[name].append(steps.timed(kinds[name])[0])
        times = {name: np.array(values) for name, values in samples.items()}
        separate = times["long"] + times["shorts"]
        row: Row = {"long": mix.long, "short": mix.short, "shorts": mix.shorts}
        row |= {f"{name}_s": float(np.median(times[name])) for name in ("mixed", "long", "shorts", "floor")}
        for name, parts_s in (("kappa_sum", separate), ("kappa_work", separate - times["floor"])):
            row[name], row[f"{name}_low"], row[f"{name}_high"] = interval(times["mixed"] / parts_s - 1, random)
        _, low, high = interval(times["again"] / times["long"] - 1, random)
        yield row | {"noise": (high - low) / 2, "rounds": rounds}


def interval(values: np.ndarray, random: np.random.Generator) -> tuple[float, float, float]:
    """The median, and its percentile bootstrap interval."""
    draws = np.median(random.choice(values, size=(RESAMPLES, len(values))), axis=1)
    low, high = np.quantile(draws, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return float(np.median(values)), float(low), float(high)


def median_s(
    steps: MeasuredSteps, parts: list[tuple[int, int]], repeats: int, mode: Bucket | Rung | None = None
) -> float:
    steps.timed(parts, mode)
    return median(steps.timed(parts, mode)[0] for _ in range(repeats))


if __name__ == "__main__":
    run(main)
