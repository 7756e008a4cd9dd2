"""The simulated worker and the real one, given the same policy and the same clock, take the same steps.

Compared is every question to the policy: when it was asked, what it saw and what it said. The real worker computes every
step; its clock is the simulator's cost model. Blocks of one token make the two pools count alike.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.causal import executor
from support.clusters import simulation
from support.session_engine import EngineRun, SessionEngine

from baselines.ar.sglang import SglangConfig, sglang
from engines.ar.torch.executor import PagedExecutor
from engines.cluster.sessions import Arrivals, ClosedLoop, OpenLoop, Round, Session
from engines.cost.roofline import DecodeLine
from engines.laps.batching import WaitConfig
from engines.laps.latency import StepModel
from engines.laps.ours import OnTimeConfig, ReserveConfig
from engines.laps.system import LapsConfig, laps, on_time, reserve
from engines.models.loader import load_causal
from engines.models.qwen2_config import tiny_causal
from engines.policies.batching import Chunked, LateShare, OneByOne, OnTimeQueue, PrefillFirst
from engines.policies.views import Batching, Bucket, Chunk, NextStep, PrefillQueue, Situation


@dataclass(frozen=True)
class FlooredCost:
    """A prefill step takes 5 ms and 0.1 ms a token, a decode 4 ms and a little for its context."""

    def step_s(self, chunks: Sequence[Chunk], decoding: int, context: int, mode: object = None) -> float:
        tokens = mode.tokens if isinstance(mode, Bucket) else sum(chunk.tokens for chunk in chunks)
        return 5e-3 + 1e-4 * tokens + (3e-4 * decoding + 1e-6 * context if decoding else 0.0)

    def decode_line(self, decoding: int) -> DecodeLine:
        return DecodeLine(4e-3 + 1e-4 * decoding, 1e-6, 0.0)


COST = FlooredCost()
MODEL = StepModel(
    base_s=5e-3,
    request_s=0.0,
    floor_s=0.0,
    token_s=1e-4,
    alpha=0.0,
    history_s=0.0,
    shapes={Bucket(length, batch): 4e-3 + 1e-4 * length * batch for length in (4, 16, 32) for batch in (1, 4)},
)


@dataclass
class Recording:
    """A batching policy and everything it was asked."""

    batching: Batching
    asked: list[tuple[Any, ...]] = field(default_factory=list)

    def next_step(self, at: Situation, now: float) -> NextStep:
        seen = (now, len(at.queue), [_name(task) for task in at.begun], at.decoding, at.room)
        needs = [at.need_of(task) for task in at.queue]
        plan = self.batching.next_step(at, now)
        said = [(_name(share.task), share.tokens) for share in plan.shares]
        self.asked.append((*seen, needs, said, plan.decodes, plan.wake_s, plan.mode))
        return plan


def _name(task: Any) -> tuple[Any, ...]:
    return task.session_id, task.round_index, task.kind, task.history, task.tokens, task.computed, task.ready_s


Policy = Callable[[], tuple[Batching, PrefillQueue]]


def _system(system: Any) -> Policy:
    return lambda: (system.make_batching(), system.make_queue())


POLICIES: dict[str, Policy] = {
    "one-by-one": lambda: (OneByOne(), PrefillQueue()),
    "prefill-first": lambda: (PrefillFirst(max_num_batched_tokens=64, max_num_seqs=6), PrefillQueue()),
    "chunked": lambda: (Chunked(max_num_batched_tokens=32, max_num_seqs=6), PrefillQueue()),
    "sglang": _system(sglang(SglangConfig(max_num_batched_tokens=64))),
    "laps": _system(laps(MODEL, LapsConfig(boundary=24, slo_s=0.1))),
    "laps-waits": _system(laps(MODEL, LapsConfig(boundary=24, slo_s=0.5, wait=WaitConfig(max_window_s=0.02)))),
    "reserve": _system(reserve(MODEL, ReserveConfig(slo_s=0.1), graphs="none")),
    "on-time": _system(on_time(MODEL, OnTimeConfig(slo_s=0.1), graphs="none")),
    "on-time-queue": lambda: (OneByOne(), OnTimeQueue(ttft_s=0.1, late=LateShare())),
}


@pytest.fixture(scope="module")
def model() -> Any:
    return load_causal(tiny_causal(d_model=16, n_layers=1, n_heads=2, vocab_size=50), weights="random")


def worker(model: Any, kv_tokens: int) -> PagedExecutor:
    return executor(model, num_slots=32, max_len=512, num_tokens=kv_tokens, block_size=1, longest_bucket=32)


def compare(model: Any, policy: Policy, arrivals: Arrivals, kv_tokens: int) -> tuple[EngineRun, int]:
    batching, queue = policy()
    simulated = Recording(batching)
    built = simulation(cost=COST, batching=simulated, make_queue=lambda: queue, kv_capacity=kv_tokens, max_run_steps=1)
    expected = built.run(arrivals)
    batching, queue = policy()
    real = Recording(batching)
    tokens = worker(model, kv_tokens)
    found = SessionEngine(tokens, real, COST, queue=queue).run(arrivals)
    assert real.asked == simulated.asked
    for name in ("first_token_s", "finished_s", "ready_s"):
        assert found.rounds[name] == expected.rounds[name], name
    assert tokens.tables.num_free == kv_tokens, "blocks were lost"
    assert not tokens.tables.table.any()
    assert found.facts["num_preemptions"] == expected.workers["num_preemptions"][0]
    return found, len(real.asked)


@st.composite
def sessions(draw: st.DrawFn) -> list[Session]:
    num = draw(st.integers(1, 7))
    arrivals = sorted(draw(st.lists(st.floats(0, 0.2), min_size=num, max_size=num, unique=True)))
    entry = st.builds(
        Round, st.integers(1, 40) | st.integers(1, 8), st.integers(1, 12), st.sampled_from((0.0, 0.0137, 0.1))
    )
    return [
        Session(index, arrival, tuple(draw(st.lists(entry, min_size=1, max_size=3))))
        for index, arrival in enumerate(arrivals)
    ]


@pytest.mark.parametrize("name", POLICIES)
@settings(max_examples=5, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(drawn=sessions())
def test_with_room_for_all(model, name, drawn):
    found, _ = compare(model, POLICIES[name], OpenLoop(sessions=drawn), 4000)
    for session in drawn:
        assert [len(answer) for answer in found.answers[session.session_id]] == [
            e.decode_tokens for e in session.rounds
        ]


@pytest.mark.parametrize("name", ["one-by-one", "prefill-first", "chunked"])
@settings(max_examples=9, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(drawn=sessions(), data=st.data())
def test_with_kv_for_little_more_than_the_longest_session(model, name, drawn, data):
    """Prefixes are evicted, sequences preempted, as in the simulator."""
    longest = max(session.context_tokens for session in drawn)
    compare(model, POLICIES[name], OpenLoop(sessions=drawn), longest + data.draw(st.integers(1, 60)))


@pytest.mark.parametrize("name", POLICIES)
def test_closed_loop(model, name):
    drawn = [Session(i, 0.0, (Round(5 + 7 * i % 33, 1 + i % 4, 0.003), Round(4, 2))) for i in range(12)]
    _, asked = compare(model, POLICIES[name], ClosedLoop(sessions=drawn, num_clients=4, think_s=0.001), 4000)
    assert asked >= 12


def test_memory_pressure_is_really_there(model):
    drawn = [Session(i, 0.001 * i, (Round(30, 30, 0.01), Round(20, 30))) for i in range(6)]
    found, _ = compare(model, POLICIES["chunked"], OpenLoop(sessions=drawn), 240)
    assert found.facts["num_preemptions"] > 0
    assert found.facts["evicted_blocks"] > 0
