"""Canvases are served as DiffusionGemma's own code answers, alone and in any company (T1 to T14 of what such a server has to have).

``canvases`` holds cases that transformers 5.24 recorded with their draws, and the model they were made with. REPRO_GEMMA_GOLDENS names a
folder with more of them.
"""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from support.block_runs import finished, is_whole, submitted

from engines.blockdiffusion import canvas_executor
from engines.blockdiffusion.canvas_executor import CanvasDraws, CanvasExecutor, within_window
from engines.blockdiffusion.engine import BlockEngine
from engines.blockdiffusion.executor import step_rows
from engines.blockdiffusion.rules import Blocks, EntropyBudget, LowConfidence
from engines.blockdiffusion.scheduler import BlockEngineConfig
from engines.blockdiffusion.sequence import BlockRequest, BlockSampling, CanvasSequence, SharedTables, Work
from engines.blockdiffusion.simulated import _window_work, step_bytes
from engines.dllm.executor.compose import peak_bytes
from engines.errors import UserError
from engines.models import gemma
from engines.models.block_config import SMALL_BLOCKS
from engines.models.loader import load_block
from engines.server.diffusion import BlockGeneration, ServedBlocks
from engines.server.protocol import Finished, Submission, Tokens
from repro.checks import canvases
from repro.checks.canvases import FOLDER_VARIABLE, canvas_cases, plain_answer, verify_canvases
from repro.families.block.settings import shape_of

FOLDER = Path(__file__).with_name("canvases")
CHECKPOINT = FOLDER / "dgemma_random"
L = 6


@pytest.fixture(scope="module")
def model():
    return load_block(str(CHECKPOINT))


@pytest.fixture
def recorded(monkeypatch, model):
    """Cases of the folder beside, unless another is named."""
    monkeypatch.setattr(canvases, "load_checkpoint", lambda *_: model)
    monkeypatch.setenv(FOLDER_VARIABLE, str(FOLDER))
    return canvas_cases()[1]


def differences(cases):
    return {result.case.id: result.difference for result in verify_canvases(cases) if not result.passed}


def test_t1_recorded_answers_are_reproduced(recorded):
    assert len(recorded) == 17
    assert differences(recorded) == {}


def _window_of_a_final_token(rows, block, window):
    return within_window(rows, block, window + 1)


def _not_renormalised(self, x):
    scores = self.proj(gemma.normalize(x, self._eps) * self.scale * self._factor)
    weights, chosen = torch.softmax(scores.float(), dim=-1).topk(self._chosen, dim=-1)
    return chosen, weights


def _inclusive(self, blocks, tokens, confidence):
    return DECIDE(self, blocks, tokens, confidence - 0.5)


def _is_committed(self, *, has_kv):
    FINISH(self, has_kv=has_kv)
    self.computed = len(self.final)


def _carried(self, likeliest, noise):
    repeats = SAW(self, likeliest, noise)
    self.likeliest = noise
    return repeats


DECIDE, FINISH, SAW = EntropyBudget.decide, CanvasSequence.finish_block, CanvasSequence.count_repeats
GUESSES = {
    "a window of W before a canvas": (canvas_executor, "within_window", _window_of_a_final_token),
    "no window for canvases": (canvas_executor, "within_window", lambda rows, block, window: rows),
    "1 + weight of norms": (
        gemma.GemmaNorm,
        "__call__",
        lambda self, x: F.rms_norm(x, self.shape, 1 + self.weight, self.eps),
    ),
    "SiLU": (gemma, "_gelu", F.silu),
    "experts' weights as they are": (gemma.GemmaRouter, "__call__", _not_renormalised),
    "K/V of a canvas kept as those of final tokens": (CanvasSequence, "finish_block", _is_committed),
    # T7
    "no self-conditioning": (gemma.GemmaModel, "soft_embeddings", lambda self, p: p.new_zeros(len(p), 32)),
    "a canvas' embeddings not normed": (
        gemma.SelfConditioning,
        "inputs",
        lambda self, e, s: e + self(self.pre_norm(s)),
    ),
    "temperature reaches its end": (
        EntropyBudget,
        "temperature",
        lambda self, step: (self.t_min or 0) + (self.t_max - (self.t_min or 0)) * (self.steps - step - 1) / self.steps,
    ),
    "entropies with an offset": (EntropyBudget, "decide", _inclusive),
    "the carried canvas is the answer": (CanvasSequence, "count_repeats", _carried),
}


