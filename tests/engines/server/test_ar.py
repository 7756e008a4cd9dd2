"""Requests that come and go over the torch worker: the tokens of each alone, whatever happens to the others."""

from collections.abc import Sequence
from copy import deepcopy
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.causal import executor, generate, prompt, small_model, start
from support.clusters import LinearCost
from support.session_engine import SessionEngine

from baselines.ar.sglang import TokenBudget
from engines.cluster.sessions import ClosedLoop, Round, Session
from engines.errors import RunError, UserError
from engines.models.decoder import CausalModel
from engines.policies.batching import Chunked, OneByOne, PrefillFirst
from engines.policies.views import IDLE, Batching, NextStep, OpenQueue, Situation
from engines.server.ar import ArGeneration, AtMost, ServedAr
from engines.server.protocol import Admitted, Event, Failed, Finished, Submission, Tokens


@pytest.fixture(scope="module")
def model() -> CausalModel:
    return small_model()


CHUNKED = Chunked(max_num_batched_tokens=16, max_num_seqs=6)


def served(
    model: CausalModel, batching: Batching = CHUNKED, *, ends: Sequence[int] = (), keeps: bool = True, **sizes: Any
) -> ServedAr:
    return ServedAr(executor(model, **sizes), batching, OpenQueue(), end_ids=frozenset(ends), budget=16, keep_kv=keeps)


def submission(i: int, ids: np.ndarray, length: int, *, tells: bool = False, **sampling: Any) -> Submission:
    generation = ArGeneration(max_tokens=length, **sampling)
    return Submission(i, tuple(ids.tolist()), generation, tells)


def alone(model: CausalModel, ids: np.ndarray, length: int) -> tuple[int, ...]:
    worker = executor(model)
    return tuple(generate(worker, start(worker, ids), len(ids), length))


def finish(engine: ServedAr) -> dict[int, tuple[int, ...]]:
    """Step until nothing is left; the answers by request."""
    answers: dict[int, tuple[int, ...]] = {}
    while engine.has_work:
        gather(engine.step(), answers)
    return answers


def gather(events: Sequence[Event], answers: dict[int, tuple[int, ...]]) -> None:
    for event in events:
        assert not isinstance(event, Failed)
        if isinstance(event, Tokens | Finished):
            answers[event.request_id] = answers.get(event.request_id, ()) + event.token_ids


def assert_nothing_is_held(engine: ServedAr) -> None:
    """Kept K/V is nobody's: given up, it leaves every block and every slot free."""
    status = engine.status()
    assert (status.pool_used, status.waiting, status.running) == (0, 0, 0)
    tables = engine._worker.executor.tables
    engine._worker.close()
    assert (tables.num_free, tables.num_free_slots) == (tables.num_blocks, tables.num_slots)
    assert not tables.table.any()


CASES: dict[str, tuple[Batching, dict[str, Any]]] = {
    "one-by-one": (AtMost(batching=OneByOne(), max_num_seqs=6), {}),
    "prefill-first": (PrefillFirst(max_num_batched_tokens=64, max_num_seqs=6), {}),
    "chunked": (CHUNKED, {}),
    "sglang": (AtMost(batching=TokenBudget(max_num_batched_tokens=24), max_num_seqs=3), {"num_slots": 3}),
    "scarce-blocks": (CHUNKED, {"num_tokens": 96, "block_size": 8, "num_slots": 6}),
    "keeps-nothing": (CHUNKED, {"keeps": False, "num_slots": 6}),
}
REQUESTS = [(20, 6), (3, 12), (50, 1), (31, 7), (9, 5), (40, 17), (1, 9), (17, 30)]


@pytest.mark.parametrize(("name", "is_int8"), [*((name, False) for name in CASES), ("chunked", True)])
def test_answers_in_company_are_those_of_each_request_alone(model, name, is_int8):
    batching, options = CASES[name]
    if is_int8:
        model = deepcopy(model)
        model.quantize()
        model.reorder(joins=True)
    engine = served(model, batching, **options)
    answers: dict[int, tuple[int, ...]] = {}
    for i, (length, tokens) in enumerate(REQUESTS):
        engine.submit(submission(i, prompt(length, i), tokens, tells=i % 2 == 0))
        gather(engine.step(), answers)
    while engine.has_work:
        gather(engine.step(), answers)
        assert engine.status().running <= 6
    assert answers == {i: alone(model, prompt(length, i), tokens) for i, (length, tokens) in enumerate(REQUESTS)}
    assert_nothing_is_held(engine)


