"""Holds On-time against the orders of others over many loads: python benchmarks/queues.py --help

One instance, composed, serves 2,000 turns by every order: with LMSYS-Chat-1M's lengths by three models, tight and loose
objectives, bursts, steps 30 % off either way and beliefs times 0.6 and 1.5, with equal prompts, and with ShareGPT's first prompts and those of Azure's
and Mooncake's traces, consecutive ones from a place drawn by the seed, where $REPRO_DATA_DIR holds them. A load of 1 is what SGLang serves
with 256 clients; of other lengths the rate with as much work. LAPS, and what is called searched, is the setting with the fewest
late turns of several, chosen cell by cell on the very seeds; SGLang, SRPT and On-time are as by default.

    late        turns whose first token was later than the objective, %; of prompts above 1,000 tokens, %
    longest     longest wait, s
    p99         P99 TTFT, s
    more late   late turns of On-time above theirs, in points; ends of Student's 95 % interval over paired seeds, and the lower end of
                that above 1,000 tokens
    times       longest wait of On-time over theirs
    p99 from    lower end of the same interval of the difference of P99 TTFT, s
"""

from __future__ import annotations

import csv
import gzip
import json
import math
import os
import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cache, partial
from pathlib import Path
from statistics import fmean
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
from common import Rows, add_counts, parser_of, run, shown, table, write_csv

from engines.errors import require
from engines.laps.cluster import OpenTurns, Turn
from engines.laps.latency import StepModel
from engines.laps.ours import OnTimeConfig
from engines.policies.views import StepTimes
from paper_figures.laps.contenders import LARGE, LMSYS, MIDDLE, SMALL, rate_of
from repro.cores import usable_cores
from repro.runs.cell import Cell, Scalar
from repro.runs.experiment import prepare
from repro.runs.statistics import mean_interval
from repro.runs.system import free_of
from repro.runs.workers import worker_processes
from repro.systems.cluster.laps import PrefillDeployment
from repro.systems.cluster.laps_settings import PrefillSettings
from repro.workloads.card import DATA_DIR_VARIABLE

LOADS = (0.5, 0.7, 0.8, 0.95, 1.05)
LONG_LOAD = 0.8
"""Up to it long prompts must not pay."""
LAPS: Sequence[Mapping[str, Scalar]] = (
    {},
    {"wait": "off"},
    {"max_long_wait_s": 0.2},
    {"chunk_tokens": 8192},
    {"wait": "off", "max_long_wait_s": 0.2},
    {"wait": "off", "chunk_tokens": 8192},
)
_BY_OBJECTIVE = "by objective"
"""Its steps are the parts of the objective that On-time's are."""
_FREE = (("SGLang", "sglang-pd"), ("SRPT", "srpt"), ("Reserve", "reserve"))
ORDERS: Mapping[str, tuple[str, Mapping[str, Scalar]]] = {
    "On-time": ("on-time", {}),
    "SGLang": ("sglang-pd", {}),
    "SRPT": ("srpt", {}),
    "Reserve": ("reserve", {}),
    "by due time": ("on-time", {"share": 1.0, "patience": 0.0}),
    "Moore-Hodgson": ("on-time", {"share": 0.0}),
    **{f"LAPS {place}": ("laps", own) for place, own in enumerate(LAPS)},
    **{
        f"{title} {place}": (system, own)
        for title, system in _FREE
        for place, own in enumerate(own for knob in free_of(system) for own in knob.settings)
    },
    f"SRPT {_BY_OBJECTIVE}": ("srpt", {}),
    f"Reserve {_BY_OBJECTIVE}": ("reserve", {}),
}
"""The first is held against the others."""
SEARCHED = {
    title if title == "LAPS" else f"{title}, searched": tuple(order for order in ORDERS if order.startswith(title))
    for title in ("LAPS", "SGLang", "SRPT", "Reserve")
}
"""The settings that each is the best of; they are no rows of their own, but for the defaults."""
_TRIED = {order for tried in SEARCHED.values() for order in tried} - {"SGLang", "SRPT", "Reserve"}
ENDS = ("by due time", "Moore-Hodgson")
"""The ends of On-time's own front, by its share."""
_LONG = 1000


