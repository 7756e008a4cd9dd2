"""Steps, quotas and phases of one request, in closed form."""

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.engine_runs import rows_of

from engines.dllm.config import DecodeConfig, GenerationConfig, SparsityConfig
from engines.dllm.phase import DelayedCache, NoCache, Phase, RefreshRule
from engines.dllm.plan import Request
from engines.dllm.sequence import Sequence, steps_per_block, timestep_quota
from engines.errors import UserError
from repro.systems.dllm.system import method


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
    return Sequence(request, rule, SparsityConfig(), exact_steps=exact_steps)


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


@given(even_generations())
def test_even_steps_are_shared_evenly(even):
    generation, per_block = even
    method("llada").generation("llada", {}, generation)
    assert steps_per_block(generation) == (per_block,) * generation.num_blocks


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
    """``delay`` full steps, one that builds, the rest reuse: in every block anew."""
    generation, per_block = even
    steps = walk(sequence_of(generation, DelayedCache(delay=delay), exact_steps=True))
    expected = ([Phase.FULL] * delay + [Phase.BUILD] + [Phase.REUSE] * per_block)[:per_block]
    assert [phase for _, phase, _ in steps] == expected * generation.num_blocks
    assert sum(phase.is_refresh for _, phase, _ in steps) == generation.num_blocks * min(per_block, delay + 1)


@given(even_generations())
def test_without_a_cache_every_step_is_full(even):
    generation, per_block = even
    steps = walk(sequence_of(generation, NoCache(), exact_steps=True))
    assert [phase for _, phase, _ in steps] == [Phase.FULL] * (generation.num_blocks * per_block)


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


def test_query_tokens_and_positions_by_hand():
    """Prompt 5, 7 tokens in blocks of 4: positions 5-8 and 9-11."""
    sequence = sequence_of(GenerationConfig(gen_length=7, block_length=4, steps=7), DelayedCache(), prompt_len=5)
    seen = []
    while not sequence.is_finished:
        seen.append(
            (
                sequence.phase.value,
                sequence.block_start,
                sequence.block_end,
                sequence.query_tokens,
                sequence.masks_left,
                sequence.kept_rows,
            )
        )
        sequence.advance(sequence.quota)
    assert seen == [
        ("full", 5, 9, 12, 4, 4),
        ("build", 5, 9, 12, 3, 4),
        ("reuse", 5, 9, 4, 2, 4),
        ("reuse", 5, 9, 4, 1, 4),
        ("full", 9, 12, 12, 3, 4),
        ("build", 9, 12, 12, 2, 4),
        ("reuse", 9, 12, 3, 1, 4),
    ]


def test_a_suffix_window_by_hand():
    """Reuse computes the block and all behind it, over the rows in front of it."""
    generation = GenerationConfig(gen_length=7, block_length=4, steps=7)
    request = Request(request_id=0, prompt_len=5, generation=generation)
    rule, sparsity = DelayedCache(delay=0, window="suffix"), SparsityConfig(selection="dense")
    sequence = Sequence(request, rule, sparsity)
    seen = []
    while not sequence.is_finished:
        seen.append(
            (sequence.phase.value, sequence.block_end, sequence.window_end, sequence.query_tokens, sequence.kept_rows)
        )
        sequence.advance(sequence.quota)
    assert seen == [
        ("build", 9, 12, 12, 5),
        *[("reuse", 9, 12, 7, 5)] * 3,
        ("build", 12, 12, 12, 9),
        *[("reuse", 12, 12, 3, 9)] * 2,
    ]
    assert sequence.kv_rows == rows_of(request, sparsity, "suffix") == 12


@given(st.integers(1, 40), st.integers(1, 60))
def test_quotas_of_the_timestep_schedule(masks, steps):
    """Truncated shares of what is left, everything on the last step; a first step of one position where asked."""
    generation = GenerationConfig(gen_length=masks, block_length=masks, steps=steps)
    request = Request(request_id=0, prompt_len=3, generation=generation)
    for first_step in ("ranked", "first_position"):
        decode = DecodeConfig(quota="timestep", first_step=first_step)
        sequence = Sequence(request, NoCache(), SparsityConfig(), decode=decode, exact_steps=False)
        left, step = masks, 0
        while not sequence.is_finished:
            expected = 1 if step == 0 and first_step == "first_position" else timestep_quota(left, step, steps)
            assert sequence.quota == expected <= left
            sequence.advance(expected)
            left, step = left - expected, step + 1
        assert left == 0
        # The last scheduled step commits all; only one forced position may be in front of it.
        assert step <= max(steps, 2)


def test_with_a_threshold_the_quota_is_one_and_steps_do_not_matter():
    generation = GenerationConfig(gen_length=6, block_length=3, steps=2, threshold=0.9)
    sequence = sequence_of(generation, DelayedCache())
    assert [quota for _, _, quota in walk(sequence)] == [1] * 6
    sequence = sequence_of(generation, DelayedCache())
    sequence.advance(3)
    assert (sequence.block, sequence.step_in_block, sequence.phase) == (1, 0, Phase.FULL)


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