class Recording:
    """A policy, and what it was asked and said."""

    def __init__(self, batching: Batching) -> None:
        self.batching = batching
        self.asked: list[tuple[Any, ...]] = []

    def next_step(self, at: Situation, now: float) -> NextStep:
        seen = (len(at.queue), [task.order for task in at.begun], at.decoding, at.room)
        plan = self.batching.next_step(at, now)
        self.asked.append((*seen, [(share.task.order, share.tokens) for share in plan.shares], plan.decodes))
        return plan


@pytest.mark.parametrize("options", [{}, {"num_tokens": 96, "block_size": 8}], ids=["room-for-all", "scarce-blocks"])
def test_requests_that_come_at_once_make_the_steps_of_the_engine_s_own_run(model, options):
    """The same policy object, here and in a run to the end: the same questions, the same answers, the same tokens."""
    ran, taken = Recording(CHUNKED), Recording(CHUNKED)
    sessions = [Session(i, 0.0, (Round(length, tokens),)) for i, (length, tokens) in enumerate(REQUESTS)]
    run = SessionEngine(
        executor(model, **options),
        ran,
        LinearCost(),
        queue=OpenQueue(),
        prompts=lambda session, _: prompt(session.rounds[0].prefill_tokens, session.session_id),
    ).run(ClosedLoop(sessions=sessions, num_clients=len(sessions)))
    engine = served(model, taken, keeps=False, **options)
    answers: dict[int, tuple[int, ...]] = {}
    for i, (length, tokens) in enumerate(REQUESTS):
        engine.submit(submission(i, prompt(length, i), tokens))
        if i == 0:  # the run's policy is asked once the first is there
            gather(engine.step(), answers)
    assert answers | finish(engine) == {i: tuple(answer) for i, (answer,) in run.answers.items()}
    assert taken.asked == ran.asked
    assert engine.status().counts["preemptions"] == run.facts["num_preemptions"]
    assert (run.facts["num_preemptions"] > 0) == bool(options)


def test_tokens_are_told_as_they_come_and_each_once(model):
    engine = served(model)
    engine.submit(submission(0, prompt(8), 5, tells=True))
    engine.submit(submission(1, prompt(8), 5))
    told = [[event for event in engine.step() if event.request_id == 0] for _ in range(5)]
    ids = alone(model, prompt(8), 5)
    assert told[0] == [Admitted(0), Tokens(0, ids[:1])]
    assert told[1:] == [[Tokens(0, ids[1:2])], [Tokens(0, ids[2:3])], [Tokens(0, ids[3:4])], [Finished(0, ids[4:])]]
    assert not engine.has_work


@pytest.mark.parametrize("place", [0, 3])
def test_an_end_token_ends_the_answer_unless_it_is_ignored(model, place):
    """At its first token, which the prefill makes, and at one of the decode's."""
    ids = alone(model, prompt(12), 8)
    end = ids[place]
    whole = ids[: ids.index(end) + 1]
    engine = served(model, ends=[end])
    engine.submit(submission(0, prompt(12), 8, tells=True))
    ignoring = ArGeneration(max_tokens=8, ignores_eos=True)
    engine.submit(Submission(1, tuple(prompt(12).tolist()), ignoring, False))
    assert finish(engine) == {0: whole, 1: ids}
    assert_nothing_is_held(engine)


def test_requests_sample_by_their_own_settings(model):
    """Greedy beside two seeds and a nucleus; each as alone, also where it goes on from another's kept K/V."""
    ids = prompt(24)
    asked: list[dict[str, Any]] = [
        {},
        {"temperature": 1.0, "seed": 3},
        {"temperature": 1.0, "seed": 4},
        {"temperature": 2.0, "top_p": 0.5, "seed": 3},
    ]

    def one(params: dict[str, Any]) -> tuple[int, ...]:
        engine = served(model, keeps=False)
        engine.submit(submission(0, ids, 12, **params))
        return finish(engine)[0]

    expected = [one(params) for params in asked]
    assert len(set(expected)) == 4
    engine = served(model)
    for again in range(2):
        for i, params in enumerate(asked):
            engine.submit(submission(4 * again + i, ids, 12, **params))
        answers = finish(engine)
        assert [answers[4 * again + i] for i in range(4)] == expected
    assert engine.status().counts["reused_tokens"] > 0


