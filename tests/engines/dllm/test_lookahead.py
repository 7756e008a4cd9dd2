"""Look-ahead admission: who enters is never held, and enters at the first step that allows it.

One set a layer by attention probabilities, and a layer that keeps every row.
"""

from dataclasses import dataclass, replace
from functools import cached_property

import pytest
import torch
from hypothesis import assume, event, given, settings
from hypothesis import strategies as st
from support.cells import a_cell
from support.dllm_cache_cases import dims_of, weights_of
from support.engine_runs import Ids, engine_for, rows_of, run_together
from support.reference_samplers import dllm_serve
from support.refusals import refuses
from support.schedules import Arrivals, Step, Stops, drive, in_order
from support.step_cases import Resident
from support.tiny_models import GQA, MHA, network, request_on

from engines.dllm.config import DecodeConfig, DelayedCache, EngineConfig, GenerationConfig, Phase, SparsityConfig
from engines.dllm.engine import Engine
from engines.dllm.executor.compose import packed_executor
from engines.dllm.plan import Request, StepPlan
from engines.dllm.scheduling import SCHEDULERS, KvPool, LookaheadScheduler, PhaseScheduler, Scheduler
from engines.dllm.sequence import Sequence as Machine
from engines.dllm.simulated import step_work
from engines.errors import UserError
from engines.kernels.scores import QUERY_ROWS, ContextRows, attention_importance
from repro.runs.experiment import prepare

MAX_TOTAL = 60


@dataclass(frozen=True, kw_only=True)
class Case:
    config: EngineConfig
    kv_rows: int
    arrivals: Arrivals
    stops: Stops
    exact_steps: bool

    def scheduler(self, kind: type[Scheduler] = LookaheadScheduler, kv_rows: int | None = None) -> Scheduler:
        rule = DelayedCache(delay=self.config.sparsity.refresh_delay)
        pool = KvPool(self.kv_rows if kv_rows is None else kv_rows)
        return kind(self.config, pool, rule, exact_steps=self.exact_steps)

    @cached_property
    def steps(self) -> list[Step]:
        return drive(self.scheduler(), self.arrivals, stops=self.stops)

    def alone(self, request: Request, stops: Stops) -> list[int]:
        """Query tokens of every step the request takes with the paper's scheduler to itself."""
        steps = drive(self.scheduler(PhaseScheduler, 10**6), [(0, request)], stops=stops)
        return [step.plan.scheduled_tokens for step in steps]

    @cached_property
    def admitted_at(self) -> dict[int, int]:
        return {request.request_id: step.index for step in self.steps for request in step.plan.admitted}


