"""A worker of known times, on a clock that stands still between its deeds."""

import asyncio
from typing import Any

import pytest
from support.dynamo_stand_in import Context
from support.virtual_time import run_virtually

from baselines.servers.dynamo_worker import KnownTimes

TIMES = {"prefill_s": 0.25, "decode_s": 1.0}


async def answer(
    worker: KnownTimes, prompt_len: int, *, at_s: float = 0.0, leaves_s: float | None = None, num_tokens: int = 3
) -> list[float]:
    """When each token came."""
    loop = asyncio.get_running_loop()
    await asyncio.sleep(at_s)
    context, came_s = Context(), []
    if leaves_s is not None:
        loop.call_later(leaves_s - at_s, context.stop)
    request: dict[str, Any] = {"token_ids": [1] * prompt_len, "stop_conditions": {"max_tokens": num_tokens}}
    said = [each async for each in _stamped(worker.generate(request, context), came_s)]
    if leaves_s is None:
        assert [each["finish_reason"] for each in said] == [None] * (num_tokens - 1) + ["length"]
    return came_s


async def _stamped(answer: Any, came_s: list[float]) -> Any:
    async for each in answer:
        came_s.append(asyncio.get_running_loop().time())
        yield each


async def together(*asked: dict[str, Any]) -> list[list[float]]:
    worker = KnownTimes(**TIMES)
    return await asyncio.gather(*(answer(worker, 8, **each) for each in asked))


def test_prompts_take_turns_and_answers_do_not():
    assert run_virtually(together({}, {}, {"at_s": 5.0})) == [[2, 3, 4], [4, 5, 6], [7, 8, 9]]


@pytest.mark.parametrize(
    ("leaves_s", "got", "next_s"),
    [(0.5, [], 2.5), (1.0, [], 3.0), (2.5, [2], 4), (3.5, [2, 3], 4)],
    ids=["in its prompt", "later in its prompt", "in its answer", "later in its answer"],
)
def test_a_client_that_leaves_takes_no_more_time(leaves_s, got, next_s):
    first, second = run_virtually(together({"leaves_s": leaves_s}, {}))
    assert (first, second[0]) == (got, next_s)


def test_a_client_that_leaves_while_it_waits_takes_none():
    assert run_virtually(together({}, {"leaves_s": 1.0}, {})) == [[2, 3, 4], [], [4, 5, 6]]
