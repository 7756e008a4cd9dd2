"""The engine on real policies and on the wall's clock: right tokens whatever the schedule, nothing left behind."""

import numpy as np
import pytest
from support.causal import executor, generate, small_model, start
from support.refusals import refuses

from engines.ar.sampling import SamplingParams
from engines.ar.torch.engine import Engine, WallClock, random_prompts
from engines.ar.torch.executor import TorchExecutor
from engines.cluster.sessions import ClosedLoop, OpenLoop, Round, Session
from engines.errors import UserError
from engines.models.decoder import CausalModel
from engines.policies.batching import Chunked, OneByOne, PrefillFirst
from engines.policies.views import IDLE, Situation, StepPlan
from engines.runtime.rows import OutOfBlocksError

SESSIONS = [
    Session(7, 0.0, (Round(20, 6, 0.001), Round(9, 5), Round(30, 1))),
    Session(8, 0.0005, (Round(3, 12),)),
    Session(9, 0.001, (Round(50, 1, 0.002), Round(17, 8))),
    Session(10, 0.001, (Round(31, 7, 0.0), Round(5, 4))),
]


@pytest.fixture(scope="module")
def model() -> CausalModel:
    return small_model()


def offline(model: CausalModel, session: Session) -> list[list[int]]:
    """The session alone, each turn prefilled from its first token: no cache, no company, no policy."""
    prompt = random_prompts(model.config.vocab_size, 0)
    worker = executor(model)
    ids: list[int] = []
    answers = []
    for index, (_, decode, _) in enumerate(session.rounds):
        ids += prompt(session, index).tolist()
        slot = start(worker, np.array(ids))
        answers.append(generate(worker, slot, len(ids), decode))
        ids += answers[-1]
        worker.close_slot(slot)
    return answers


@pytest.mark.parametrize(
    ("batching", "options"),
    [
        (OneByOne(), {}),
        (PrefillFirst(max_num_batched_tokens=64, max_num_seqs=8), {}),
        (Chunked(max_num_batched_tokens=16, max_num_seqs=8), {}),
        # Room for little more than one session: prefixes are evicted and sequences preempted.
        (Chunked(max_num_batched_tokens=16, max_num_seqs=8), {"num_tokens": 96, "block_size": 8}),
        (PrefillFirst(max_num_batched_tokens=64, max_num_seqs=2), {"num_slots": 2}),
    ],
    ids=["one-by-one", "prefill-first", "chunked", "scarce-blocks", "scarce-slots"],
)
def test_answers_are_those_of_each_session_alone(model, batching, options):
    worker = executor(model, **options)
    run = Engine(executor=worker, batching=batching, clock=WallClock()).run(OpenLoop(sessions=SESSIONS))
    assert run.answers == {session.session_id: offline(model, session) for session in SESSIONS}
    assert run.facts["stop_reason"] is None
    assert worker.tables.num_free == worker.tables.num_blocks
    assert worker.tables.num_free_slots == worker.tables.num_slots
    for first, last, ready in zip(*(run.rounds[n] for n in ("first_token_s", "finished_s", "ready_s")), strict=True):
        assert ready <= first <= last


def test_the_walls_clock_orders_what_it_measures(model):
    run = Engine(executor=executor(model), batching=PrefillFirst()).run(
        ClosedLoop(sessions=SESSIONS, num_clients=2, think_s=0.0)
    )
    starts, ends = run.steps["start_s"], run.steps["end_s"]
    assert all(a < b for a, b in zip(starts, ends, strict=True))
    assert all(end <= start for end, start in zip(ends, starts[1:], strict=False))
    assert sum(run.steps["tokens"]) == sum(session.prefill_tokens for session in SESSIONS)
    decoded = sum(session.decode_tokens - len(session.rounds) for session in SESSIONS)
    assert sum(run.steps["decoding"]) == decoded
    assert all(value >= 0 for value in run.steps["decide_s"])


def test_a_sampled_run_repeats_to_the_token(model):
    sampling = SamplingParams(temperature=1.0, top_p=0.9, seed=3)
    runs = [
        Engine(executor=executor(model), batching=batching, sampling=sampling).run(OpenLoop(sessions=SESSIONS))
        for batching in (OneByOne(), Chunked(max_num_batched_tokens=16))
    ]
    assert runs[0].answers == runs[1].answers


class Careless:
    """Admits whatever waits."""

    def next_step(self, at: Situation, now: float) -> StepPlan:
        return PrefillFirst().next_step(at._replace(room=10**9), now)


class Idle:
    def next_step(self, at: Situation, now: float) -> StepPlan:
        return IDLE


def test_a_policy_that_ignores_the_room_is_told_so_and_nothing_leaks(model):
    worker = executor(model, num_tokens=64, block_size=8)
    with pytest.raises(OutOfBlocksError, match=r"it must keep to Situation\.room"):
        Engine(executor=worker, batching=Careless()).run(
            OpenLoop(sessions=[Session(i, 0.0, (Round(50, 10),)) for i in range(2)])
        )
    assert worker.tables.num_free == worker.tables.num_blocks
    run = Engine(executor=worker, batching=OneByOne()).run(OpenLoop(sessions=[Session(0, 0.0, (Round(50, 10),))]))
    assert [len(answer) for answer in run.answers[0]] == [10]


def test_a_policy_that_never_starts_anything_ends_the_run_with_the_reason(model):
    run = Engine(executor=executor(model), batching=Idle()).run(OpenLoop(sessions=SESSIONS[:1]))
    assert run.answers == {}
    assert "leaves waiting prefills where they are" in run.facts["stop_reason"]
    assert run.rounds["first_token_s"] == [None]


def test_a_run_can_be_stopped(model):
    worker = executor(model)
    endless = [Session(i, 0.0, (Round(5, 50),)) for i in range(500)]
    run = Engine(executor=worker, batching=OneByOne()).run(ClosedLoop(sessions=endless, num_clients=3), until_s=0.05)
    assert run.facts["stop_reason"] == "stopped at 0.05 s"
    assert 0 < len(run.rounds["ready_s"]) < 500
    assert worker.tables.num_free == worker.tables.num_blocks


def test_sessions_that_cannot_fit_are_refused(model):
    engine = Engine(executor=executor(model, num_tokens=64), batching=OneByOne())
    with pytest.raises(UserError, match="session 3 grows to 90 tokens; the pool holds 64"):
        engine.run(OpenLoop(sessions=[Session(3, 0.0, (Round(80, 10),))]))


@pytest.mark.parametrize(
    ("options", "said"),
    [({"max_len": 5000}, "max_len=5000"), ({"num_tokens": 0}, "num_tokens=0"), ({"num_slots": 0}, "num_slots=0")],
)
def test_sizes_that_cannot_be_are_refused(model, options, said):
    with pytest.raises(UserError, match=said):
        executor(model, **options)


def test_ids_outside_the_vocabulary_are_refused(model):
    worker: TorchExecutor = executor(model)
    slot = worker.open()
    with pytest.raises(UserError, match="between 0 and 96"):
        worker.write(slot, 0, [5, 97])
    with refuses("max_len=256"):
        worker.write(slot, 250, [1] * 7)