@pytest.mark.parametrize("guess", GUESSES)
def test_wrong_guesses_are_noticed(guess, recorded, monkeypatch):
    owner, name, wrong = GUESSES[guess]
    monkeypatch.setattr(owner, name, wrong)
    cases = [case for case in recorded if case.id in ("random_P10", "random_bound_3.0", "random_temperature_0.9_1.5")]
    assert differences(cases), guess


def test_one_layer_scalar_for_both_is_noticed(recorded, monkeypatch, model):  # T6
    monkeypatch.setattr(model, "_of_final", tuple(model.blocks))
    assert differences(recorded[:2])


# ---- any company ---------------------------------------------------------------------------------------------------------


def asked(number, tokens, length=2 * L, **options):
    prompt = tuple(np.random.default_rng(number).integers(2, 100, size=tokens).tolist())
    given = {"rule": EntropyBudget(steps=4 + number % 3, entropy_bound=2.0), "sampling": BlockSampling(seed=number)}
    return BlockRequest(request_id=number, prompt_ids=prompt, gen_length=length, **{**given, **options})


def engine_of(model, *, rows=256, batching="mixed", **sizes):
    sizes = {"num_slots": 8, "max_len": 96, "num_tokens": 768, "block_size": 4, **sizes}
    return BlockEngine(
        CanvasExecutor(model, **sizes), BlockEngineConfig(max_num_batched_tokens=rows, batching=batching)
    )


REQUESTS = [
    asked(i, tokens, length) for i, (tokens, length) in enumerate([(1, 12), (9, 7), (10, 18), (23, 12), (4, 1)])
]


@pytest.fixture(scope="module")
def alone(model):
    return {each.request_id: engine_of(model).run([each])[each.request_id] for each in REQUESTS}


@pytest.mark.parametrize("batching", ["mixed", "first-done", "synchronous"])
@pytest.mark.parametrize("rows", [12, 256])
def test_t2_t3_t4_t12_company_chunks_and_commits_change_no_answer(rows, batching, model, alone):
    found = engine_of(model, rows=rows, batching=batching).run(REQUESTS)
    assert {number: each.ids for number, each in found.items()} == {number: each.ids for number, each in alone.items()}
    assert {len(each.ids) for each in found.values()} == {1, 7, 12, 18}
    committed = {number: each.committed for number, each in found.items()}
    assert committed == {0: 1, 1: 1, 2: 2, 3: 1, 4: 0}, "the last canvas never is"


def test_t2_t13_preempted_or_aborted_at_any_step_others_go_on(model, alone):
    for step in range(1, 9, 2):
        engine = submitted(engine_of(model, rows=40), REQUESTS, step)
        running = engine.scheduler.running
        engine.scheduler.preempt(running[0])
        if len(running) > 1:
            engine.abort(running[-1].request.request_id)
        finished(engine)
        assert all(each.ids == alone[number].ids for number, each in engine.answers.items())
        assert len(engine.answers) >= len(REQUESTS) - 1
        assert is_whole(engine)


@pytest.mark.parametrize("block", [1, 5, 8])
def test_t3_t4_t5_t14_canvases_of_any_length_are_those_of_a_plain_loop(model, block):
    """Prompts of a token, about the window of 9, of which some begin alike or as others go on; one is preempted, another aborted."""
    random = np.random.default_rng(block)
    rules = [EntropyBudget(steps=3, entropy_bound=2.0), EntropyBudget(steps=4, stability=0, confidence=3.0, t_min=None)]
    requests = [
        asked(i, tokens, int(random.integers(1, 3 * block + 1)), rule=rules[i % 2])
        for i, tokens in enumerate((1, 8, 9, 10, 30))
    ]
    requests.append(replace(requests[4], request_id=5, sampling=BlockSampling(seed=5)))
    requests.append(replace(requests[4], request_id=6, prompt_ids=requests[4].prompt_ids[4:]))
    engine = submitted(engine_of(model, rows=2 * block + 3, block=block, num_slots=3), requests, 3)
    engine.abort(2)
    engine.scheduler.preempt(engine.scheduler.running[0])
    finished(engine)
    assert is_whole(engine)
    expected = {
        each.request_id: tuple(plain_answer(model, each, block)[0]) for each in requests if each.request_id != 2
    }
    assert {number: answer.ids for number, answer in engine.answers.items()} == expected


