"""Prefill instances for tests: stub costs, tasks, situations and arrivals."""

import random
import sys
from collections.abc import Sequence
from functools import cache

import numpy as np

from engines.cluster.record import Table
from engines.cost.roofline import H200, DecodeLine
from engines.laps.batching import shapes_of
from engines.laps.cluster import OpenTurns, PrefillConstants, PrefillCost, Turn
from engines.laps.latency import StepModel
from engines.models.shape import QWEN2_5_14B
from engines.policies.views import Batching, Chunk, OpenQueue, PrefillQueue, PrefillTask, Situation, StepPlan

LINEAR_MODEL = StepModel(base_s=0.0, request_s=0.0, floor_s=0.0, token_s=1e-3, alpha=0.0, history_s=0.0, shapes={})
"""A millisecond a token and nothing else."""


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


def given_tokens(plan: StepPlan) -> list[tuple[int, int]]:
    return [(share.task.task_id, share.tokens) for share in plan.shares]


def queue_of(*entries: tuple[int, float]) -> OpenQueue:
    """(tokens, ready_s)."""
    queue = OpenQueue()
    for index, (tokens, ready_s) in enumerate(entries):
        queue.push(task(index, tokens, ready_s=ready_s))
    return queue


def ask(
    batching: Batching, queue: PrefillQueue, now: float, begun: Sequence[PrefillTask] = (), room: int = sys.maxsize
) -> StepPlan:
    return batching.next_step(Situation(queue, begun, 0, room, lambda task: task.tokens), now)


def execute(plan: StepPlan, begun: Sequence[PrefillTask] = ()) -> list[PrefillTask]:
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


def hostile(seed: int, load: float) -> OpenTurns:
    """Bursts of short requests that always can be on time, and long ones that cannot."""
    rng = random.Random(seed)
    entries = []
    now = 0.0
    while now < 12:
        now += rng.expovariate(load * 60)
        entries.append((now, rng.choice([20, 40, 100, 400, 4000]) if rng.random() < 0.2 else rng.randint(10, 200)))
    return turns(*entries)
