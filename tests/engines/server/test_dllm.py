"""The packed engine behind a server: blocks are told as they are complete, and what is cancelled holds nothing."""

import pytest
from support.engine_runs import engine_for, run_together
from support.tiny_models import GQA, prompt_of

from engines.dllm.config import EngineConfig, GenerationConfig
from engines.dllm.plan import DelegatingExecutor, Request, StepOutcome, StepPlan
from engines.dllm.scheduling import SCHEDULERS
from engines.server.diffusion import FORGET_EVERY, ServedDllm
from engines.server.protocol import Admitted, Failed, Finished, Submission, Tokens

GENERATION = GenerationConfig(gen_length=12, block_length=4, steps=12)


def served(scheduler: str = "phase") -> ServedDllm:
    config = EngineConfig(max_num_batched_tokens=80, max_num_seqs=4, max_model_len=60, scheduler=scheduler)
    return ServedDllm(engine_for(GQA, config, 120))


def submission(request_id: int, *, wants_tokens: bool) -> Submission:
    return Submission(request_id, prompt_of(GQA, request_id, 9 + request_id), GENERATION, wants_tokens)


def request_of(asked: Submission) -> Request:
    ids = asked.prompt_ids
    return Request(request_id=asked.request_id, prompt_len=len(ids), prompt_ids=ids, generation=GENERATION)


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_blocks_are_told_in_order_and_are_the_whole_answer(scheduler):
    config = EngineConfig(max_num_batched_tokens=80, max_num_seqs=4, max_model_len=60, scheduler=scheduler)
    asked = [submission(i, wants_tokens=i % 2 == 0) for i in range(5)]
    wanted = run_together(engine_for(GQA, config, 120), [(0, request_of(each)) for each in asked])
    engine = served(scheduler)
    for each in asked:
        engine.submit(each)
    told: dict[int, list[tuple[int, ...]]] = {}
    admitted = []
    while engine.has_work:
        for event in engine.step():
            if isinstance(event, Admitted):
                admitted.append(event.request_id)
            elif isinstance(event, Tokens | Finished):
                told.setdefault(event.request_id, []).append(event.token_ids)
    assert admitted == [0, 1, 2, 3, 4]
    for request_id, parts in told.items():
        assert tuple(i for part in parts for i in part) == wanted[request_id]
        assert [len(part) for part in parts] == ([4, 4, 4] if request_id % 2 == 0 else [12])


def finished(engine: ServedDllm) -> list[int]:
    found = []
    while engine.has_work:
        found += [event.request_id for event in engine.step() if isinstance(event, Finished)]
    return found


def test_rows_and_slots_are_free_again_after_a_cancellation():
    engine = served()
    for round_ in range(3):
        for i in range(6):
            engine.submit(submission(10 * round_ + i, wants_tokens=True))
        for _ in range(2 + round_):
            engine.step()
        assert engine.status().pool_used > 0
        for i in range(6):
            engine.cancel(10 * round_ + i)
        status = engine.status()
        assert (status.waiting, status.running, status.pool_used) == (0, 0, 0)
        assert status.phases == {"refresh": 0, "reuse": 0}
    engine.submit(submission(30, wants_tokens=False))
    assert finished(engine) == [30]


def test_giving_up_costs_what_runs_and_leaves_what_waits():
    engine = served()
    for i in range(6):
        engine.submit(submission(i, wants_tokens=False))
    engine.step()
    running = engine.status().running
    assert 0 < running < 6
    lost = engine.give_up("a fault")
    assert lost == [Failed(i, "a fault") for i in range(running)]
    assert finished(engine) == list(range(running, 6))
    assert engine.status().pool_used == 0


class Lagging(DelegatingExecutor):
    """Does not know yet what a step took."""

    def execute(self, plan: StepPlan) -> StepOutcome:
        return self.executor.execute(plan)._replace(forward_s=None)


def test_a_server_keeps_nothing_of_steps_that_are_over():
    engine = served()
    inner, most = engine._engine, 0
    inner.executor = Lagging(inner.executor)
    for i in range(FORGET_EVERY // 12 + 2):
        engine.submit(submission(i, wants_tokens=False))
        while engine.has_work:
            engine.step()
            most = max(most, len(inner._executed))
    assert inner.num_steps > FORGET_EVERY
    assert most <= FORGET_EVERY
    assert len(inner._executed) == inner.num_steps % FORGET_EVERY
