"""Published rules that compute fewer rows, and LocalLeap: token by token, row by row.

The cases beside this file are the engine's, of a state in which it gave all ids and rows that were recorded from the authors' code;
``REPRO_GOLDEN_DIR`` has a folder of those replayed too (``test_goldens``).
"""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from support.engine_runs import Recorder, run_together
from support.make_golden import GOLDEN
from support.refusals import refuses
from support.tables import data_beside

from baselines.dllm.d2cache import density
from engines.dllm.config import Cut, EngineConfig, GenerationConfig
from engines.dllm.denoise import choose
from engines.dllm.engine import Engine
from engines.dllm.executor.compose import packed_executor
from engines.dllm.plan import Request
from engines.dllm.scheduling import KvPool, LookaheadScheduler, PhaseScheduler
from engines.dllm.sequence import Sequence
from engines.errors import UserError
from engines.models.checkpoint import config_of
from engines.models.loader import load_model
from repro.checks.goldens import read_cases, replay
from repro.families.dllm.system import method

pytestmark = pytest.mark.usefixtures("models_loaded_once")
CASES = read_cases(Path(__file__).with_name("rows"))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_ids_and_rows(case):
    assert replay(case).difference is None


def test_a_case_is_held_to_its_rows():
    case = next(each for each in CASES if each.rows is not None)
    spoilt = replace(case, rows=(*case.rows[:3], case.rows[3] + 1, *case.rows[4:]))
    assert "forward 3 computes rows" in replay(spoilt).difference
    assert "commits tokens" in replay(replace(case, committed=(0,) * len(case.rows))).difference


def made(system: str, family: str, options: dict, generation: GenerationConfig):
    """The method's sampler, its generation, and the engine's config."""
    chosen = method(system)
    sampler = chosen.sampler(family, options)
    names = ("sparsity", "settling", "cut", "decode", "suppress_mask_token")
    config = EngineConfig(max_num_seqs=8, tie_policy="stable", **{name: getattr(sampler, name) for name in names})
    return sampler, chosen.generation(family, options, generation), config


ROWS, COMPANY, REFUSED = data_beside(__file__, "row_rules")


@pytest.mark.parametrize(("system", "family", "options", "rows"), ROWS, ids=lambda value: str(value)[:40])
def test_rows_of_a_request(system, family, options, rows):
    """For 615 + 256 tokens at one a step: as published, less what a window lacks at the answer's end."""
    options = dict(options)
    block = options.pop("block", 32)
    seeds = range(20 if "kept" in options else 1)
    tolerance = options.pop("kept", 0)
    total = 0
    for seed in seeds:
        generation = GenerationConfig(gen_length=256, block_length=block, steps=256, seed=seed)
        sampler, generation, config = made(system, family, options, generation)
        request = Request(request_id=0, prompt_len=615, generation=generation)
        live = Sequence(request, sampler.rule, config, exact_steps=sampler.exact_steps)
        while not live.is_finished:
            total += live.query_tokens
            live.advance(live.quota)
    assert abs(total / len(seeds) - rows) <= tolerance * rows


@pytest.mark.parametrize(("system", "checkpoint", "options"), COMPANY, ids=lambda value: str(value)[:60])
def test_the_same_alone_and_in_company(system, checkpoint, options):
    where = GOLDEN / "checkpoints" / checkpoint
    model, leap = load_model(where, dtype=torch.float32, device="cpu"), {k: v for k, v in options.items() if k in LEAP}
    shape = GenerationConfig(gen_length=24, block_length=8, steps=24, **leap)
    sampler, generation, config = made(system, config_of(where).family, options, shape)
    vocab = model.config.vocab_size - 4
    requests = [
        Request(
            request_id=i,
            prompt_len=n,
            prompt_ids=tuple((7 * j * j + 11 * i + 3) % vocab for j in range(n)),
            generation=replace(generation, seed=i),
        )
        for i, n in enumerate((9, 17, 5))
    ]

    def served(those):
        rows = sum(sampler.rows_of_request(each.total_len, generation) for each in those)
        scheduler = PhaseScheduler(config, KvPool(rows), sampler.rule, exact_steps=sampler.exact_steps)
        engine = Engine(scheduler, noting := Recorder(packed_executor(model, config, rows)))
        return run_together(engine, [(3 * i, each) for i, each in enumerate(those)]), noting.plans

    together, plans = served(requests)
    assert max(len(plan.items) for plan in plans) == 3
    for request in requests:
        alone, own = served([request])
        assert alone[request.request_id] == together[request.request_id]
        asked = [item.query_tokens for plan in plans for item in plan.items if item.request_id == request.request_id]
        assert asked == [item.query_tokens for plan in own for item in plan.items]
        assert model.config.mask_token_id not in together[request.request_id]


LEAP = ("anchor_threshold", "neighbor_threshold", "radius")