@dataclass(frozen=True, kw_only=True)
class Traffic:
    name: str
    knobs: Mapping[str, Scalar] = field(default_factory=dict)
    slo_s: float = 0.4
    noise: float = 0.0
    """Steps are so much longer or shorter at most."""
    belief: float = 1.0
    """What policies believe that a step takes, over what it takes."""
    lengths: Callable[[], Sequence[int]] | None = None
    """Tokens of prompts in the order that they came; LMSYS-Chat-1M's turns, drawn, by default."""

    @property
    def model(self) -> str:
        return str(self.knobs.get("model", MIDDLE))


def _azure(name: str) -> Sequence[int]:
    with _data(f"azure/AzureLLMInferenceTrace_{name}.csv").open(encoding="utf-8", newline="") as opened:
        return [int(row["ContextTokens"]) for row in csv.DictReader(opened)]


def _sharegpt() -> Sequence[int]:
    """First prompts, at four characters a token; their file is sorted by length, so they are shuffled."""
    with _data("sharegpt/sharegpt_90k_first_prompt_lengths.csv").open(encoding="utf-8", newline="") as opened:
        lengths = [math.ceil(int(row["chars"]) / 4) for row in csv.DictReader(opened)]
    random.Random(0).shuffle(lengths)
    return lengths


def _mooncake() -> Sequence[int]:
    """Cut to what a GPU holds beside the model."""
    with gzip.open(_data("mooncake/conversation_trace.jsonl.gz"), "rt", encoding="utf-8") as opened:
        return [min(int(json.loads(line)["input_length"]), 30_000) for line in opened]


def _data(name: str) -> Path:
    path = Path(os.environ[DATA_DIR_VARIABLE]) / name
    require(
        path.is_file(),
        f"{DATA_DIR_VARIABLE}={os.environ[DATA_DIR_VARIABLE]!r} has no {name}: unset it, or put it there",
    )
    return path


TRAFFIC = (
    Traffic(name="LMSYS"),
    Traffic(name="LMSYS, 7B", knobs={"model": SMALL}),
    Traffic(name="LMSYS, 32B", knobs={"model": LARGE}),
    Traffic(name="objective 0.05 s", slo_s=0.05),
    Traffic(name="objective 2 s", slo_s=2.0),
    Traffic(name="bursts", knobs={"arrivals": "gamma", "burstiness": 0.25}),
    Traffic(name="steps 30 % off", noise=0.3),
    Traffic(name="beliefs x 0.6", belief=0.6),
    Traffic(name="beliefs x 1.5", belief=1.5),
    Traffic(name="200 tokens each", lengths=lambda: [200] * 10_000),
)
RECORDED = (
    Traffic(name="ShareGPT", lengths=_sharegpt),
    Traffic(name="Azure, code", lengths=partial(_azure, "code")),
    Traffic(name="Azure, conversation", lengths=partial(_azure, "conv")),
    Traffic(name="Mooncake, 4 s", lengths=_mooncake, slo_s=4.0),
)


@dataclass(frozen=True, kw_only=True)
class Believing(PrefillSettings):
    """The settings of a system whose policies are wrong by a factor."""

    belief: float

    def step_model(self, shapes: Any) -> StepModel:
        known = super().step_model(shapes)
        scaled = {
            each.name: self.belief * getattr(known, each.name)
            for each in fields(StepModel)
            if each.name not in ("shapes", "mean_error")
        }
        return replace(known, **scaled, shapes={shape: self.belief * known.shapes[shape] for shape in known.shapes})


@dataclass
class Noisy:
    """Steps that take up to ``noise`` more or less than ``cost`` says, evenly."""

    cost: StepTimes
    noise: float
    draws: random.Random

    def step_s(self, *step: Any) -> float:
        return self.cost.step_s(*step) * self.draws.uniform(1 - self.noise, 1 + self.noise)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.cost, name)


