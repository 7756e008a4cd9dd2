"""The block-diffusion engine behind a server: blocks are told as they are final, and what is cancelled holds nothing."""

import numpy as np
import pytest
from support.block_runs import alone, engine_for, is_whole, request

from engines.blockdiffusion.rules import JointThreshold, LowConfidence, Static
from engines.blockdiffusion.sequence import BlockSampling
from engines.server.diffusion import BlockGeneration, ServedBlocks
from engines.server.protocol import Admitted, Failed, Finished, Submission, Tokens

B = 8
RULES = (LowConfidence(threshold=0.4), JointThreshold(threshold=0.5, max_post_steps=3), Static(steps=3))


def asked(number, stop_ids=frozenset()):
    return request(number, 5 + 4 * number, 2 * B + 3 + number, RULES[number % 3], stop_ids=stop_ids)


def submission(number, *, wants_tokens, stop_ids=frozenset()):
    own = asked(number, stop_ids)
    generation = BlockGeneration(
        gen_length=own.gen_length, rule=own.rule, sampling=BlockSampling(), stop_ids=own.stop_ids
    )
    return Submission(number, own.prompt_ids, generation, wants_tokens)


def drain(served):
    admitted, told, ended = [], {}, {}
    while served.has_work:
        for event in served.step():
            if isinstance(event, Admitted):
                admitted.append(event.request_id)
            elif isinstance(event, Tokens):
                assert event.request_id not in ended
                told.setdefault(event.request_id, []).append(event.token_ids)
            else:
                assert isinstance(event, Finished)
                ended[event.request_id] = event.token_ids
    return admitted, told, ended


@pytest.mark.parametrize("num_tokens", [1280, 10 * B])
def test_blocks_are_told_in_order_and_are_the_whole_answer(num_tokens):
    """Where requests are preempted, too."""
    stops = {i: frozenset(alone("sdar", asked(i))[0].ids[7 + i : 8 + i]) if i % 2 else frozenset() for i in range(6)}
    engine = engine_for("sdar", rows=48, num_tokens=num_tokens)
    served = ServedBlocks(engine)
    for i in range(6):
        served.submit(submission(i, wants_tokens=i != 2, stop_ids=stops[i]))
    admitted, told, ended = drain(served)
    assert sorted(admitted) == list(range(6))
    assert (served.status().counts["preemptions"] > 0) == (num_tokens == 10 * B)
    for i in range(6):
        parts = told.get(i, [])
        assert tuple(np.concatenate([*parts, ended[i]]).tolist()) == alone("sdar", asked(i, stops[i]))[0].ids
        # The first block holds what was left of the prompt; the last one comes with the end.
        first = B - len(asked(i).prompt_ids) % B
        assert [len(part) for part in parts] == ([] if not parts else [first, *[B] * (len(parts) - 1)])
    assert told.keys() >= {0, 4}
    assert 2 not in told
    assert is_whole(engine)


def test_what_is_cancelled_holds_nothing():
    engine = engine_for("sdar", rows=48, num_slots=2)
    served = ServedBlocks(engine)
    for i in range(3):
        served.submit(submission(i, wants_tokens=True))
    served.step()
    for i in (0, 2, 2, 7):  # running, waiting, gone, never there
        served.cancel(i)
    _, _, ended = drain(served)
    assert ended.keys() == {1}
    status = served.status()
    assert (status.running, status.waiting, status.pool_used) == (0, 0, 0)
    assert status.pool_idle > 0
    assert is_whole(engine)


def test_giving_up_fails_those_that_work_had_begun_on():
    engine = engine_for("sdar", rows=48, num_slots=2)
    served = ServedBlocks(engine)
    for i in range(3):
        served.submit(submission(i, wants_tokens=True))
    served.step()
    assert served.status().phases["denoise"] == 2
    lost = served.give_up("it broke")
    assert {event.request_id for event in lost} == {0, 1}
    assert all(isinstance(event, Failed) for event in lost)
    _, _, ended = drain(served)
    assert ended.keys() == {2}
    assert is_whole(engine)
