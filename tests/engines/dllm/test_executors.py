"""The same requests on a model and on a cost model: the same plans, step by step.

Metadata of a packed step, against one written token by token.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.engine_runs import CALIBRATION, Recorder, roofline, rows_of, steps_of
from support.tiny_models import GQA, network, request_on

from baselines.dllm.static.executor import padded_executor
from baselines.dllm.static.scheduler import StaticBatchScheduler
from engines.dllm.config import (
    DelayedCache,
    EngineConfig,
    GenerationConfig,
    NoCache,
    Phase,
    RefreshRule,
    Settling,
    SparsityConfig,
)
from engines.dllm.engine import Engine
from engines.dllm.executor.compose import packed_executor
from engines.dllm.executor.step import BlockRows, ItemTable, PackedRows
from engines.dllm.executor.torch import TorchExecutor
from engines.dllm.plan import Executor, PlanItem, Request, StepPlan, StepRecord
from engines.dllm.scheduling import SCHEDULERS, KvPool, Scheduler
from engines.dllm.simulated import RooflineExecutor, step_work
from engines.errors import UserError

MAX_TOTAL = 40
Arrivals = Sequence[tuple[int, Request]]
ROOFLINE = roofline(calibration=CALIBRATION)


@dataclass(frozen=True, kw_only=True)
class Case:
    """``batch_size`` None is dLLM-Serve, else a static batch with or without a cache."""

    config: EngineConfig
    kv_rows: int
    rule: RefreshRule
    batch_size: int | None
    arrivals: Arrivals

    def scheduler(self) -> Scheduler:
        if self.batch_size is None:
            return SCHEDULERS[self.config.scheduler](self.config, KvPool(self.kv_rows), self.rule)
        return StaticBatchScheduler(self.config, KvPool(self.kv_rows), self.rule, batch_size=self.batch_size)

    def torch(self) -> TorchExecutor:
        if self.batch_size is None:
            return packed_executor(network(GQA), self.config, self.kv_rows)
        return padded_executor(network(GQA), self.config, self.kv_rows, batch_size=self.batch_size)

    def run(self, executor: Executor) -> tuple[list[StepPlan], list[StepRecord]]:
        recorder = Recorder(executor)
        records = [*steps_of(Engine(self.scheduler(), recorder), self.arrivals)]
        return recorder.plans, records


@st.composite
def cases(draw: st.DrawFn) -> Case:
    is_static = draw(st.booleans())
    is_late = draw(st.booleans())
    cached = not is_static or draw(st.booleans())
    sparsity = SparsityConfig(
        selection=draw(st.sampled_from(("head", "uniform")))
        if is_static
        else draw(st.sampled_from(("head", "attended", "dense"))),
        whole_layer=None if is_static else draw(st.sampled_from((None, 1))),
        retention_ratio=draw(st.sampled_from((0.2, 0.5, 1.0))),
        refresh_delay=1 if is_static else draw(st.sampled_from((0, 1))),
    )
    block, num_blocks, per_block = draw(st.integers(1, 5)), draw(st.integers(1, 3)), draw(st.integers(1, 5))
    arrivals = []
    for i in range(draw(st.integers(1, 6))):
        gen = block * num_blocks if is_static else draw(st.integers(1, 15))
        steps = per_block * num_blocks if is_static else draw(st.integers(-(-gen // block), gen + 2 + -(-gen // block)))
        prompt_len = draw(st.integers(1, MAX_TOTAL - gen))
        generation = GenerationConfig(gen_length=gen, block_length=block, steps=steps)
        request = request_on(GQA, i, prompt_len, generation)
        arrivals.append((draw(st.integers(0, 15)) if is_late else 0, request))
    rows = max(rows_of(request, sparsity) for _, request in arrivals)
    settling = Settling()
    if not is_static:
        settling = Settling(
            settle_after=draw(st.sampled_from((None, 1, 2))),
            full_every=draw(st.integers(1, 3)) if sparsity.selection == "dense" else 1,
        )
    config = EngineConfig(
        max_num_batched_tokens=MAX_TOTAL + draw(st.integers(0, 80)),
        max_num_logits=draw(st.sampled_from((1, 4, 100))),
        max_num_seqs=draw(st.integers(1, 6)),
        max_model_len=MAX_TOTAL,
        scheduler=draw(st.sampled_from(("phase", "request", "lookahead"))),
        sparsity=sparsity,
        settling=settling,
        suppress_mask_token=not is_static,
    )
    return Case(
        config=config,
        kv_rows=rows + draw(st.integers(0, 150)) if cached else 0,
        rule=DelayedCache(delay=sparsity.refresh_delay) if cached else NoCache(),
        batch_size=draw(st.integers(1, min(4, config.max_num_seqs))) if is_static else None,
        arrivals=arrivals,
    )


@settings(max_examples=25)
@given(cases())
def test_both_executors_see_the_same_schedule(case):
    plans, records = case.run(case.torch())
    simulated_plans, simulated = case.run(RooflineExecutor(ROOFLINE, case.config))
    assert plans == simulated_plans
    for plan, real, charged in zip(plans, records, simulated, strict=True):
        for name in ("step", "plan", "done", "occupancy"):
            assert getattr(real, name) == getattr(charged, name), name
        for name in ("query_rows", "logit_rows", "committed"):
            assert getattr(real.outcome, name) == getattr(charged.outcome, name), name
        step = ROOFLINE.step_time(step_work(plan, case.config, GQA.layers))
        assert charged.duration_s == charged.outcome.forward_s == step.total_s
    assert sum(record.outcome.committed_tokens for record in records) == sum(
        r.generation.gen_length for _, r in case.arrivals
    )
    assert sorted(i for record in records for i in record.done.finished) == sorted(
        r.request_id for _, r in case.arrivals
    )
    assert sorted(i for record in records for i in record.done.first_block) == sorted(
        r.request_id for _, r in case.arrivals
    )


def item(
    phase: Phase,
    *,
    total: int = 100,
    block: tuple[int, int] = (60, 68),
    window_end: int | None = None,
    left: int = 5,
    kept: int = 46,
) -> PlanItem:
    return PlanItem(
        request_id=0,
        phase=phase,
        total_len=total,
        block_start=block[0],
        block_end=block[1],
        window_end=block[1] if window_end is None else window_end,
        commit=1,
        masks_left=left,
        kept_rows=kept,
        kv_start=0,
        step_in_block=2 if phase is Phase.REUSE else 0,
    )


def plan_of(*items: PlanItem) -> StepPlan:
    return StepPlan(items=items, admitted=(), scheduled_tokens=0)


def test_work_of_each_phase():
    config = EngineConfig(max_num_logits=2)
    full, build, reuse = (step_work(plan_of(item(phase)), config) for phase in (Phase.FULL, Phase.BUILD, Phase.REUSE))
    for work in (full, build):
        assert (work.query_rows, work.attention_pairs, work.kv_read_rows) == (100, 100 * 100, 100)
    assert (full.kv_written_rows, build.kv_written_rows) == (0, 46)
    assert (reuse.query_rows, reuse.attention_pairs, reuse.kv_read_rows, reuse.kv_written_rows) == (8, 8 * 54, 54, 8)
    # A prefix cache computes everything from the block on, and needs logits of the block alone.
    suffix = step_work(plan_of(item(Phase.REUSE, window_end=100, kept=60)), config)
    assert (suffix.query_rows, suffix.attention_pairs, suffix.kv_read_rows, suffix.kv_written_rows) == (
        40,
        40 * 100,
        100,
        40,
    )
    for work in (full, build, reuse, suffix):
        assert (work.logit_rows, work.logit_chunks, work.num_sequences) == (5, 3, 1)


@pytest.mark.parametrize(("suppress", "rows"), [(True, 5), (False, 8)])
def test_rows_without_a_mask_need_no_logits_where_the_mask_is_suppressed(suppress, rows):
    assert step_work(plan_of(item(Phase.REUSE)), EngineConfig(suppress_mask_token=suppress)).logit_rows == rows


def submit(executor: Executor, request: Request) -> None:
    config = EngineConfig(max_model_len=1000)
    Engine(SCHEDULERS["phase"](config, KvPool(1000), DelayedCache()), executor).submit(request)


def request_of(
    ids: tuple[int, ...] | None, *, prompt_len: int | None = None, threshold: float | None = None
) -> Request:
    generation = GenerationConfig(gen_length=8, block_length=4, steps=8, threshold=threshold)
    length = len(ids or ()) if prompt_len is None else prompt_len
    return Request(request_id=3, prompt_len=length, prompt_ids=ids, generation=generation)


@pytest.mark.parametrize(
    ("request_", "says"),
    [
        (request_of(None, prompt_len=4), r"request 3 has no prompt_ids of length prompt_len=4: give the token ids"),
        (request_of((1, 2), prompt_len=3), r"request 3 has no prompt_ids of length prompt_len=3"),
        (
            request_of((1,) * 250),
            r"prompt of 250 tokens \+ gen_length=8 exceeds the model's max_sequence_length=256: shorten",
        ),
        (request_of((1, GQA.vocab)), rf"prompt_ids of request 3 hold ids outside \[0, {GQA.vocab}\)"),
        (request_of((1, -1)), r"prompt_ids of request 3 hold ids outside"),
        (request_of((1, GQA.mask_id)), rf"prompt_ids of request 3 hold the mask id {GQA.mask_id}: remove it"),
        (request_of(()), r"prompt of request 3 is empty|no prompt_ids"),
    ],
)
def test_a_model_refuses_what_it_cannot_run(request_, says):
    config = EngineConfig(max_model_len=1000, max_num_seqs=1)
    executor = packed_executor(network(GQA), config, 10)
    with pytest.raises(UserError, match=says) as refused:
        submit(executor, request_)
    assert "\n" not in str(refused.value)


def test_a_simulation_refuses_thresholds():
    with pytest.raises(UserError, match=r"threshold=0\.5 cannot be simulated.*use --executor torch"):
        submit(RooflineExecutor(ROOFLINE, EngineConfig()), request_of((1, 2), threshold=0.5))


WIDTH = 41


@st.composite
def items(draw: st.DrawFn) -> list[PlanItem]:
    found = []
    for i in range(draw(st.integers(1, 5))):
        total = draw(st.integers(2, WIDTH - 1))
        start = draw(st.integers(1, total - 1))
        end = draw(st.integers(start + 1, total))
        window_end = draw(st.sampled_from((end, total)))
        phase = draw(st.sampled_from(tuple(Phase)))
        outside = total - (window_end - start)
        first = draw(st.integers(1, start)) if phase is Phase.PARTIAL else 0
        found.append(
            PlanItem(
                request_id=i,
                phase=phase,
                total_len=total,
                block_start=start,
                block_end=end,
                window_end=window_end,
                commit=1,
                masks_left=draw(st.integers(1, end - start)),
                kept_rows=outside if first else draw(st.integers(0, outside)),
                kv_start=100 * i,
                step_in_block=0,
                first_row=first,
            )
        )
    return sorted(found, key=lambda item: not item.phase.is_refresh)


def positions(item: PlanItem) -> range:
    if item.phase is Phase.REUSE:
        return range(item.block_start, item.window_end)
    return range(item.first_row, item.total_len)


def pool_rows(item: PlanItem) -> list[int]:
    """Behind the retained rows, which in a PARTIAL are all: those ahead of the window, then those behind it."""
    window = range(item.block_start, item.window_end)
    outside = [position for position in range(item.total_len) if position not in window]
    place = {position: rank for rank, position in enumerate([*outside[: item.kept_rows], *window])}
    return [item.kv_start + place[position] for position in positions(item)]


@given(items(), st.booleans())
def test_rows_are_those_of_the_tokens(found, shifts):
    slots = list(range(len(found)))[::-1]
    table = ItemTable.of(found, slots)
    packed = PackedRows.of(table, None, width=WIDTH, least=8)
    tokens = [(slot, position) for slot, item in zip(slots, found, strict=True) for position in positions(item)]
    assert packed.num_rows == len(tokens)
    assert packed.position[: len(tokens)].tolist() == [position for _, position in tokens]
    assert packed.flat[: len(tokens)].tolist() == [slot * WIDTH + position for slot, position in tokens]
    assert len(packed.position) == max(8, len(tokens))
    assert not packed.position[len(tokens) :].any()

    reuse = [item for item in found if not item.phase.is_refresh]
    assert packed.num_refresh_rows == sum(item.total_len for item in found if item.phase.is_refresh)
    assert packed.pool_row.tolist() == [row for item in reuse for row in pool_rows(item)]
    assert packed.key_len.tolist() == [item.key_tokens for item in reuse]

    row_of = {token: row for row, token in enumerate(tokens)}
    block = BlockRows.of(table, packed.base, width=WIDTH, shifts_logits=shifts)
    for i, (slot, item) in enumerate(zip(slots, found, strict=True)):
        first = positions(item)[0]
        for j in range(block.position.shape[1]):
            inside = j < item.block_len
            assert block.inside is None or block.inside[i, j] == inside
            assert inside or block.inside is not None
            position = item.block_start + j if inside else WIDTH - 1
            assert block.position[i, j] == position
            assert block.flat[i, j] == slot * WIDTH + position
            if inside:
                assert block.packed[i, j] == row_of[slot, max(first, position - shifts)]