def test_a_canvas_that_waits_for_others_is_computed_at_no_lower_temperature(model):
    """Which is nothing where ``t_min`` is."""
    rules = (EntropyBudget(steps=steps, t_min=0.0) for steps in (2, 4))
    requests = [asked(i, 5, L, rule=rule) for i, rule in enumerate(rules)]
    answers = engine_of(model, batching="synchronous").run(requests)
    assert all(answers[i].ids == tuple(plain_answer(model, each, L)[0]) for i, each in enumerate(requests))


def test_t12_draws_are_of_seed_canvas_and_step_and_place_alone():
    n, draws = 4096, CanvasDraws()
    key = np.stack((np.full(n, 3), np.full(n, 4), np.arange(n)))[:, None]
    drawn = [
        draw(*(key + np.array(other).reshape(3, 1, 1)), 8)[0]
        for draw in (draws.start, draws.noise)
        for other in ((0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, n))
    ]
    for i, each in enumerate(drawn):
        assert np.bincount(each, minlength=8) == pytest.approx([n / 8] * 8, rel=0.2)
        assert max((np.mean(each == other) for other in drawn[:i]), default=0) < 0.15
    logits = torch.tensor([0.1, 0.2, 0.7]).log().expand(n, 3)
    found = draws.tokens(logits.clone(), *torch.from_numpy(key[:, 0]))
    assert np.bincount(found) / n == pytest.approx([0.1, 0.2, 0.7], abs=0.03)


def test_t9_no_canvas_counts_forwards_of_another_or_before_it_was_preempted():
    sequence, same = CanvasSequence(asked(0, 3, 5 * L), 0, L, False), np.zeros(L, dtype=np.int64)
    for _ in range(2):
        assert [sequence.count_repeats(same, same) for _ in range(3)] == [0, 1, 2]
        sequence.finish_block(has_kv=False)
        assert [sequence.count_repeats(same, same) for _ in range(3)] == [0, 1, 2]
        sequence.evict()


def test_t3_t14_a_prefix_is_known_token_by_token_of_the_pool(model, alone):
    engine, again = engine_of(model), replace(REQUESTS[3], request_id=9)
    assert engine.run([REQUESTS[3]])[3].prefilled == 23
    hit = engine.run([again])[9]
    assert hit.ids == alone[3].ids
    assert hit.prefilled == 3, "20 tokens are whole blocks of 4 of the pool"


def test_t10_an_answer_ends_behind_its_first_stop_token(model, alone):
    ids = alone[2].ids
    for place in (0, 2, 5, 11):
        stops = frozenset({ids[place]})
        found = engine_of(model).run([replace(REQUESTS[2], stop_ids=stops)])[2]
        assert (found.ids, found.reason) == (ids[: ids.index(ids[place]) + 1], "stop")
    inside = replace(REQUESTS[2], stop_ids=frozenset({REQUESTS[2].prompt_ids[0]} - set(ids)))
    assert engine_of(model).run([inside])[2].ids == ids


def test_a_rule_of_blocks_is_refused(model):
    with pytest.raises(UserError, match="makes canvases"):
        engine_of(model).run([asked(0, 3, rule=LowConfidence())])


# ---- the rule ------------------------------------------------------------------------------------------------------------


def verdict(rule, entropies, *, repeats=0, step=0):
    none = np.zeros((1, len(entropies)), dtype=np.int64)
    blocks = Blocks(none, none == 0, none > 0, np.array([step]), np.array([repeats]))
    take, is_done = rule.decide(blocks, none, -np.array([entropies]))
    return take[0].tolist(), bool(is_done[0])


def test_t11_places_share_the_budget_that_those_before_them_leave():
    rule = EntropyBudget(entropy_bound=1.0)
    assert verdict(rule, [0.5, 3.0, 0.5, 0.1])[0] == [True, False, True, True]
    assert verdict(rule, [0.6, 3.0, 0.5, 0.0])[0] == [True, False, True, True]
    assert verdict(rule, [0.6, 3.0, 0.5, 0.6])[0].count(True) == 2
    assert verdict(rule, [0.5, 3.0, 0.5])[0] == [True, True, True], "those before it leave nothing, and no less"
    assert verdict(rule, [9.0, 3.0, 8.0, 7.0])[0] == [False, True, False, False]
    assert verdict(EntropyBudget(entropy_bound=99.0), [9.0, 3.0])[0] == [True, True]


