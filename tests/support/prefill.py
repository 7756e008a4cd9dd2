"""Prefill instances: tasks, turns, systems and the metrics of their runs."""

import math
import random
import sys
from collections.abc import Callable, Sequence
from functools import cache
from math import fsum
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
from support.stored_runs import MADE_UP, VALID, calibration_of, charged, run_of

from engines.cluster.record import Table
from engines.cost.roofline import H200, DecodeLine
from engines.laps.batching import shapes_of
from engines.laps.cluster import OpenTurns, PrefillConstants, PrefillCost, PrefillRun, Turn
from engines.laps.latency import StepModel
from engines.laps.ours import HALVINGS, OnTimeConfig
from engines.models.shape import QWEN2_5_14B
from engines.policies.batching import LateShare
from engines.policies.views import Batching, Chunk, NextStep, OpenQueue, PrefillQueue, PrefillTask, Situation
from repro.families.cluster.laps_record import BUCKETS, PREFILL
from repro.runs.cell import Cell
from repro.runs.record import RunRecord, empty_table
from repro.runs.store import StoredRun

Queue = TypeVar("Queue", bound=PrefillQueue)
LINEAR_MODEL = StepModel(base_s=0.0, request_s=0.0, floor_s=0.0, token_s=1e-3, alpha=0.0, history_s=0.0, shapes={})
"""A millisecond a token and nothing else."""


def paid_from_s(late: LateShare, slo_s: float, first_come_s: float) -> float:
    """Seconds of waiting after which a prefill has the share paid at the latest: it is late by then, and so given up."""
    return max(slo_s, late.patience * max(slo_s, first_come_s))


class TokenCost:
    """A step takes a millisecond a token, whatever its mode."""

    def step_s(self, chunks: Sequence[Chunk], decoding: int, context: int, mode: object = None) -> float:
        return sum(chunk.tokens for chunk in chunks) * 1e-3

    def decode_line(self, decoding: int) -> DecodeLine:
        raise AssertionError("nothing decodes here")


@cache
def h200_14b(**constants: float) -> tuple[PrefillCost, StepModel]:
    """Qwen2.5-14B on an H200, and the model fitted to it."""
    cost = PrefillCost(QWEN2_5_14B, H200, PrefillConstants(**constants))
    return cost, StepModel.profile(cost, (*shapes_of("cheapest"), *shapes_of("ladder")))


def task(task_id: int, tokens: int, ready_s: float = 0.0, history: int = 0) -> PrefillTask:
    return PrefillTask(task_id, task_id, task_id, 0, "initial", history, tokens, ready_s, ready_s)


def given_tokens(plan: NextStep) -> list[tuple[int, int]]:
    return [(share.task.task_id, share.tokens) for share in plan.shares]


def waiting(queue: Queue, *tasks: PrefillTask) -> Queue:
    """The queue with these in it."""
    for each in tasks:
        queue.push(each)
    return queue


def queue_of(*entries: tuple[int, float]) -> OpenQueue:
    """(tokens, ready_s)."""
    return waiting(OpenQueue(), *(task(index, tokens, ready_s) for index, (tokens, ready_s) in enumerate(entries)))


def ask(
    batching: Batching, queue: PrefillQueue, now: float, begun: Sequence[PrefillTask] = (), room: int = sys.maxsize
) -> NextStep:
    return batching.next_step(Situation(queue, begun, 0, room, lambda task: task.tokens), now)


def execute(plan: NextStep, begun: Sequence[PrefillTask] = ()) -> list[PrefillTask]:
    """Do a plan's work; what is begun afterwards."""
    tasks = {each.task_id: each for each in begun}
    for each, tokens in plan.shares:
        assert 0 < tokens <= each.left
        each.computed += tokens
        tasks[each.task_id] = each
    return [each for each in tasks.values() if each.left]


def turns(*entries: tuple[float, int]) -> OpenTurns:
    """(arrival_s, tokens), each a session of its own."""
    return OpenTurns(turns=[Turn(arrival_s, index, 0, 0, tokens) for index, (arrival_s, tokens) in enumerate(entries)])