@dataclass(frozen=True, kw_only=True)
class Row:
    traffic: str = shown("traffic")
    load: float = shown("load")
    order: str = shown("order")
    late: float = shown("late %", ".2f")
    late_long: float | None = shown(">1,000", ".1f")
    longest_s: float = shown("longest s", ".1f")
    more_late: float | None = shown("more late", ".2f")
    low: float | None = shown("from", ".2f")
    high: float | None = shown("to", ".2f")
    long_low: float | None = shown(">1,000 from", ".1f")
    times: float | None = shown("times", ".2f")
    p99_s: float = shown("p99 s", ".2f")
    p99_low: float | None = shown("p99 from", ".2f")


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=list(range(10, 15)), help="paired")
    parser.add_argument("--csv", type=Path, help="write the rows here as a table")
    add_counts(parser, prompts=(2000, "turns of a run"), processes=(usable_cores(), "at once"))
    options = parser.parse_args()
    require(
        len(options.seeds) > 1 and len(set(options.seeds)) == len(options.seeds),
        f"seeds={options.seeds}: give at least two, each once: differences have intervals",
    )
    for path in (options.csv, options.json):
        require(path is None or path.parent.is_dir(), f"{path}: there is no folder {path and path.parent}, make it")
    traffic = (*TRAFFIC, *(RECORDED if os.environ.get(DATA_DIR_VARIABLE) else ()))
    if len(traffic) == len(TRAFFIC):
        print(f"{DATA_DIR_VARIABLE} is not set: without recorded prompts", file=sys.stderr)
    for each in traffic:
        known = options.prompts if each.lengths is None else len(each.lengths())
        require(options.prompts <= known, f"prompts={options.prompts}: {each.name} has {known}, give no more")
    cells = [(each.name, load) for each in traffic for load in LOADS]
    rows = Rows(options.json, {"seeds": options.seeds, "prompts": options.prompts})
    with worker_processes(options.processes) as pool:
        serve = partial(rows_of, seeds=tuple(options.seeds), num_prompts=options.prompts)
        for (name, load), found in zip(cells, pool.map(serve, *zip(*cells, strict=True)), strict=True):
            print(f"{name}, load {load:g}", file=sys.stderr)
            rows.rows += found
            rows.save()
    print(table(rows.rows))
    print("\n".join(verdicts(rows.rows)))
    if options.csv:
        write_csv(options.csv, rows.rows)


def verdicts(rows: Sequence[Row]) -> Iterator[str]:
    """In how many cells On-time is behind, outside noise."""
    num_cells = len({(row.traffic, row.load) for row in rows})
    others = [row for row in rows if row.more_late is not None]
    beside_sglang = [row for row in others if row.order == "SGLang"]
    searched = [row for row in others if row.order == "SGLang, searched"]

    def said(claim: str, found: Sequence[tuple[Row, str]]) -> str:
        cells = [f"{row.traffic} {row.load:g} ({how})" for row, how in found]
        return f"{claim} in {len(found)} of {num_cells} cells: {', '.join(cells) or 'none'}."

    above = [(row, row.order) for row in others if row.order not in ENDS and _is_above(row.low)]
    yield said("More late than another, outside noise,", above)
    for whose, own in (("SGLang's", beside_sglang), ("that of SGLang, searched,", searched)):
        forgotten = [(row, f"{row.times:.1f}") for row in own if row.times is not None and row.times > 3]
        yield said(f"Longest wait above 3 times {whose}", forgotten)
    paying = [
        (row, f"{row.long_low:.1f}") for row in beside_sglang if row.load <= LONG_LOAD and _is_above(row.long_low)
    ]
    yield said(f"Up to a load of {LONG_LOAD:g} more late than SGLang above {_LONG:,} tokens, outside noise,", paying)
    for order in ENDS:
        behind = sum(row.order == order and _is_above(row.low) for row in others)
        yield f"More late than its own front's end '{order}' in {behind}."
    for order in dict.fromkeys(row.order for row in others):
        longer = sum(row.order == order and _is_above(row.p99_low) for row in others)
        yield f"P99 TTFT above that of {order}, outside noise, in {longer} of {num_cells}."


def _is_above(low: float | None) -> bool:
    return low is not None and low > 1e-9


def rows_of(name: str, load: float, *, seeds: Sequence[int], num_prompts: int) -> list[Row]:
    (traffic,) = (each for each in (*TRAFFIC, *RECORDED) if each.name == name)
    found = {order: [served(traffic, load, order, seed, num_prompts) for seed in seeds] for order in ORDERS}
    for title, tried in SEARCHED.items():
        found[title] = found[min(tried, key=lambda order: fmean(each.late for each in found[order]))]
    first = found[next(iter(ORDERS))]
    rows = []
    for order, own in found.items():
        if order in _TRIED:
            continue
        longest_s = fmean(each.longest_s for each in own)
        long = [each.late_long for each in own if each.late_long is not None]
        more = mean_interval([ours.late - theirs.late for ours, theirs in zip(first, own, strict=True)])
        p99_more = mean_interval([ours.p99_s - theirs.p99_s for ours, theirs in zip(first, own, strict=True)])
        long_more = [
            ours.late_long - theirs.late_long
            for ours, theirs in zip(first, own, strict=True)
            if ours.late_long is not None and theirs.late_long is not None
        ]
        is_first = own is first
        rows.append(
            Row(
                traffic=name,
                load=load,
                order=order,
                late=fmean(each.late for each in own),
                late_long=fmean(long) if long else None,
                longest_s=longest_s,
                more_late=None if is_first else more.mean,
                low=None if is_first else more.low,
                high=None if is_first else more.high,
                long_low=None if is_first or len(long_more) < 2 else mean_interval(long_more).low,
                times=None if is_first else fmean(each.longest_s for each in first) / longest_s,
                p99_s=fmean(each.p99_s for each in own),
                p99_low=None if is_first else p99_more.low,
            )
        )
    return rows


