"""Steps that leave settled rows out, and Refreshes that begin at the block before."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.engine_runs import OnDoubt, Recorder, roofline, rows_of, run_together
from support.graph_recorders import EagerRecorder
from support.reference_settling import generate
from support.refusals import refuses
from support.tiny_models import GQA, network, request_on

from engines.dllm.config import (
    DecodeConfig,
    DelayedCache,
    EngineConfig,
    GenerationConfig,
    Phase,
    RefreshRule,
    Settling,
    SparsityConfig,
    check_settling,
)
from engines.dllm.engine import Engine
from engines.dllm.executor.compose import packed_executor
from engines.dllm.executor.graphs import graph_key, reuse_keys
from engines.dllm.method import DLLM_SERVE
from engines.dllm.plan import PlanItem, Request
from engines.dllm.scheduling import KvPool, PhaseScheduler
from engines.dllm.sequence import Sequence as Live
from engines.dllm.simulated import RooflineExecutor
from engines.errors import UserError
from engines.models.loader import load_model
from repro.families.dllm.requests import encode_prompts
from repro.tasks.registry import load_task
from repro.tasks.task import TaskOptions

DENSE = SparsityConfig(selection="dense", refresh_delay=0)
ONCE = DelayedCache(delay=0)


def config_of(settling: Settling, num: int, **other: object) -> EngineConfig:
    return EngineConfig(
        **{"max_num_batched_tokens": 2000, "max_num_seqs": num, "sparsity": DENSE, "settling": settling, **other}
    )


def served(
    model,
    requests: Sequence[Request],
    config: EngineConfig,
    rule: RefreshRule = ONCE,
    recorder: EagerRecorder | None = None,
) -> tuple[list[tuple[int, ...]], list[list[PlanItem]]]:
    """Ids of every request, and the items of its steps."""
    rows = sum(rows_of(request, config.sparsity) for request in requests)
    executor = packed_executor(model, config, rows, recorder=recorder)
    if recorder is not None:
        executor.prepare(requests[0].generation.block_length)
    engine = Engine(PhaseScheduler(config, KvPool(rows), rule), noting := Recorder(executor))
    outputs = run_together(engine, [(0, request) for request in requests])
    items = [item for plan in noting.plans for item in plan.items]
    return (
        [outputs[request.request_id] for request in requests],
        [[item for item in items if item.request_id == request.request_id] for request in requests],
    )


# ---- which rows -----------------------------------------------------------------------------


def query_tokens(settling: Settling, *, prompt_len: int = 300, steps: int = 256, delay: int = 0) -> int:
    """In all steps of an answer of 256 tokens in blocks of 32."""
    generation = GenerationConfig(gen_length=256, block_length=32, steps=steps)
    request = Request(request_id=0, prompt_len=prompt_len, generation=generation)
    live = Live(request, DelayedCache(delay=delay), config_of(settling, 1))
    return sum(tokens for _, tokens in live.trajectory())


def test_rows_at_the_paper_s_lengths():
    """In closed form: eight Refreshes of 556 rows; what 31 Reuse steps a block compute; eight Refreshes that begin ever later."""
    refreshes, one_full = 8 * 556, 556 + sum(256 - 32 * before for before in range(7))
    whole, settled = 8 * 31 * 32, 8 * sum(range(2, 33))
    assert query_tokens(Settling(), delay=1) == 8 * (2 * 556 + 30 * 32) == 16576
    assert query_tokens(Settling()) == refreshes + whole == 12384
    assert query_tokens(Settling(settle_after=1)) == refreshes + settled == 8664
    assert query_tokens(Settling(settle_after=1, full_every=8)) == one_full + settled == 5892
    assert query_tokens(Settling(settle_after=1, full_every=8, renew_at=2)) == one_full + settled + 8 * 29
    # Commits of 11, 11 and 10: the second Reuse step leaves out the 11 of the Refresh.
    assert query_tokens(Settling(settle_after=1, full_every=8), steps=24) == one_full + 8 * (32 + 21)
    for every in (2, 3, 5):
        partial = sum(288 - 32 * block for block in range(8) if block % every)
        full = 556 * sum(block % every == 0 for block in range(8))
        assert query_tokens(Settling(full_every=every)) == full + partial + whole


@pytest.mark.parametrize(
    ("settling", "before"),
    [
        (Settling(), [0, 0, 0, 0, 0, 0, 0]),
        (Settling(settle_after=1), [0, 0, 1, 2, 3, 4, 5]),
        (Settling(settle_after=4), [0, 0, 0, 0, 0, 1, 2]),
        (Settling(settle_after=1, renew_at=3), [0, 0, 1, 2, 0, 4, 5]),
        (Settling(settle_after=2, renew_at=7), [0, 0, 0, 1, 2, 3, 4]),
    ],
)
def test_tokens_settle_so_many_steps_after_their_commit(settling, before):
    masks = (8, 6, 5, 4, 2, 1, 1)
    assert [settling.settled_before(masks[: step + 1]) for step in range(7)] == before


def test_a_partial_refresh_needs_the_cache_of_the_block_before():
    request = request_on(GQA, 0, 9, GenerationConfig(gen_length=12, block_length=4, steps=12))
    every = Settling(full_every=3)
    built = [phase for phase, _ in Live(request, ONCE, config_of(every, 1)).trajectory()]
    assert built == [Phase.BUILD, *[Phase.REUSE] * 3, *[Phase.PARTIAL, *[Phase.REUSE] * 3] * 2]
    late = [phase for phase, _ in Live(request, DelayedCache(delay=1), config_of(every, 1)).trajectory()]
    assert (
        late == [Phase.FULL, Phase.BUILD, Phase.REUSE, Phase.REUSE] * 3
    )  # a full forward begins each: nothing is left out
    never = [phase for phase, _ in Live(request, DelayedCache(delay=4), config_of(every, 1)).trajectory()]
    assert never == [Phase.FULL] * 12


# ---- the engine against dense tensors -------------------------------------------------------

CASES = {
    "whole": (Settling(), {}),
    "settled": (Settling(settle_after=1), {}),
    "settled later": (Settling(settle_after=3), {}),
    "partial": (Settling(full_every=100), {}),
    "both": (Settling(settle_after=1, full_every=2), {}),
    "renewed": (Settling(settle_after=1, renew_at=2), {}),
    "threshold": (Settling(settle_after=1, full_every=3, renew_at=4), {"threshold": 0.9}),
    "two a step": (Settling(settle_after=2), {"per_step": 2}),
}


@pytest.fixture(scope="module")
def tiny():
    return load_model("tiny")


@pytest.fixture(scope="module")
def prompts():
    task = load_task("mini-gsm", TaskOptions(num_problems=3, seed=3))
    return encode_prompts(task, "tiny", "llada")


@pytest.mark.parametrize(
    ("name", "blocks", "block_length"), [*((name, 3, 16) for name in CASES), ("both", 2, 32), ("renewed", 2, 32)]
)
def test_it_is_the_reference_token_by_token(tiny, prompts, name, blocks, block_length):
    settling, how = CASES[name]
    length = blocks * block_length
    generation = GenerationConfig(
        gen_length=length,
        block_length=block_length,
        steps=length // how.get("per_step", 1),
        threshold=how.get("threshold"),
    )
    requests = [
        Request(request_id=i, prompt_len=len(ids), prompt_ids=ids, generation=generation)
        for i, ids in enumerate(prompts)
    ]
    ids, items = served(tiny, requests, config_of(settling, 2))  # one of three waits
    for request, own, steps in zip(requests, ids, items, strict=True):
        due = generate(tiny, request.prompt_ids, gen_length=length, block_length=block_length, settling=settling, **how)
        assert own == due.ids
        assert sum(item.query_tokens for item in steps) == due.rows


@dataclass(frozen=True, kw_only=True)
class Again(DelayedCache):
    """Builds the cache anew in the middle of a block."""

    delay: int = 0

    def phase(self, step_in_block: int) -> Phase:
        return Phase.BUILD if step_in_block in (0, 5) else Phase.REUSE


@dataclass(frozen=True, kw_only=True)
class Between(DelayedCache):
    """Computes everything in the middle of a block, and caches nothing of it."""

    delay: int = 0

    def phase(self, step_in_block: int) -> Phase:
        return Phase.FULL if step_in_block in (2, 6) else super().phase(step_in_block)


@pytest.mark.parametrize(("rule", "builds", "fulls"), [(ONCE, (), ()), (Again(), (5,), ()), (Between(), (), (2, 6))])
@pytest.mark.parametrize("name", ["settled", "renewed", "settled later", "two a step", "threshold"])
def test_the_very_rows_are_computed_and_their_k_and_v_are_the_reference_s(tiny, prompts, name, rule, builds, fulls):
    settling, how = CASES[name]
    settling = replace(settling, full_every=1)
    generation = GenerationConfig(
        gen_length=32, block_length=16, steps=32 // how.get("per_step", 1), threshold=how.get("threshold")
    )
    for ids in prompts[:1]:
        request = Request(request_id=0, prompt_len=len(ids), prompt_ids=ids, generation=generation)
        config = config_of(settling, 1)
        executor = packed_executor(tiny, config, request.total_len)
        found: list[list[int]] = []
        of_device = executor.state.fresh_rows

        def noting(*args: object, **given: object):
            fresh = of_device(*args, **given)  # noqa: B023
            found.append(sorted(fresh.position.tolist()))  # noqa: B023
            return fresh

        executor.state.fresh_rows = noting
        engine = Engine(PhaseScheduler(config, KvPool(request.total_len), rule), executor)
        outputs = run_together(engine, [(0, request)])
        due = generate(tiny, ids, gen_length=32, block_length=16, settling=settling, builds=builds, fulls=fulls, **how)
        assert found == [positions for positions in due.computed if len(positions) < 16]
        assert outputs[0] == due.ids
        # Behind the last block there is nothing, so that its rows lie in order.
        torch.testing.assert_close(executor.pool.k, due.keys, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(executor.pool.v, due.values, rtol=1e-4, atol=1e-4)


def test_what_settles_no_sooner_than_its_block_ends_changes_nothing(tiny, prompts):
    generation = GenerationConfig(gen_length=24, block_length=8, steps=24)
    requests = [
        Request(request_id=i, prompt_len=len(ids), prompt_ids=ids, generation=generation)
        for i, ids in enumerate(prompts[:3])
    ]
    for delay, selection in ((0, "dense"), (1, "head")):
        sparsity = SparsityConfig(selection=selection, refresh_delay=delay)
        rule = DelayedCache(delay=delay)
        plain = served(tiny, requests, config_of(Settling(), 3, sparsity=sparsity), rule)
        assert served(tiny, requests, config_of(Settling(settle_after=8), 3, sparsity=sparsity), rule) == plain
        ids, _ = served(tiny, requests, config_of(Settling(settle_after=1, renew_at=8), 3, sparsity=sparsity), rule)
        assert len(ids) == 3


# ---- composition ----------------------------------------------------------------------------


@st.composite
def policies(draw: st.DrawFn) -> tuple[Settling, SparsityConfig, RefreshRule]:
    delay = draw(st.integers(0, 1))
    selection = draw(st.sampled_from(("dense", "head")))
    after = draw(st.one_of(st.none(), st.integers(1, 3)))
    settling = Settling(
        settle_after=after,
        full_every=draw(st.integers(1, 3)) if selection == "dense" else 1,
        renew_at=0 if after is None else draw(st.integers(0, 4)),
    )
    rule = draw(st.sampled_from((DelayedCache(delay=delay), OnDoubt(below=0.4))))
    return settling, SparsityConfig(selection=selection, refresh_delay=delay, retention_ratio=0.4), rule


@settings(max_examples=25)
@given(
    policies(),
    st.lists(st.tuples(st.integers(1, 30), st.integers(1, 20)), min_size=2, max_size=5),
    st.integers(1, 7),
    st.sampled_from(({}, {"threshold": 0.3}, {"factor": 1.5})),
    st.sampled_from(("auto", "sdpa")),
)
def test_a_request_computes_the_same_rows_alone_and_in_company(policy, sizes, block, how, backend):
    settling, sparsity, rule = policy
    requests = [
        request_on(GQA, i, prompt, GenerationConfig(gen_length=length, block_length=block, steps=length, **how))
        for i, (prompt, length) in enumerate(sizes)
    ]
    tells = DecodeConfig(tells_confidences=isinstance(rule, OnDoubt))
    config = config_of(
        settling, 4, sparsity=sparsity, decode=tells, attention_backend=backend, max_num_batched_tokens=90
    )
    ids, items = served(network(GQA), requests, config, rule)
    for request, own, steps in zip(requests, ids, items, strict=True):
        assert sum(step.masks_left for step in steps if step.step_in_block == 0) == request.generation.gen_length
        ((alone,), (alone_steps,)) = served(network(GQA), [request], config, rule)
        assert alone == own
        assert [step._replace(kv_start=0) for step in alone_steps] == [step._replace(kv_start=0) for step in steps]


def test_a_rule_that_refreshes_in_every_step_leaves_nothing_to_settle():
    requests = [request_on(GQA, i, 9 + i, GenerationConfig(gen_length=12, block_length=4, steps=12)) for i in range(3)]
    always, tells = OnDoubt(below=1.1), DecodeConfig(tells_confidences=True)
    plain, _ = served(network(GQA), requests, config_of(Settling(), 3, decode=tells), always)
    settled, _ = served(network(GQA), requests, config_of(Settling(settle_after=1), 3, decode=tells), always)
    assert settled == plain


@pytest.mark.parametrize("threshold", [None, 0.3])
def test_captured_graphs_compute_the_same_rows(threshold):
    generation = GenerationConfig(gen_length=16, block_length=8, steps=16, threshold=threshold)
    requests = [request_on(GQA, i, 9 + 4 * i, generation) for i in range(5)]
    config = config_of(Settling(settle_after=1, full_every=2, renew_at=2), 5, attention_backend="sdpa-padded")
    plain = served(network(GQA), requests, config)
    assert served(network(GQA), requests, config, recorder=EagerRecorder()) == plain


def test_graphs_are_captured_for_any_part_of_a_block():
    keys = set(reuse_keys(16, 32, settles=True))
    assert keys > set(reuse_keys(16, 32))
    for rows in range(1, 16 * 32 + 1):
        for sequences in range(1, min(rows, 16) + 1):
            if rows <= sequences * 32:
                assert graph_key(rows, sequences, 32, has_refresh=False) in keys


def test_a_stop_ends_a_request_at_the_same_place(tiny, prompts):
    generation = GenerationConfig(gen_length=64, block_length=16, steps=64)
    whole = [
        Request(request_id=i, prompt_len=len(ids), prompt_ids=ids, generation=generation)
        for i, ids in enumerate(prompts[:3])
    ]
    stopping = [replace(each, generation=replace(generation, stop_at_eos=True)) for each in whole]
    config = config_of(Settling(settle_after=1, full_every=2, renew_at=2), 3)
    ids, items = served(tiny, whole, config)
    stopped, fewer = served(tiny, stopping, config)
    for own, due, steps, all_steps in zip(stopped, ids, fewer, items, strict=True):
        assert len(steps) < len(all_steps)
        end = 16 * (1 + max(step.block_start for step in steps) // 16 - steps[0].block_start // 16)
        assert own[:end] == due[:end]


# ---- the cost -------------------------------------------------------------------------------


def test_work_of_what_is_left_out():
    request = request_on(GQA, 0, 20, GenerationConfig(gen_length=16, block_length=8, steps=16))
    config = config_of(Settling(settle_after=1, full_every=2), 1)
    noting = Recorder(executor := RooflineExecutor(roofline(), config))
    engine = Engine(PhaseScheduler(config, KvPool(40), ONCE), noting)
    engine.submit(request)
    engine.run()
    build, first, second, *_ = (executor.work(plan) for plan in noting.plans[:8])
    partial, after = (executor.work(plan) for plan in noting.plans[8:10])
    assert (build.query_rows, build.attention_pairs, build.kv_written_rows) == (36, 36 * 36, 36)
    assert (first.query_rows, first.attention_pairs, first.kv_written_rows) == (8, 8 * 36, 8)
    assert (second.query_rows, second.attention_pairs, second.kv_written_rows) == (7, 7 * 36, 7)
    assert (partial.query_rows, partial.attention_pairs, partial.kv_written_rows) == (16, 16 * 36, 16)
    assert (second.kv_read_rows, partial.kv_read_rows, after.query_rows) == (36, 36, 8)
    assert [build.logit_rows, first.logit_rows, second.logit_rows] == [8, 7, 6]


# ---- refusals -------------------------------------------------------------------------------


def test_what_the_cache_does_not_allow_is_refused():
    for settling, how, said in (
        (
            Settling(full_every=2),
            {"selection": "head"},
            "full_every=2 needs every row of the context, and selection='head'",
        ),
        (
            Settling(settle_after=1),
            {"window": "suffix"},
            "settle_after=1 needs Reuse steps that compute the block alone",
        ),
        (Settling(settle_after=1), {"caches": False}, "settle_after=1 has no effect without a cache"),
    ):
        with pytest.raises(UserError, match=said):
            check_settling(settling, **{"window": "block", "selection": "dense", "caches": True, **how})
    with refuses("renew_at=2"):
        Settling(renew_at=2)
    with refuses("tie_policy='parity'"):
        config_of(Settling(settle_after=1), 1, tie_policy="parity")
    with refuses("settle_after=1"):
        config_of(Settling(settle_after=1), 1, suppress_mask_token=False)


def test_a_preset_sets_knobs_that_may_be_given_beside_it():
    whole = DLLM_SERVE.sampler("llada", {"preset": "exact"})
    balanced = DLLM_SERVE.sampler("llada", {"preset": "balanced"})
    other = DLLM_SERVE.sampler("llada", {"preset": "balanced", "full_every": 2, "settle_after": 3})
    assert whole == DLLM_SERVE.sampler("llada", {"selection": "dense", "refresh_delay": 0})
    assert balanced.settling == Settling(settle_after=1, renew_at=2, full_every=4)
    assert other.settling == Settling(settle_after=3, renew_at=2, full_every=2)
    assert isinstance(
        DLLM_SERVE.sampler("llada", {"preset": "fast", "refresh_rule": "support.engine_runs:OnDoubt"}).rule, OnDoubt
    )
    asked = GenerationConfig(gen_length=8, block_length=4, steps=8)
    assert DLLM_SERVE.generation("llada", {"preset": "fast"}, asked).threshold == 0.9
    assert DLLM_SERVE.generation("llada", {"preset": "balanced"}, asked) == asked
    slower = replace(asked, threshold=0.99)
    assert DLLM_SERVE.generation("llada", {"preset": "fast"}, slower) == slower
    with refuses("preset='balanced'"):
        DLLM_SERVE.sampler("dream", {"preset": "balanced"})