def chat(rate: float, until_s: float, seed: int, *, long_share: float = 0.28) -> OpenTurns:
    """Poisson turns: 16 to 255 tokens, or for the share of long ones 256 to 2048, over up to 2000 of history."""
    rng = np.random.default_rng(seed)
    num = int(rng.poisson(rate * until_s))
    arrivals = np.sort(rng.uniform(0, until_s, num))
    short = np.exp(rng.uniform(np.log(16), np.log(255), num))
    long = np.exp(rng.uniform(np.log(256), np.log(2048), num))
    tokens = np.where(rng.random(num) < long_share, long, short).astype(int)
    history = rng.integers(0, 2000, num)
    return OpenTurns(
        turns=[
            Turn(float(arrival), index, 1, int(past), int(new), 0)
            for index, (arrival, past, new) in enumerate(zip(arrivals, history, tokens, strict=True))
        ]
    )


def ahead_of(requests: Table, index: int, model: StepModel) -> tuple[float, int]:
    """Work and number of the requests that arrived no later and had not finished, its own included."""
    arrival = requests["arrival_s"][index]
    works_s = [
        model.work_s(requests["history"][other], requests["tokens"][other])
        for other in range(index + 1)
        if requests["finished_s"][other] > arrival
    ]
    return sum(works_s), len(works_s)


STEP_MODEL = StepModel(base_s=3e-3, request_s=1e-4, floor_s=15e-3, token_s=1e-4, alpha=5e-9, history_s=0.0, shapes={})


def hostile(seed: int, load: float) -> OpenTurns:
    """Bursts of short requests that always can be on time, and long ones that cannot."""
    rng = random.Random(seed)
    entries = []
    now = 0.0
    while now < 12:
        now += rng.expovariate(load * 60)
        entries.append((now, rng.choice([20, 40, 100, 400, 4000]) if rng.random() < 0.2 else rng.randint(10, 200)))
    return turns(*entries)


Floats = npt.NDArray[np.float64]


class PrefillSummary(NamedTuple):
    """Times in seconds."""

    num_requests: int
    """Arrived after the warm-up."""
    requests_per_s: float
    """Finished after the warm-up."""
    mean_s: float
    longest_s: float
    violation_rate: float
    utilisation: float
    """Busy share of all instances, the warm-up included."""


def summarise(run: PrefillRun, warmup_s: float = 0.0) -> PrefillSummary:
    """Requests that arrived before ``warmup_s`` are left out."""
    requests, end_s = run.requests, float(run.facts["end_s"])
    arrival_s, finished_s = _floats(requests["arrival_s"]), _floats(requests["finished_s"])
    kept = arrival_s >= warmup_s
    ttft_s = finished_s - arrival_s
    return PrefillSummary(
        num_requests=int(kept.sum()),
        requests_per_s=float((finished_s >= warmup_s).sum()) / (end_s - warmup_s),
        mean_s=float(np.nanmean(ttft_s[kept])),
        longest_s=float(np.where(np.isnan(ttft_s), end_s - arrival_s, ttft_s)[kept].max()),
        violation_rate=float(np.nanmean(_floats(requests["violated"])[kept])),
        utilisation=fsum(run.instances["busy_s"]) / (end_s * len(run.instances["instance"])),
    )


def little(run: PrefillRun) -> tuple[float, float]:
    """Time-average number of requests in the system, and arrival rate times mean time in it (Little's law).

    The first integrates the number over the run's events, the second averages the requests' own times, those cut off
    by the end included: the two agree on any correct record.
    """
    end_s = float(run.facts["end_s"])
    arrival_s, finished_s = _floats(run.requests["arrival_s"]), _floats(run.requests["finished_s"])
    left = finished_s[~np.isnan(finished_s)]
    times = np.concatenate([arrival_s, left])
    change = np.concatenate([np.ones(len(arrival_s)), -np.ones(len(left))])
    order = np.argsort(times, kind="stable")
    number = np.cumsum(change[order])
    lasted = np.diff(np.append(times[order], end_s))
    stay_s = np.where(np.isnan(finished_s), end_s, finished_s) - arrival_s
    return float((number * lasted).sum()) / end_s, len(arrival_s) / end_s * float(stay_s.mean())