@st.composite
def generations(draw: st.DrawFn) -> GenerationConfig:
    gen, block = draw(st.integers(1, 24)), draw(st.integers(1, 10))
    steps = draw(st.integers(-(-gen // block), gen + 4)) if gen + 4 >= -(-gen // block) else gen
    return GenerationConfig(gen_length=gen, block_length=block, steps=steps, stop_at_eos=draw(st.booleans()))


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Small budgets, so that Refreshes meet; in half of them rows and slots are plenty and only the budget counts."""
    sparsity = SparsityConfig(
        selection=draw(st.sampled_from(("head", "dense"))),
        retention_ratio=draw(st.sampled_from((0.1, 0.5, 1.0))),
        refresh_delay=draw(st.sampled_from((0, 1))),
    )
    is_plenty = draw(st.booleans())
    shared = draw(generations()) if draw(st.booleans()) else None
    arrivals, stops = [], {}
    for i in range(draw(st.integers(1, 9))):
        generation = shared or draw(generations())
        prompt_len = draw(st.integers(1, MAX_TOTAL - generation.gen_length))
        arrivals.append((draw(st.integers(0, 25)), Request(request_id=i, prompt_len=prompt_len, generation=generation)))
        if generation.stop_at_eos and draw(st.booleans()):
            stops[i] = draw(st.integers(0, generation.num_blocks - 1))
    longest = max(request.total_len for _, request in arrivals)
    largest = max(rows_of(request, sparsity) for _, request in arrivals)
    config = EngineConfig(
        max_num_batched_tokens=longest + draw(st.integers(0, 2 * MAX_TOTAL)),
        max_num_seqs=9 if is_plenty else draw(st.integers(1, 9)),
        max_model_len=MAX_TOTAL,
        scheduler="lookahead",
        sparsity=sparsity,
        decode=DecodeConfig(quota=draw(st.sampled_from(("even", "even", "timestep")))),
    )
    return Case(
        config=config,
        kv_rows=largest + (9 * MAX_TOTAL if is_plenty else draw(st.integers(0, 4 * MAX_TOTAL))),
        arrivals=arrivals,
        stops=stops,
        exact_steps=draw(st.booleans()),
    )


# ---- what is promised ---------------------------------------------------------------------------


def earliest(case: Case) -> dict[int, int]:
    """Brute force: for each request in turn, the first step from which all it may run fits with all that may run."""
    cap, pool = case.config.max_num_batched_tokens, KvPool(case.kv_rows)
    may_run = {request.request_id: case.alone(request, {}) for _, request in case.arrivals}
    will_run = {request.request_id: len(case.alone(request, case.stops)) for _, request in case.arrivals}
    waiting, running, found, step = in_order(case.arrivals), dict[int, tuple[int, int, int]](), dict[int, int](), 0
    while waiting:
        for request_id, (since, start, rows) in list(running.items()):
            if step == since + will_run[request_id]:
                pool.release(start, rows)
                del running[request_id]
        while waiting and waiting[0][0] <= step and len(running) < case.config.max_num_seqs:
            request = waiting[0][1]
            own = may_run[request.request_id]
            fits = all(
                own[ahead]
                + sum(sum(may_run[other][step - since + ahead :][:1]) for other, (since, _, _) in running.items())
                <= cap
                for ahead in range(len(own))
            )
            rows = rows_of(request, case.config.sparsity)
            if not fits or (start := pool.allocate(rows)) is None:
                break
            running[request.request_id] = step, start, rows
            found[request.request_id] = step
            waiting.pop(0)
        step += 1
    return found


@settings(max_examples=80)
@given(cases())
def test_what_is_promised(case):
    """The budget holds, and the committed demand is what runs: nobody who was admitted is ever held, and service takes exactly
    as many steps as the request has. The head of the queue enters at the first step that allows it."""
    for step in case.steps:
        assert step.plan.scheduled_tokens == sum(item.query_tokens for item in step.plan.items)
        assert step.plan.scheduled_tokens <= case.config.max_num_batched_tokens
        assert len(step.charges) <= case.config.max_num_seqs
        assert {item.request_id for item in step.plan.items} == step.charges.keys()
    admitted = [request for step in case.steps for request in step.plan.admitted]
    assert admitted == [request for _, request in in_order(case.arrivals)]
    finished_at = {request_id: step.index for step in case.steps for request_id in step.finished}
    assert finished_at.keys() == case.admitted_at.keys()
    for _, request in case.arrivals:
        service = finished_at[request.request_id] - case.admitted_at[request.request_id] + 1
        assert service == len(case.alone(request, case.stops))
    assert case.admitted_at == earliest(case)


# ---- against the greedy scheduler ---------------------------------------------------------------


def with_prompt(request: Request, *, stop_at_eos: bool) -> Request:
    length, generation = min(request.prompt_len, 20), request.generation
    return request_on(
        GQA,
        request.request_id,
        length,
        GenerationConfig(
            gen_length=generation.gen_length,
            block_length=generation.block_length,
            steps=generation.steps,
            temperature=0.5,
            stop_at_eos=stop_at_eos and generation.stop_at_eos,
            seed=request.request_id,
        ),
    )


@settings(max_examples=9)
@given(cases(), st.booleans())
def test_tokens_are_those_of_the_greedy_scheduler(case, may_stop):
    """Also where requests stop early, at any of a third of the vocabulary."""
    arrivals = [(step, with_prompt(request, stop_at_eos=may_stop)) for step, request in case.arrivals]
    stop_ids = frozenset(range(0, GQA.vocab, 3)) - {GQA.mask_id}

    def outputs(kind: type[Scheduler]) -> dict[int, Ids]:
        executor = packed_executor(network(GQA), case.config, case.kv_rows, stop_ids=stop_ids)
        return run_together(Engine(case.scheduler(kind), executor), arrivals)

    ahead = outputs(LookaheadScheduler)
    assert ahead == outputs(PhaseScheduler)


# ---- trajectories -------------------------------------------------------------------------------


def machine(generation: GenerationConfig, delay: int, prompt_len: int) -> Machine:
    request = Request(request_id=0, prompt_len=prompt_len, generation=generation)
    return Machine(request, DelayedCache(delay=delay), EngineConfig(sparsity=SparsityConfig(refresh_delay=delay)))


@given(st.integers(1, 8), st.integers(1, 40), st.integers(1, 44), st.sampled_from((0, 1)))
def test_one_period_bounds_all_that_follows(block, gen, steps, delay):
    """The module's claim: no step costs more than the one a period before, however ragged the last block."""
    assume(steps >= -(-gen // block))
    sequence = machine(GenerationConfig(gen_length=gen, block_length=block, steps=steps), delay, prompt_len=3)
    taken = [0] * (-(-gen // block))
    ahead, tokens = machine(sequence.request.generation, delay, prompt_len=3), [t for _, t in sequence.trajectory()]
    while not ahead.is_finished:
        taken[ahead.block] += 1
        ahead.advance(ahead.quota)
    assume(len(taken) > 1 and len(set(taken[:-1])) == 1)
    event("ragged" if gen % block else "even")
    period = taken[0]
    assert all(later <= now for now, later in zip(tokens, tokens[period:], strict=False))


# ---- refusals -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("generation", "decode", "says"),
    [
        ({"threshold": 0.9}, {}, r"^threshold=0\.9 leaves open .*scheduler='lookahead' .*: use scheduler='phase'$"),
        ({"factor": 1.0}, {}, r"^factor=1\.0 leaves open"),
        ({}, {"quota": "origin"}, r"^quota='origin' leaves open"),
    ],
)
def test_open_ended_decoding_is_refused(generation, decode, says):
    config = EngineConfig(scheduler="lookahead", decode=DecodeConfig(**decode))
    scheduler = SCHEDULERS["lookahead"](config, KvPool(1000), DelayedCache())
    request = Request(request_id=0, prompt_len=3, generation=GenerationConfig(**generation))
    with pytest.raises(UserError, match=says):
        scheduler.submit(request)
    assert not scheduler.has_work


def test_it_is_refused_before_a_model_is_loaded():
    cell = a_cell(scheduler="lookahead", threshold=0.9, num_prompts=2)
    with refuses("scheduler='lookahead'"):
        prepare(cell)


WHOLE = SparsityConfig(selection="attended", retention_ratio=0.3, whole_layer=1)


@settings(max_examples=25)
@given(
    st.sampled_from((MHA, GQA)),
    st.sampled_from(("attended", "head", "uniform")),
    st.sampled_from((None, 0, 1)),
    st.sampled_from((0, 1)),
    st.sampled_from((1, 3)),
    st.integers(1, 25),
    st.integers(0, 99),
)
def test_the_engine_gives_the_ids_of_the_plain_sampler(model, selection, whole_layer, delay, pool, prompt_len, seed):
    lengths = {"gen_length": 14, "block_length": 7, "steps": 14}
    request = request_on(model, 0, prompt_len, GenerationConfig(**lengths), seed=seed)
    sparsity = SparsityConfig(
        selection=selection, retention_ratio=0.3, pool_kernel=pool, refresh_delay=delay, whole_layer=whole_layer
    )
    sampled = dllm_serve(
        weights_of(model),
        dims_of(model),
        request.prompt_ids,
        **lengths,
        selection=selection,
        whole_layer=whole_layer,
        keep_ratio=0.3,
        kernel_size=pool,
        delay_step=delay,
    )
    found = sampled.margins
    if min(found.confidence, found.token) < 1e-5 or found.selection < 1e-6:
        return  # sums in another order may decide otherwise
    config = EngineConfig(max_num_seqs=1, max_model_len=64, sparsity=sparsity)
    engine = engine_for(model, config, rows_of(request, sparsity))
    assert run_together(engine, [(0, request)])[0] == sampled.token_ids


@pytest.mark.parametrize("block", [1, QUERY_ROWS, 2 * QUERY_ROWS + 3])
def test_a_score_is_the_largest_share_any_head_and_row_gives(block):
    random = torch.Generator().manual_seed(block)
    contexts, start = (20, 7), block + 20
    q = torch.randn(start + block + 7, 6, 8, generator=random)
    k = torch.randn(start + block + 7, 2, 8, generator=random)
    runs = [(0, block, contexts[0]), (start, block, contexts[1])]  # a block, then its context behind it
    rows = ContextRows(
        block_rows=torch.stack([first + torch.arange(block) for first, *_ in runs]),
        block_valid=None,
        context_rows=torch.tensor(
            [[first + block + min(j, length - 1) for j in range(max(contexts))] for first, _, length in runs]
        ),
        context_valid=torch.tensor([[j < length for j in range(max(contexts))] for *_, length in runs]),
    )
    found = attention_importance(q, k, rows, [block, block], contexts, kernel=1)
    for i, (first, _, length) in enumerate(runs):
        wanted = torch.zeros(length)
        for head in range(6):
            for row in range(first, first + block):
                logits = k[first : first + block + length, head // 3] @ q[row, head] / 8**0.5
                wanted = torch.maximum(wanted, logits.softmax(0)[block:])
        torch.testing.assert_close(found[i, 0, :length], wanted)
        assert (found[i, 0, length:] == -torch.inf).all()


def test_rows_and_reads_with_a_whole_layer():
    """Room for every row, and keys of the mean layer: (100 + 31 * 30) / 32 = 32.2 of 100 rows outside the block."""
    assert (WHOLE.kept_rows(100), WHOLE.selected_rows(100), WHOLE.mean_rows(100, 32)) == (100, 30, 33)
    assert WHOLE.mean_rows(100, 1) == 100
    none = replace(WHOLE, whole_layer=None)
    assert none.kept_rows(100) == none.selected_rows(100) == none.mean_rows(100, 32) == 30
    config = EngineConfig(sparsity=WHOLE)
    reuse, build = (
        step_work(StepPlan((Resident(prompt_len=96, kept_rows=100, phase=phase).item(0, 0),), (), 0), config, 32)
        for phase in (Phase.REUSE, Phase.BUILD)
    )
    assert (reuse.query_rows, reuse.attention_pairs, reuse.kv_read_rows, reuse.kv_written_rows) == (4, 4 * 37, 37, 4)
    assert (build.query_rows, build.attention_pairs, build.kv_written_rows) == (104, 104 * 104, 33)


def test_what_has_no_such_layer_is_refused():
    said = "whole_layer=2 is none of the model's layers: give one from 0 to 1"
    config = EngineConfig(sparsity=replace(WHOLE, whole_layer=2))
    with pytest.raises(UserError, match=said):
        packed_executor(network(GQA), config, 50)
