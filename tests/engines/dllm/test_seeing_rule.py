"""Refresh rules that decide by what a request's steps did."""

from dataclasses import dataclass, field, replace

import pytest
import torch
from support.engine_runs import OnDoubt, Recorder, run_together

from engines.attention.backends import varlen_attention
from engines.dllm.config import (
    DecodeConfig,
    DelayedCache,
    EngineConfig,
    GenerationConfig,
    Phase,
    RefreshRule,
    Seen,
    SparsityConfig,
)
from engines.dllm.engine import Engine
from engines.dllm.executor.compose import packed_executor
from engines.dllm.plan import Request
from engines.dllm.scheduling import KvPool, LookaheadScheduler, PhaseScheduler
from engines.dllm.sequence import Sequence
from engines.errors import RunError, UserError
from engines.models.loader import load_model

GENERATION = GenerationConfig(gen_length=24, block_length=8, steps=24)


@dataclass
class Noting(OnDoubt):
    """Keeps what it sees."""

    seen: list[Seen] = field(default_factory=list)

    def see(self, seen: Seen) -> None:
        super().see(seen)
        self.seen.append(seen)


@dataclass
class Never(OnDoubt):
    """Builds once, whatever it sees."""

    def see(self, seen: Seen) -> None:
        self.doubts = False


@dataclass
class Hasty(OnDoubt):
    """Reuses what was not built."""

    def phase(self, step_in_block: int) -> Phase:
        return Phase.REUSE


@pytest.fixture(scope="module")
def model():
    return load_model("tiny")


def requests(count: int) -> list[Request]:
    return [
        Request(
            request_id=i,
            prompt_len=12 + 5 * i,
            prompt_ids=tuple((7 * i + 3 * place) % 90 + 5 for place in range(12 + 5 * i)),
            generation=GENERATION,
        )
        for i in range(count)
    ]


def engine_of(model, rule: RefreshRule, count: int) -> Engine:
    tells = "confidences" in getattr(rule, "needs", ())
    config = EngineConfig(
        max_num_batched_tokens=400,
        max_num_seqs=count,
        sparsity=SparsityConfig(retention_ratio=0.5),
        decode=DecodeConfig(tells_confidences=tells),
    )
    return Engine(PhaseScheduler(config, KvPool(400), rule), packed_executor(model, config, 400))


def served(model, rule: RefreshRule, asked: list[Request]) -> tuple[dict[int, tuple[int, ...]], dict[int, str]]:
    """Ids, and phases of every step, by request."""
    engine = engine_of(model, rule, len(asked))
    engine.executor = noting = Recorder(engine.executor)
    outputs = run_together(engine, [(0, request) for request in asked])
    phases = dict.fromkeys(outputs, "")
    for item in (item for plan in noting.plans for item in plan.items):
        phases[item.request_id] += item.phase.value[0]
    return outputs, phases


def test_a_request_refreshes_at_the_same_steps_alone_and_in_company(model):
    asked = requests(5)
    together, phases = served(model, OnDoubt(below=0.999), asked)
    assert any("b" in own[1:8] for own in phases.values())  # beyond the first build of a block
    assert len(set(phases.values())) > 1
    for request in asked:
        alone, own = served(model, OnDoubt(below=0.999), [request])
        assert own[request.request_id] == phases[request.request_id]
        assert alone[request.request_id] == together[request.request_id]


def test_one_that_never_doubts_is_a_single_refresh(model):
    assert served(model, Never(), requests(3)) == served(model, DelayedCache(delay=0), requests(3))


@pytest.mark.parametrize("steps", [24, 12])
def test_it_sees_every_step_and_the_probabilities_of_what_was_committed(model, steps):
    """Against a forward of the model itself on the ids as they were."""
    asked = replace(requests(1)[0], generation=replace(GENERATION, steps=steps))
    engine = engine_of(model, Noting(below=1.1), 1)
    engine.submit(asked)
    sequence = engine.scheduler.find(0)
    engine.step()
    (seen,) = sequence.rule.seen
    count = 24 // steps
    assert seen[:5] == (0, 0, Phase.BUILD, count, 8 - count)
    ids = [*asked.prompt_ids, *[model.config.mask_token_id] * 24]
    with torch.inference_mode():
        logits = whole_logits(model, ids)[asked.prompt_len : asked.prompt_len + 8]
    best = logits.softmax(-1).amax(-1).sort(descending=True).values[:count]
    assert seen.confidences == pytest.approx(best.tolist(), rel=1e-4)
    while engine.step() is not None:
        pass
    assert [each.step_in_block for each in sequence.rule.seen] == [*range(steps // 3)] * 3
    assert sum(each.committed for each in sequence.rule.seen) == 24


def whole_logits(model, ids: list[int]) -> torch.Tensor:
    run = [(0, len(ids))]

    def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(q)
        varlen_attention(out, q, k, v, run, run)
        return out

    return model.logits(model(torch.tensor(ids), torch.arange(len(ids)), attend))


def test_state_is_a_request_s_own():
    first, second = (Sequence(request, OnDoubt(), EngineConfig()) for request in requests(2))
    first.advance(1, confidences=(0.1,))
    second.advance(1, confidences=(0.95,))
    assert (first.phase, second.phase) == (Phase.BUILD, Phase.REUSE)


def test_what_no_step_can_be_ends_the_run(model):
    with pytest.raises(RunError, match="Hasty reuses a cache before one was built"):
        Sequence(requests(1)[0], Hasty(), EngineConfig())


def test_lookahead_refuses_it():
    with pytest.raises(UserError, match="OnDoubt decides as it goes"):
        LookaheadScheduler(EngineConfig(), KvPool(10), OnDoubt())