@pytest.mark.parametrize("stability", [0, 1, 2, 4])
def test_t9_a_canvas_ends_stable_and_sure_or_with_its_steps(stability):
    rule = EntropyBudget(stability=stability, confidence=0.5, steps=9)
    ends = [verdict(rule, [0.2, 0.7], repeats=repeats)[1] for repeats in range(6)]
    assert ends == [repeats >= stability for repeats in range(6)]
    assert not verdict(rule, [0.4, 0.6], repeats=9)[1], "a mean at the bound is not below it"
    assert verdict(rule, [5.0, 5.0], step=8)[1]
    assert not verdict(rule, [5.0, 5.0], step=7)[1]
    assert not verdict(replace(rule, confidence=0.0), [0.0, 0.0], repeats=9)[1]


def test_t8_the_first_temperature_is_the_largest_and_the_smallest_is_not_reached():
    rule = EntropyBudget(steps=4, t_min=0.4, t_max=0.8)
    assert [rule.temperature(step) for step in range(4)] == pytest.approx([0.8, 0.7, 0.6, 0.5])
    assert EntropyBudget(t_min=None).temperature(7) == 1
    assert EntropyBudget(steps=1).temperature(0) == 0.8
    with pytest.raises(UserError, match=r"t_min=0\.8"):
        EntropyBudget(t_min=0.8)


# ---- what is charged -----------------------------------------------------------------------------------------------------


def test_t5_layers_with_a_window_see_what_a_simulated_step_charges():
    tables = SharedTables(num_slots=4, num_blocks=99, block_size=4, max_len=96, diffusion_block=1)
    works = []
    for start, tokens, rows in ((0, 13, (0, L)), (20, 6, (0, L)), (31, 0, (0, L)), (3, 11, None)):
        works.append(Work(len(works), tables.open(), start, tokens, rows, False))
        tables.grow(np.array([works[-1].slot]), np.array([start + tokens + L]))
    for window in (1, 5, 9, 64):
        rows = step_rows(works, tables, L, least=0, grain=1)
        near = within_window(rows, L, window)
        charged = [_window_work(work, L, window) for work in works]
        assert (near.q_len * near.k_len).sum() == sum(pairs for pairs, _ in charged)
        assert len(near.keys) == sum(keys for _, keys in charged)
        ends = near.k_start + near.k_len
        assert (near.keys[ends - 1] == rows.keys[rows.k_start + rows.k_len - 1]).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("count", "most", "wide"), [(4, 128, 64), (16, 128, 64), (16, 1024, 64), (16, 128, 176)])
def test_a_step_of_canvases_takes_the_memory_that_is_charged(count, most, wide, dtype):
    """All of it. Few logits at a time leave the layers the most, many the head; what is kept of a canvas are its places' embeddings."""
    config = SMALL_BLOCKS["tiny-diffusiongemma"]
    config = replace(config, mlp_hidden_size=wide, experts=replace(config.mixture, shared_hidden=wide))
    small = load_block(config, weights="random", dtype=dtype)
    sizes = {"num_slots": count, "max_len": 64, "num_tokens": 64 * count, "block_size": 16, "max_num_logits": most}
    engine = BlockEngine(CanvasExecutor(small, **sizes), BlockEngineConfig(max_num_batched_tokens=64 * count))
    submitted(
        engine, [BlockRequest(request_id=i, prompt_ids=(1,), gen_length=32, rule=EntropyBudget()) for i in range(count)]
    )
    shape, rows = shape_of(config, "tiny-diffusiongemma", dtype.itemsize), 32 * count
    charged = [step_bytes(shape, all_rows, rows // -(-rows // most)) for all_rows in (rows + count, rows)]
    assert [peak_bytes(engine.step, small.device) for _ in charged] == pytest.approx(charged, rel=0.1)
    assert engine.executor._soft.nbytes == rows * config.d_model * dtype.itemsize


def test_a_server_tells_a_canvas_at_a_time(model, alone):
    served = ServedBlocks(engine_of(model))
    for each in (REQUESTS[2], REQUESTS[4]):
        options = BlockGeneration(
            gen_length=each.gen_length, rule=each.rule, sampling=each.sampling, stop_ids=frozenset()
        )
        served.submit(Submission(each.request_id, each.prompt_ids, options, True))
    told = []
    while served.has_work:
        told += [event for event in served.step() if isinstance(event, Tokens | Finished)]
    of_third = [event.token_ids for event in told if event.request_id == 2]
    assert [len(ids) for ids in of_third] == [L, L, L]
    assert sum(of_third, ()) == alone[2].ids
    assert [event.token_ids for event in told if event.request_id == 4] == [alone[4].ids]