# ---- cancelling ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", [0, 1, 3, 6])
def test_a_cancelled_request_frees_its_blocks_at_once(model, steps):
    """Waiting, in the middle of its prefill, decoding."""
    engine = served(model)
    engine.submit(submission(0, prompt(40, 1), 20))
    engine.submit(submission(1, prompt(10, 2), 8))
    answers: dict[int, tuple[int, ...]] = {}
    for _ in range(steps):
        gather(engine.step(), answers)
    before = engine.status()
    engine.cancel(0)
    engine.cancel(0)
    engine.cancel(77)
    after = engine.status()
    assert after.pool_used <= before.pool_used
    assert (after.pool_used < before.pool_used) == (steps > 0)
    assert after.pool_idle == 0
    while engine.has_work:
        gather(engine.step(), answers)
    assert answers[1] == alone(model, prompt(10, 2), 8)
    assert_nothing_is_held(engine)


@st.composite
def histories(draw: st.DrawFn) -> list[tuple[str, int, int, int]]:
    kind = st.sampled_from(["submit", "submit", "step", "step", "step", "cancel", "again"])
    return draw(
        st.lists(st.tuples(kind, st.integers(1, 60), st.integers(1, 20), st.integers(0, 30)), min_size=1, max_size=40)
    )


ANSWERS: dict[tuple[Any, ...], tuple[int, ...]] = {}