def _floats(column: Sequence[Any]) -> Floats:
    """Null becomes NaN."""
    return np.array([np.nan if value is None else value for value in column], dtype=np.float64)


def prefill_run(
    cell: Cell, *, rps: float = 50.0, ttft_s: float = 0.1, late: float = 0.1, end_s: float = 60.0, valid: bool = True
) -> StoredRun:
    """Mean TTFT is ``ttft_s``, P90 twice and the longest ten times that; long turns take three times as long."""

    def times(scale: float = 1.0) -> dict[str, float]:
        mean = scale * ttft_s
        return {"n": 99, "mean": mean, "p50": mean, "p90": 2 * mean, "p95": 3 * mean, "p99": 5 * mean, "max": 10 * mean}

    summary: dict[str, Any] = {
        "rps": rps,
        "tokens_s": 270 * rps,
        "end_s": end_s,
        "ttft_all_s": times(),
        "ttft_short_s": times(),
        "ttft_long_s": times(3.0),
        "by_length": {name: {"violations": late, **times(1 + place)} for place, (name, _, _) in enumerate(BUCKETS)},
        "slo_violations": late,
        "slo_violations_short": late / 2,
        "slo_violations_long": min(1.0, 2 * late),
        "in_system": rps * ttft_s,
        "requests_per_step": 4.0,
        "mixed_steps": 0.2,
        "graph_share": 0.3,
        "mode_shares": {"eager": 0.7, "fallback": 0.0, "graph": 0.3, "rung": 0.0},
        "padding": 0.1,
        "busy_share": 0.8,
        "moves_per_minute": 0.5,
    }
    facts = {"calibration": calibration_of(cell), "facts": {"num_instances": 1}}
    tables = {name: empty_table(own) for name, own in PREFILL.columns.items()}
    record = RunRecord(tables=tables, manifest={"obtained": charged(cell), **facts})
    return run_of(cell, record, summary, VALID if valid else MADE_UP)


def prefill_runs(cells: Sequence[Cell], shape: Callable[[Cell], dict[str, float]]) -> list[StoredRun]:
    return [prefill_run(cell, **shape(cell)) for cell in cells]


def longest_on_time_s(config: OnTimeConfig, ahead_s: float, num_ahead: int, model: StepModel) -> float:
    """Upper bound on the TTFT of a request behind ``ahead_s`` of work and ``num_ahead`` requests (its own included) that arrived no later.

    A step of budget b takes at most b + o, where o is its overhead, so that first come, first served it would wait F = ahead (1 + o
    / b_min) + o at most once it is seen. By max(objective, patience max(objective, F)) it is late, so given up, and the share is
    paid; the step running then ends within T_max = b_max + o. The share goes by arrival: before it are at most ``ahead_s``. A step
    does at least share b of that work, or finishes as many requests as it has places, ``max_num_seqs``, or all of them; so the work
    takes at most ahead / share (1 + o / b_min), a step for every so many requests, and one last step:

        max(objective, patience max(objective, F)) + ahead / share (1 + o / b_min) + (2 + n_ahead / max_num_seqs) T_max

    Budgets are no less than the floor below which a step takes as long, so that b + o is what it takes. Work counts as the model's,
    whose steps are true; the rest of a step leaves room for the token that the share is rounded up to. Where one of the share finds no K/V, nobody is admitted until it does.
    """
    assert config.slo_s is not None
    if not config.share:
        return math.inf
    overhead_s = model.base_s + model.request_s * config.max_num_seqs
    least_s = max(config.min_step * config.slo_s / 2**HALVINGS, model.floor_s)
    most_s = max(config.max_step * config.slo_s, model.floor_s)
    step_s, work_s = most_s + overhead_s, ahead_s * (1 + overhead_s / least_s)
    return (
        paid_from_s(config, config.slo_s, work_s + overhead_s)
        + work_s / config.share
        + (2 + num_ahead / config.max_num_seqs) * step_s
    )
