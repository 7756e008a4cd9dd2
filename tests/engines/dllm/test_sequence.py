"""Steps, quotas and phases of one request, in closed form.

Memory plans: exact numbers for the paper's two cards, and what must hold for any.

The row allocator against a set of rows.
"""

from dataclasses import replace
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, rule
from support.engine_runs import free_runs, rows_of
from support.refusals import refuses

from engines.dllm.config import (
    DecodeConfig,
    DelayedCache,
    EngineConfig,
    GenerationConfig,
    NoCache,
    Phase,
    RefreshRule,
    SparsityConfig,
)
from engines.dllm.memory import concurrency, divide_memory
from engines.dllm.plan import Request
from engines.dllm.scheduling import KvPool
from engines.dllm.sequence import Sequence, cache_rows, steps_per_block, timestep_quota
from engines.errors import UserError
from engines.models.shape import DREAM_7B, LLADA_8B
from repro.families.dllm.system import method


@st.composite
def generations(draw: st.DrawFn) -> GenerationConfig:
    gen, block = draw(st.integers(1, 80)), draw(st.integers(1, 40))
    num_blocks = -(-gen // block)
    return GenerationConfig(
        gen_length=gen, block_length=block, steps=draw(st.integers(num_blocks, 2 * gen + num_blocks))
    )


@st.composite
def even_generations(draw: st.DrawFn) -> tuple[GenerationConfig, int]:
    """With its steps per block."""
    num_blocks, block, per_block = draw(st.integers(1, 6)), draw(st.integers(1, 12)), draw(st.integers(1, 20))
    return GenerationConfig(gen_length=num_blocks * block, block_length=block, steps=num_blocks * per_block), per_block


def sequence_of(
    generation: GenerationConfig, rule: RefreshRule, *, prompt_len: int = 9, exact_steps: bool = False
) -> Sequence:
    request = Request(request_id=0, prompt_len=prompt_len, generation=generation)
    return Sequence(request, rule, EngineConfig(), exact_steps=exact_steps)


def walk(sequence: Sequence) -> list[tuple[int, Phase, int]]:
    """(block, phase, committed) of every step, each committing its quota."""
    steps = []
    while not sequence.is_finished:
        steps.append((sequence.block, sequence.phase, sequence.quota))
        sequence.advance(sequence.quota)
    return steps


@given(generations())
def test_steps_of_the_blocks(generation):
    shares = steps_per_block(generation)
    assert len(shares) == generation.num_blocks
    assert sum(shares) == generation.steps
    assert min(shares) >= 1
    for b, share in enumerate(shares):
        length = min(generation.block_length, generation.gen_length - b * generation.block_length)
        assert abs(share - Fraction(generation.steps * length, generation.gen_length)) < 1


@given(st.integers(1, 60), st.integers(1, 80))
def test_quotas_are_the_floor_and_the_remainder_first(masks, steps):
    generation = GenerationConfig(gen_length=masks, block_length=masks, steps=steps)
    expected = [masks // steps + (i < masks % steps) for i in range(steps)]
    assert [quota for _, _, quota in walk(sequence_of(generation, NoCache(), exact_steps=True))] == expected
    # A block that is complete ends at once; only steps that commit nothing are left out.
    assert [quota for _, _, quota in walk(sequence_of(generation, NoCache()))] == [quota for quota in expected if quota]


@given(generations(), st.booleans(), st.sampled_from((NoCache(), DelayedCache(delay=0), DelayedCache(delay=1))))
def test_everything_is_committed_once(generation, exact_steps, rule):
    sequence = sequence_of(generation, rule, exact_steps=exact_steps)
    steps = walk(sequence)
    assert sum(committed for _, _, committed in steps) == generation.gen_length
    assert [block for block, _, _ in steps] == sorted(block for block, _, _ in steps)
    for b in range(generation.num_blocks):
        length = min(generation.block_length, generation.gen_length - b * generation.block_length)
        assert sum(committed for block, _, committed in steps if block == b) == length
    assert len(steps) == generation.steps if exact_steps else len(steps) <= generation.steps
    if not exact_steps:
        assert all(committed > 0 for _, _, committed in steps)


@given(even_generations(), st.integers(0, 1))
def test_phases_of_a_block(even, delay):
    """``delay`` full steps, one that builds, the rest reuse: in every block anew. Without a cache every step is full."""
    generation, per_block = even
    cached = ([Phase.FULL] * delay + [Phase.BUILD] + [Phase.REUSE] * per_block)[:per_block]
    for refresh, expected in ((DelayedCache(delay=delay), cached), (NoCache(), [Phase.FULL] * per_block)):
        steps = walk(sequence_of(generation, refresh, exact_steps=True))
        assert [phase for _, phase, _ in steps] == expected * generation.num_blocks


@pytest.mark.parametrize("system", ["llada", "sparse-dllm", "fast-dllm", "dllm-cache"])
@given(generations())
def test_uneven_steps_are_refused_where_published_code_asserts(system, generation):
    length, block, steps = generation.gen_length, generation.block_length, generation.steps
    if length % block:
        with pytest.raises(
            UserError, match=rf"gen_length={length} is not a multiple of block_length={block}.*: change one"
        ):
            method(system).generation("llada", {}, generation)
    elif steps % generation.num_blocks:
        with pytest.raises(
            UserError, match=rf"steps={steps} is not a multiple of the {generation.num_blocks} blocks.*: change"
        ):
            method(system).generation("llada", {}, generation)
    else:
        method(system).generation("llada", {}, generation)
    method("dllm-serve").generation("llada", {}, generation)


@given(st.integers(1, 40), st.integers(1, 60))
def test_quotas_of_the_timestep_schedule(masks, steps):
    """Truncated shares of what is left, everything on the last step; a first step of one position where asked."""
    generation = GenerationConfig(gen_length=masks, block_length=masks, steps=steps)
    request = Request(request_id=0, prompt_len=3, generation=generation)
    for first_step in ("ranked", "first_position"):
        decode = DecodeConfig(quota="timestep", first_step=first_step)
        sequence = Sequence(request, NoCache(), EngineConfig(decode=decode))
        left, step = masks, 0
        while not sequence.is_finished:
            expected = 1 if step == 0 and first_step == "first_position" else timestep_quota(left, step, steps)
            assert sequence.quota == expected <= left
            sequence.advance(expected)
            left, step = left - expected, step + 1
        assert left == 0
        # The last scheduled step commits all; only one forced position may be in front of it.
        assert step <= max(steps, 2)


@given(generations(), st.integers(1, 50), st.floats(0.01, 1.0), st.sampled_from(("head", "dense")))
def test_rows_held_for_life(generation, prompt_len, ratio, selection):
    """The most that any block needs: max(1, floor(r (T - B))) retained rows and its own B."""
    sparsity = SparsityConfig(selection=selection, retention_ratio=ratio)
    request = Request(request_id=0, prompt_len=prompt_len, generation=generation)
    needed = []
    for b in range(generation.num_blocks):
        length = min(generation.block_length, generation.gen_length - b * generation.block_length)
        outside = request.total_len - length
        needed.append(length + (outside if selection == "dense" else max(1, int(outside * ratio))))
    assert rows_of(request, sparsity) == max(needed)


@pytest.mark.parametrize(
    ("kind", "name", "value", "says"),
    [
        (SparsityConfig, "min_kept", 2, r"must be in \[0, 1\]"),
        (DecodeConfig, "confidence", "best", "is unknown: use one of max_prob, margin, neg_entropy"),
        (DecodeConfig, "confidence_dtype", "int8", "is unknown: use one of native, float64"),
        (DecodeConfig, "quota", "odd", "is unknown: use one of even, timestep, origin"),
        (DecodeConfig, "first_step", "last", "is unknown: use one of ranked, first_and_ranked, first_position"),
    ],
)
def test_settings_that_no_command_takes_are_refused(kind, name, value, says):
    with pytest.raises(UserError, match=f"{name}={value!r} {says}"):
        kind(**{name: value})


GB = 10**9
CONFIG_4090 = EngineConfig(max_num_batched_tokens=4000, max_num_logits=2048)
PAPER_REQUEST = GenerationConfig(gen_length=256, block_length=32)


def test_decomposed_plan_of_24_gb_by_hand():
    plan = divide_memory(LLADA_8B, 24 * GB, CONFIG_4090, logit_rows="decomposed")
    assert plan.weights_bytes == 16_031_162_368
    assert plan.activation_bytes == 4000 * 112 * 1024
    assert plan.logits_bytes == 2 * 2048 * 126_464 * 2
    assert plan.guard_bytes == 1_200_000_000
    assert plan.kv_bytes == 5_274_092_544
    assert plan.kv_rows == 10_059
    fused = divide_memory(LLADA_8B, 24 * GB, CONFIG_4090, logit_rows="decomposed", logit_copies=1)
    assert plan.logits_bytes == 2 * fused.logits_bytes == 2 * (fused.kv_bytes - plan.kv_bytes)
    measured = divide_memory(LLADA_8B, 24 * GB, CONFIG_4090, logit_rows="decomposed", activations_measured_bytes=123)
    assert (measured.activation_bytes, sum_of_parts(measured)) == (123, 24 * GB)


def sum_of_parts(plan):
    return plan.weights_bytes + plan.activation_bytes + plan.logits_bytes + plan.guard_bytes + plan.kv_bytes


CONFIGS = st.builds(EngineConfig, max_num_batched_tokens=st.integers(1, 40_000), max_num_logits=st.integers(1, 40_000))


@given(CONFIGS, st.integers(1, 200 * GB), st.sampled_from([LLADA_8B, DREAM_7B]))
def test_parts_are_the_whole_and_decomposition_never_costs_memory(config, memory, shape):
    plans = {mode: divide_memory(shape, memory, config, logit_rows=mode) for mode in ("decomposed", "monolithic")}
    for plan in plans.values():
        assert sum_of_parts(plan) == memory
        assert plan.fits == (plan.kv_bytes >= 0)
        assert (
            0 <= plan.kv_bytes - plan.kv_rows * shape.kv_bytes_per_token < shape.kv_bytes_per_token or plan.kv_rows == 0
        )
    freed = plans["decomposed"].kv_bytes - plans["monolithic"].kv_bytes
    rows = max(0, config.max_num_batched_tokens - config.max_num_logits)
    assert freed == rows * shape.logits_bytes_per_row * 2


def test_total_length_includes_the_generation():
    with refuses("total_len=100"):
        cache_rows(100, PAPER_REQUEST, SparsityConfig())


def test_concurrency_is_capped_by_rows_and_by_slots():
    plan = divide_memory(LLADA_8B, 24 * GB, CONFIG_4090, logit_rows="decomposed")
    assert concurrency(plan, CONFIG_4090, 556, PAPER_REQUEST) == 10_059 // 294 == 34
    assert concurrency(plan, replace(CONFIG_4090, max_num_seqs=8), 556, PAPER_REQUEST) == 8


Run = tuple[int, int]


class PoolMachine(RuleBasedStateMachine):
    """``rows`` is the truth: every row that is handed out, by its holder."""

    held = Bundle("held")

    @initialize(num_rows=st.integers(0, 40))
    def make(self, num_rows: int) -> None:
        self.pool = KvPool(num_rows)
        self.owner: dict[int, Run] = {}

    def free_runs(self) -> list[Run]:
        runs, start = [], None
        for row in range(self.pool.num_rows + 1):
            is_free = row < self.pool.num_rows and row not in self.owner
            if is_free and start is None:
                start = row
            elif not is_free and start is not None:
                runs.append((start, row - start))
                start = None
        return runs

    @rule(target=held, rows=st.integers(0, 15))
    def allocate(self, rows: int):
        fitting = [start for start, length in self.free_runs() if length >= rows]
        start = self.pool.allocate(rows)
        if rows == 0:
            assert start == 0
            return multiple()
        assert start == (fitting[0] if fitting else None), "first fit: the lowest run that is long enough"
        if start is None:
            return multiple()
        taken = range(start, start + rows)
        assert not self.owner.keys() & set(taken), "rows were handed out twice"
        self.owner.update(dict.fromkeys(taken, (start, rows)))
        return (start, rows)

    @rule(run=consumes(held))
    def release(self, run: Run) -> None:
        self.pool.release(*run)
        for row in range(run[0], run[0] + run[1]):
            del self.owner[row]

    @rule(start=st.integers(0, 40), rows=st.integers(1, 15))
    def release_rows_that_are_free(self, start: int, rows: int) -> None:
        asked = set(range(start, start + rows))
        if asked <= self.owner.keys():
            return
        before = free_runs(self.pool), self.pool.used_rows
        with pytest.raises(AssertionError, match="not allocated"):
            self.pool.release(start, rows)
        assert (free_runs(self.pool), self.pool.used_rows) == before

    @rule()
    def release_nothing(self) -> None:
        self.pool.release(0, 0)

    @invariant()
    def every_row_is_held_or_free(self) -> None:
        assert self.pool.used_rows == len(self.owner)
        assert list(free_runs(self.pool)) == self.free_runs(), "free runs are maximal and in order"


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=60, stateful_step_count=40)