@settings(max_examples=9, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(drawn=histories(), room=st.sampled_from([96, 160, 1024]))
def test_whatever_comes_and_goes_the_answers_are_right_and_nothing_leaks(model, drawn, room):
    """Few blocks and slots: prompts, their next turns and cancellations among evictions and preemptions."""
    engine = served(model, num_tokens=room, block_size=8, num_slots=6)
    prompts: dict[int, np.ndarray] = {}
    lengths: dict[int, int] = {}
    answers: dict[int, tuple[int, ...]] = {}
    cancelled: set[int] = set()
    for number, (kind, length, tokens, which) in enumerate(drawn):
        if kind in ("submit", "again"):
            ids = prompt(length, which)
            if kind == "again" and prompts:
                base = sorted(prompts)[which % len(prompts)]
                ids = np.concatenate([prompts[base], answers.get(base, ()), ids[:9]]).astype(np.int64)
            if len(ids) + tokens > 96:
                continue
            prompts[number], lengths[number] = ids, tokens
            engine.submit(submission(number, ids, tokens, tells=bool(which % 2)))
        elif kind == "cancel" and prompts:
            number = sorted(prompts)[which % len(prompts)]
            engine.cancel(number)
            cancelled.add(number)
        elif engine.has_work:
            gather(engine.step(), answers)
    while engine.has_work:
        gather(engine.step(), answers)
    for number, ids in prompts.items():
        whole = len(answers.get(number, ())) == lengths[number]
        assert whole or number in cancelled
        if whole:
            key = (tuple(ids.tolist()), lengths[number])
            if key not in ANSWERS:
                ANSWERS[key] = alone(model, ids, lengths[number])
            assert answers[number] == ANSWERS[key]
    assert_nothing_is_held(engine)


# ---- conversations -----------------------------------------------------------------------------------------


def test_a_next_turn_goes_on_from_the_kv_of_the_last(model):
    engine = served(model)
    first = prompt(40, 1)
    engine.submit(submission(0, first, 10))
    answer = finish(engine)[0]
    assert engine.status().pool_idle == 64, "49 tokens, in whole blocks"
    second = np.concatenate([first, answer, prompt(12, 2)]).astype(np.int64)
    before = engine.status().counts
    engine.submit(submission(1, second, 6))
    assert finish(engine)[1] == alone(model, second, 6)
    after = engine.status().counts
    assert after["reused_tokens"] - before["reused_tokens"] == 49, "all but the newest token of the answer"
    assert after["prefilled_tokens"] - before["prefilled_tokens"] == 62 - 49
    assert_nothing_is_held(engine)


def test_an_opening_that_many_share_is_not_taken_from_a_conversation(model):
    engine = served(model)
    opening = prompt(20, 1)
    talk = np.concatenate([opening, prompt(60, 2)])
    other = np.concatenate([opening, prompt(30, 3)])
    engine.submit(submission(0, talk, 4))
    finish(engine)
    engine.submit(submission(1, other, 4))
    assert finish(engine)[1] == alone(model, other, 4)
    assert engine.status().counts["reused_tokens"] == 0
    longer = np.concatenate([talk, prompt(5, 4)])
    engine.submit(submission(2, longer, 4))
    assert finish(engine)[2] == alone(model, longer, 4)
    assert engine.status().counts["reused_tokens"] == 80


def test_the_same_prompt_again_computes_its_last_token_alone(model):
    engine = served(model)
    for i in range(2):
        engine.submit(submission(i, prompt(33), 1))
        assert finish(engine)[i] == alone(model, prompt(33), 1)
    assert engine.status().counts == {"prefilled_tokens": 34, "reused_tokens": 32, "preemptions": 0}


# ---- failures -------------------------------------------------------------------------------------------------


def test_a_failed_step_costs_its_batch_alone(model, monkeypatch):
    engine = served(model, Chunked(max_num_batched_tokens=8, max_num_seqs=2))
    for i in range(4):
        engine.submit(submission(i, prompt(12, i), 6))
    for _ in range(3):
        engine.step()
    worker = engine._worker.executor
    with monkeypatch.context() as patch:
        patch.setattr(worker.model, "hidden", _raise)
        with pytest.raises(RuntimeError, match="the device is lost"):
            engine.step()
    lost = engine.give_up("the engine failed")
    assert lost == [Failed(0, "the engine failed"), Failed(1, "the engine failed")]
    assert engine.status().pool_used == 0
    assert finish(engine) == {i: alone(model, prompt(12, i), 6) for i in (2, 3)}
    assert_nothing_is_held(engine)


def _raise(*_: Any) -> Any:
    raise RuntimeError("the device is lost")


class Idle:
    def next_step(self, at: Situation, now: float) -> NextStep:
        return IDLE


class Late:
    """Waits for company for a while, as LAPS's window does."""

    def __init__(self) -> None:
        self.asked = 0

    def next_step(self, at: Situation, now: float) -> NextStep:
        self.asked += 1
        return CHUNKED.next_step(at, now) if self.asked > 3 else NextStep(wake_s=now + 1e-4)


def test_a_scheduler_that_starts_nothing_is_a_failure_and_one_that_waits_is_asked_again(model):
    engine = served(model, Idle())
    engine.submit(submission(0, prompt(5), 2))
    with pytest.raises(RunError, match="leaves waiting prompts where they are"):
        engine.step()
    late = served(model, Late())
    late.submit(submission(0, prompt(5), 2))
    assert [late.step() for _ in range(3)] == [[], [], []]
    assert finish(late)[0] == alone(model, prompt(5), 2)


def test_what_the_pool_never_holds_is_refused_in_a_sentence(model):
    engine = served(model, num_tokens=64)
    with pytest.raises(
        UserError, match="prompt of 60 tokens and max_tokens=5 make more than the 64 tokens of K/V there is room for"
    ):
        engine.submit(submission(0, prompt(60), 5))
    assert not engine.has_work
    engine.submit(submission(1, prompt(60), 4))
    assert len(finish(engine)[1]) == 4


def test_the_status_says_what_the_last_step_did(model):
    engine = served(model)
    engine.submit(submission(0, prompt(6, 1), 4))
    engine.step()
    engine.submit(submission(1, prompt(40, 2), 4))
    engine.step()
    status = engine.status()
    assert status.phases == {"prefill": 1, "decode": 1}
    assert (status.budget_used, status.budget) == (16, 16)
    assert (status.running, status.waiting, status.pool) == (2, 0, 4096)
    assert (status.forward_passes, status.committed_tokens) == (2, 2)
    finish(engine)
    assert engine.status().phases == {"prefill": 0, "decode": 0}


def test_the_default_length_gives_way_to_the_prompt():
    assert ArGeneration(default_tokens=100).length(10, 256) == 100
    assert ArGeneration(default_tokens=100).length(200, 256) == 56
    assert ArGeneration(max_tokens=90).length(200, 256) == 90