@pytest.mark.parametrize(("system", "family", "options", "words"), REFUSED, ids=lambda value: str(value)[:50])
def test_refusals(system, family, options, words):
    asked = {name: options[name] for name in ("threshold", "anchor_threshold", "tie_policy") if name in options}
    policy = asked.pop("tie_policy", None)
    own = {name: value for name, value in options.items() if name != "tie_policy"}

    def ask():
        sampler, generation, config = made(system, family, own, GenerationConfig(gen_length=64, steps=64, **asked))
        replace(config, tie_policy=policy or "stable")
        request = Request(request_id=0, prompt_len=8, generation=generation)
        Sequence(request, sampler.rule, config)

    assert refuses(ask) is not None
    with pytest.raises(UserError, match=words):
        ask()


# ---- the parts --------------------------------------------------------------------------------


def test_the_cut_keeps_what_it_says():
    generation = GenerationConfig(gen_length=96, block_length=16, steps=96, seed=5)
    ends = Cut(suffix="ends", suffix_window=8)
    assert ends.kept(generation, 1) == (*range(32, 40), 95)
    assert ends.kept(generation, 4) == (*range(80, 88), 95)
    assert ends.kept(generation, 5) == ()
    assert Cut(suffix="ends", suffix_window=16).kept(generation, 4) == tuple(range(80, 96))
    drawn = Cut(suffix="uniform", suffix_number=6, suffix_window=20)
    places = drawn.kept(generation, 0)
    assert len(places) == 6
    assert set(places) <= set(range(16, 36))
    assert places == drawn.kept(generation, 0) != drawn.kept(replace(generation, seed=6), 0)
    assert drawn.kept(generation, 5) == ()
    assert Cut(suffix="uniform", suffix_number=80, suffix_window=20).kept(generation, 0) == tuple(range(16, 96))
    near, far = np.zeros(2), 0
    for seed in range(2000):
        own = Cut(suffix="gaussian", suffix_window=40).kept(replace(generation, seed=seed), 0)
        near += [16 in own, 26 in own]
        far += any(place >= 56 for place in own)
    # 2 phi(0), and 2 phi(4 * 10 / 39).
    assert near / 2000 == pytest.approx([0.798, 0.4715], abs=0.035)
    assert far == 0


def test_density_counts_what_is_near():
    known = np.array([True, False, False, False, True, False])
    whole = [*[1.0] * 6, *known.astype(float), *[0.0] * 6]
    weights = {d: np.exp(-(d**2) / 8) for d in range(-18, 18)}
    expected = [sum(weights[6 + p - q] * whole[q] for q in range(18)) / sum(weights.values()) for p in range(6)]
    assert density(known, 2.0) == pytest.approx(expected)
    assert density(np.ones(6, dtype=bool), 2.0)[5] > density(known, 2.0)[5]


def test_local_leap_takes_one_round_around_anchors():
    confidence = torch.tensor([[0.95, 0.8, 0.7, 0.8, 0.92, 0.8, -torch.inf, 0.8]])

    def taken(k, anchor, neighbor, radius):
        levels = tuple(torch.tensor([float(level)]) for level in (anchor, neighbor, radius))
        return choose(confidence, k, torch.tensor([torch.inf]), None, levels)[0].nonzero().flatten().tolist()

    assert taken(1, 0.9, 0.75, 2) == [0, 1]  # 4 is as sure, and not among the k
    assert taken(2, 0.9, 0.75, 2) == [0, 1, 3, 4, 5]
    assert taken(2, 0.9, 0.75, 3) == [0, 1, 3, 4, 5, 7]
    assert taken(2, 0.99, 0.1, 8) == [0, 4]
    assert taken(2, 0.95, 0.8, 1) == [0, 1, 4]


def test_trimmed_is_balanced_over_a_cut_suffix():
    """Rows are those of balanced less the masks that are cut, and the kept ones are at their true positions."""
    shape = GenerationConfig(gen_length=96, block_length=16, steps=96, seed=3)
    sampler, generation, config = made("dllm-serve", "llada", {"preset": "trimmed", "suffix_window": 40}, shape)
    request = Request(request_id=0, prompt_len=30, generation=generation)
    trimmed, whole = (Sequence(request, sampler.rule, each) for each in (config, replace(config, cut=Cut())))
    seen = 0
    while not whole.is_finished:
        lost = whole.total_len - trimmed.length if trimmed.step_in_block == 0 else 0
        assert trimmed.query_tokens == whole.query_tokens - lost
        places = np.frombuffer(trimmed.suffix, dtype=np.int64) - 30
        assert tuple(places) == config.cut.kept(generation, trimmed.block)
        seen += lost
        for live in (trimmed, whole):
            live.advance(live.quota)
    assert trimmed.is_finished
    assert seen > 100
    scheduler = LookaheadScheduler(config, KvPool(1000), sampler.rule)
    scheduler.submit(request)
    plan = scheduler.schedule()
    assert plan.scheduled_tokens == plan.items[0].query_tokens < request.total_len