@dataclass(frozen=True, kw_only=True)
class Served:
    late: float
    late_long: float | None
    longest_s: float
    p99_s: float


def served(traffic: Traffic, load: float, order: str, seed: int, num_prompts: int) -> Served:
    deployment, workload = _prepared(traffic, rate_of(load, traffic.model), order, seed, num_prompts)
    settings = deployment.settings
    if traffic.belief != 1:
        known = {each.name: getattr(settings, each.name) for each in fields(PrefillSettings)}
        settings = Believing(**known, belief=traffic.belief)
    cluster = deployment.cluster(settings)
    if traffic.noise:
        cluster = replace(cluster, cost=Noisy(cluster.cost, traffic.noise, random.Random(1000 + seed)))
    arrivals = workload.arrivals
    if traffic.lengths is not None:
        arrivals = _stretch(traffic.lengths(), load, seed, num_prompts, deployment.settings.step_model(()))
    requests = cluster.simulate(arrivals).requests
    waits_s = np.array([math.inf if end is None else end for end in requests["finished_s"]], float) - np.array(
        requests["arrival_s"]
    )
    is_late, is_long = waits_s > traffic.slo_s, np.array(requests["tokens"]) > _LONG
    return Served(
        late=100 * float(is_late.mean()),
        late_long=100 * float(is_late[is_long].mean()) if is_long.any() else None,
        longest_s=float(waits_s.max()),
        p99_s=float(np.percentile(waits_s, 99)),
    )


def _prepared(traffic: Traffic, rate: float, order: str, seed: int, num_prompts: int) -> tuple[PrefillDeployment, Any]:
    system, own = ORDERS[order]
    if system == "reserve" and order in _TRIED and traffic.slo_s < 0.1:
        own = {"share": 1.0, **own}  # not every setting has one that keeps its longest wait there: as in `repro serve`
    if order.endswith(_BY_OBJECTIVE):
        parts = OnTimeConfig()
        own = {"min_step_s": parts.min_step * traffic.slo_s, "max_step_s": parts.max_step * traffic.slo_s}
    shared = {
        "num_prompts": num_prompts,
        "transient": True,
        "model": MIDDLE,
        "slo_ttft_s": traffic.slo_s,
        **traffic.knobs,
    }
    experiment = prepare(
        Cell(
            system=system,
            dataset=LMSYS,
            platform="h200",
            executor="roofline",
            rate=rate,
            seed=seed,
            knobs=tuple({**shared, **own}.items()),
        )
    )
    assert isinstance(experiment.deployment, PrefillDeployment)
    return experiment.deployment, experiment.workload


def _stretch(lengths: Sequence[int], load: float, seed: int, count: int, model: StepModel) -> OpenTurns:
    """``count`` prompts that follow each other, as a Poisson process with as much work a second as LMSYS-Chat-1M's have at the load."""
    draws = np.random.default_rng(seed)
    start = int(draws.integers(0, len(lengths) - count + 1))
    mean_s = fmean(model.work_s(0, tokens) for tokens in lengths)
    arrivals_s = np.cumsum(draws.exponential(mean_s / (rate_of(load) * _lmsys_work_s(count)), count))
    return OpenTurns(
        turns=[
            Turn(float(arrival_s), index, 0, 0, max(1, lengths[start + index]))
            for index, arrival_s in enumerate(arrivals_s)
        ]
    )


@cache
def _lmsys_work_s(num_prompts: int) -> float:
    """What a turn asks for in the mean, with its history."""
    deployment, workload = _prepared(TRAFFIC[0], 1.0, "SGLang", 0, num_prompts)
    model = deployment.settings.step_model(())
    return fmean(model.work_s(turn.history, turn.tokens) for turn in workload.arrivals[0].turns)


if __name__ == "__main__":
    run(main)
