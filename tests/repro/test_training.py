import dataclasses
import json
import re

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.reference_samplers import Dims, llada
from support.refusals import refuses

from engines.errors import UserError
from engines.models.block_config import read_block_config
from engines.models.checkpoint import EMBEDDED, TINY_DIR
from engines.models.tokenizer import NO_ID, TextTokenizer, load_tokenizer
from repro.checks.blocks import masked_logits
from repro.checks.canvases import plain_hidden
from repro.tasks import mini_code, mini_gsm
from repro.tasks.mini import GENERATORS
from repro.tasks.problem import grade
from repro.training import loop
from repro.training import objective as training_canvas
from repro.training.config import CURRICULA, Stage, TrainConfig
from repro.training.objective import (
    TOKENIZER_FILES,
    canvas_batch,
    canvas_loss,
    double_batch,
    encode_problems,
    make_batch,
    mask_batch,
    masked_loss,
)

SMALL = TrainConfig(
    steps=24,
    d_model=32,
    n_layers=2,
    n_heads=4,
    mlp_hidden_size=64,
    tokens_per_batch=768,
    tokenizer_problems=200,
    gen_length=32,
    warmup_steps=4,
    log_every=4,
    bfloat16=False,
    curriculum=(Stage(until=1.0, num_facts=(1, 3), num_distractors=0, num_used=(1, 2), num_operations=(1, 2)),),
)


@pytest.fixture(scope="module")
def tokenizer() -> TextTokenizer:
    return load_tokenizer(TINY_DIR)


# --- tokenizer


@given(text=st.text(max_size=80))
@settings(max_examples=60, deadline=None)
def test_any_text_survives_the_tokenizer(tokenizer, text):
    for special in ("<|mdm_mask|>", "<|endoftext|>", "<|startoftext|>"):
        text = text.replace(special, "")
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_task_words_are_single_tokens(tokenizer):
    for word in (*mini_gsm.NAMES, *mini_gsm.ITEMS, *mini_code.WORDS, *mini_code.OPERATORS):
        assert len(tokenizer.encode(f" {word}")) == 1
    for number in range(1, 16):  # the largest sums are too rare to be learnt as one token
        assert len(tokenizer.encode(f" {number}")) == 1


def test_special_tokens_may_be_absent_where_they_are_not_required_and_are_never_others(tmp_path):
    (tmp_path / "tokenizer.json").write_bytes((TINY_DIR / "tokenizer.json").read_bytes())
    config = tmp_path / "tokenizer_config.json"
    config.write_text(json.dumps({"mask_token": "<nope>", "eos_token": "<|endoftext|>"}))
    with refuses("mask_token='<nope>'"):
        load_tokenizer(tmp_path, required=())
    config.write_text(json.dumps({"eos_token": "<|endoftext|>"}))
    tokenizer = load_tokenizer(tmp_path, required=("eos_token",))
    assert tokenizer.mask_token_id == NO_ID
    ids = tokenizer.encode(" Mia has 4.")
    assert tokenizer.decode([*ids, tokenizer.eos_token_id, *ids]) == " Mia has 4."
    config.write_text("{}")
    assert load_tokenizer(tmp_path, required=()).eos_token_id == NO_ID


# --- batches and objective


def test_batch_holds_prompt_answer_and_fill(tokenizer):
    problems = mini_gsm.generate(5, 4) + mini_code.generate(5, 4)
    batch = encode_problems(problems, tokenizer, 64)
    for problem, row, prompt_length, length in zip(
        problems, batch.ids, batch.prompt_lengths, batch.lengths, strict=True
    ):
        assert tokenizer.decode(row[:prompt_length].tolist()) == problem.prompt
        assert tokenizer.decode(row[prompt_length:].tolist()) == problem.answer
        assert length == prompt_length + 64


@pytest.mark.parametrize("shares", [(1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (0.0, 0.0, 1.0)])
def test_only_masked_answer_positions_are_scored(tokenizer, shares):
    config = dataclasses.replace(TrainConfig(), pattern_shares=shares)
    for step in (0, 2000, 7000):
        batch = make_batch(config, tokenizer, step)
        masked = mask_batch(config, batch, tokenizer.mask_token_id, step)
        is_mask = masked.inputs == tokenizer.mask_token_id
        columns = np.arange(batch.ids.shape[1])
        in_answer = (columns >= batch.prompt_lengths[:, None]) & (columns < batch.lengths[:, None])
        assert not (is_mask & ~in_answer).any()
        assert (masked.inputs == batch.ids)[~is_mask].all()
        scored = masked.rows[masked.weights > 0]
        assert is_mask.reshape(-1)[scored].all()
        assert (masked.targets == batch.ids.reshape(-1)[masked.rows]).all()
        weights = masked.weights.reshape(len(batch.ids), config.gen_length)
        assert (weights.max(axis=1) > 0).all()
        if shares[0] == 0:  # a block: nothing masked before the scored part, everything masked behind it
            for row in range(len(batch.ids)):
                answer = is_mask[row, batch.prompt_lengths[row] : batch.lengths[row]]
                block = np.flatnonzero(weights[row])
                first = block[0] // 16 * 16
                assert block[-1] < first + 32
                assert not answer[: block[0]].any()
                assert answer[first + 32 :].all()


def test_loss_is_a_weighted_mean():
    logits = torch.tensor([[0.0, 0.0], [np.log(3.0), 0.0], [5.0, 5.0]])
    weights = torch.tensor([1.0, 0.5, 0.0])
    expected = (np.log(2.0) + 0.5 * np.log(4.0 / 3.0)) / 1.5
    assert masked_loss(logits, torch.tensor([0, 0, 1]), weights).item() == pytest.approx(expected, rel=1e-6)


def test_attention_ignores_padding():
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2 * 16, 2, 4, generator=generator) for _ in range(3))
    attend = loop.batched_attention(torch.tensor([16, 11]), 16)
    plain = attend(0, q, k, v)
    k[16 + 11 :], v[16 + 11 :] = 99.0, 99.0
    assert torch.allclose(attend(0, q, k, v), plain, atol=1e-5)


# --- blocks


def doubled(tokenizer, block, step, **settings):
    config = dataclasses.replace(TrainConfig(), block_diffusion=block, **settings)
    batch = make_batch(config, tokenizer, step)
    return config, batch, double_batch(config, batch, tokenizer, step)


@pytest.mark.parametrize("block", [4, 16, 64])
@pytest.mark.parametrize("step", [0, 2000])
def test_noisy_blocks_hold_the_answer_and_no_prompt_is_noise(tokenizer, block, step):
    config, batch, found = doubled(tokenizer, block, step)
    count, noisy = len(batch.ids), len(found.rows) // len(batch.ids)
    columns = found.inputs.shape[1] - noisy
    clean, own = found.inputs[:, :columns], found.inputs[:, columns:]
    where, targets = found.positions[:, columns:], found.targets.reshape(count, noisy)
    assert not (clean == tokenizer.mask_token_id).any()
    assert (clean == np.pad(batch.ids, ((0, 0), (0, block)))[:, :columns]).all()  # 0 ends a text
    assert (np.take_along_axis(clean, where, axis=1) == targets).all()
    assert (where[:, 0] % block == 0).all()
    is_prompt = where < batch.prompt_lengths[:, None]
    assert (own == targets)[is_prompt].all()
    weights = found.weights.reshape(count, noisy)
    assert not weights[is_prompt].any()
    assert (weights[~is_prompt] > 0).all()
    assert (weights[(own != targets)] >= config.fill_weight * 0.99).all()
    # All of an answer and its end, whatever of a block is prompt.
    ends = batch.prompt_lengths + batch.answer_lengths
    assert ((where[:, -1] >= ends) & (where[:, 0] <= batch.prompt_lengths)).all()
    is_replaced = (own != targets) & (own != tokenizer.mask_token_id)
    assert is_replaced.any()
    none = doubled(tokenizer, block, step, replaced_shares=(0.0, 0.0))[2].inputs[:, columns:]
    assert ((none == targets) | (none == tokenizer.mask_token_id)).all()


def test_a_noisy_block_is_computed_as_a_server_computes_it(tokenizer):
    """Against the clean blocks before it and itself: nothing leaks from its own clean copy, or from later blocks."""
    block = 8
    config, batch, found = doubled(tokenizer, block, 0, d_model=32, n_layers=2, n_heads=4, mlp_hidden_size=64)
    torch.manual_seed(0)
    model = loop.new_model(config, tokenizer).eval()
    noisy = len(found.rows) // len(batch.ids)
    columns = found.inputs.shape[1] - noisy
    with torch.no_grad():
        attend = loop.masked_attention(torch.from_numpy(found.allowed))
        ids, positions = (torch.from_numpy(each).reshape(-1) for each in (found.inputs, found.positions))
        logits = model.logits(model(ids, positions, attend)).view(len(batch.ids), columns + noisy, -1)
    for i in range(min(3, len(batch.ids))):
        for start in range(0, noisy, block):
            at = int(found.positions[i, columns + start])
            shown = found.inputs[i, columns + start : columns + start + block]
            expected = masked_logits(model, [*found.inputs[i, :at].tolist(), *shown.tolist()], block)[-block:]
            torch.testing.assert_close(
                logits[i, columns + start : columns + start + block], expected, rtol=1e-4, atol=1e-4
            )


def test_a_noisy_canvas_is_computed_as_a_server_computes_it(tokenizer, monkeypatch):
    """Behind prompts that a window does not cover, too."""
    monkeypatch.setattr(training_canvas, "_WINDOW", 24)
    config = dataclasses.replace(SMALL, canvas=8)
    batch = make_batch(config, tokenizer, 3)
    found = canvas_batch(config, batch, tokenizer, 3)
    model = loop.new_model(config, tokenizer).eval()
    loop.initialise(model, 0)
    logits, soft = [], []
    with torch.no_grad():
        kept, expected = model.logits, model.soft_embeddings
        model.logits = lambda hidden: logits.append(kept(hidden)) or logits[-1]
        model.soft_embeddings = lambda p: soft.append(expected(p)) or soft[-1]
        assert canvas_loss(config, model, found, loop.masked_attention, 0) > 0
    assert found.mixed.ids.shape[1] == 2 * found.noise.ids.shape[1]
    for made, canvases, of_step in zip(
        logits, (found.noise, found.mixed), (torch.zeros_like(soft[0]), soft[0]), strict=True
    ):
        count, places = canvases.ids.shape
        of_first = of_step.view(count, -1, config.d_model)[0].repeat(places // found.noise.ids.shape[1], 1)
        for start in range(0, places, 8):
            at, own = int(canvases.positions[0, start]), slice(start, start + 8)
            ids = [*found.clean[0, :at].tolist(), *canvases.ids[0, own].tolist()]
            wanted = kept(plain_hidden(model, ids, of_first[own])[at:])
            torch.testing.assert_close(made.view(count, places, -1)[0, own], wanted, rtol=1e-4, atol=1e-4)


# --- loop


def test_schedule():
    config = TrainConfig()
    assert loop.rate_share(config, 0) == pytest.approx(1 / config.warmup_steps)
    assert loop.rate_share(config, config.warmup_steps) == pytest.approx(1.0)
    assert loop.rate_share(config, config.steps) == pytest.approx(config.final_rate_share)


@pytest.mark.parametrize("block", [None, 16])
def test_first_layer_heads_start_as_neighbour_heads(tmp_path, block):
    """Behind norms of queries and keys, too."""
    trainer = loop.build_trainer(TrainConfig(tokenizer_problems=200, block_diffusion=block), tmp_path)
    ids = torch.tensor(trainer.tokenizer.encode("Story: Mia has 4 pens. Tom has 7 cups. The sky was grey."))
    seen: dict[int, torch.Tensor] = {}

    def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        seen[layer] = (torch.einsum("nhd,mhd->hnm", q, k) * q.shape[-1] ** -0.5).softmax(-1)
        return torch.einsum("hnm,mhd->nhd", seen[layer], v)

    with torch.no_grad():
        trainer.model(ids, torch.arange(len(ids)), attend)
    best = seen[0][:, 8].argmax(-1) - 8
    assert best.tolist() == [-1, 1, -2, 2, -3, 3, -4, 4]


@pytest.mark.parametrize("block", [None, 16, "canvas"])
def test_training_lowers_the_loss_and_comes_out_the_same_again(tmp_path, block):
    own = {"canvas": 16} if block == "canvas" else {"block_diffusion": block}
    config = dataclasses.replace(SMALL, **own)
    history = loop.train_tiny(config, tmp_path / "whole")["history"]
    assert history[-1]["loss"] < 0.8 * history[0]["loss"]
    assert loop.train_tiny(config, tmp_path / "again")["steps_done"] == config.steps
    one, two = loop.load_model(tmp_path / "whole").state_dict(), loop.load_model(tmp_path / "again").state_dict()
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert (tmp_path / "whole" / "tokenizer.json").read_bytes() == (tmp_path / "again" / "tokenizer.json").read_bytes()
    if block is not None:
        stored = read_block_config(tmp_path / "whole")
        family = "diffusion-gemma" if block == "canvas" else "sdar"
        assert (stored.family, stored.block_length, stored.qk_norm) == (family, 16, True)


def test_training_that_stops_before_its_end_leaves_a_checkpoint(tmp_path):
    assert loop.train_tiny(SMALL, tmp_path, stop_after=2)["steps_done"] == 2
    assert loop.load_model(tmp_path).config.d_model == SMALL.d_model


def test_a_model_is_trained_on_the_tasks_it_is_asked_for(tmp_path):
    asked = dataclasses.replace(SMALL, tasks=("mini-chain",), steps=2, gen_length=96)
    assert loop.train_tiny(asked, tmp_path)["config"]["tasks"] == ("mini-chain",)
    tokenizer = load_tokenizer(tmp_path)
    batch = make_batch(dataclasses.replace(TrainConfig(), tasks=tuple(GENERATORS), gen_length=256), tokenizer, 2300)
    texts = [tokenizer.decode(row) for row in batch.ids.tolist()]
    firsts = texts[:: len(texts) // len(GENERATORS)]
    starts = dict.fromkeys(GENERATORS, "Story") | {"mini-code": "#"}
    assert [text[: len(start)] for text, start in zip(firsts, starts.values(), strict=True)] == [*starts.values()]


def test_training_starts_from_a_checkpoint_of_its_shape(tmp_path):
    whole, further = tmp_path / "whole", tmp_path / "further"
    asked = dataclasses.replace(SMALL, steps=2)
    loop.train_tiny(asked, whole)
    further.mkdir()
    trainer = loop.build_trainer(dataclasses.replace(asked, tasks=("mini-gsm",), start=str(whole)), further)
    weights, found = loop.load_model(whole).state_dict(), trainer.model.state_dict()
    assert all(torch.equal(weights[name], found[name]) for name in weights)
    assert all((whole / name).read_bytes() == (further / name).read_bytes() for name in TOKENIZER_FILES)
    trainer.advance()
    assert not all(torch.equal(weights[name], each) for name, each in trainer.model.state_dict().items())
    with refuses("start='tiny'"):
        loop.build_trainer(dataclasses.replace(asked, start="tiny"), further)


@pytest.mark.parametrize(
    ("settings", "names"),
    [
        ({"tasks": ("mini-gsm", "mini-sum")}, "tasks='mini-sum'"),
        ({"tasks": ()}, "tasks=()"),
        ({"steps": 0}, "steps=0"),
        ({"block_lengths": (24,)}, "block_lengths"),
        ({"block_diffusion": 24}, "block_diffusion=24"),
        ({"curriculum": (Stage(until=0.5, num_facts=1, num_distractors=0),)}, "curriculum"),
        ({"pattern_shares": (0.5, 0.5, 0.5)}, "pattern_shares"),
    ],
)
def test_bad_settings_are_refused(settings, names):
    with pytest.raises(UserError, match=re.escape(names)):
        TrainConfig(**settings)


# --- the embedded checkpoints


@pytest.mark.parametrize(
    ("name", "tasks", "gen_length"), [("tiny", TrainConfig().tasks, 64), ("tiny-long", ("mini-chain",), 96)]
)
def test_embedded_checkpoints_answer_heldout_problems(name, tasks, gen_length):
    model, tokenizer = loop.load_model(EMBEDDED[name]), load_tokenizer(EMBEDDED[name])
    config = model.config
    assert config.vocab_size == tokenizer.vocab_size
    assert (config.mask_token_id, config.eos_token_id) == (tokenizer.mask_token_id, tokenizer.eos_token_id)
    dims = Dims(
        heads=config.n_heads,
        kv_heads=config.n_kv_heads,
        layers=config.n_layers,
        mask_id=config.mask_token_id,
        theta=config.rope_theta,
    )
    how = {"gen_length": gen_length, "block_length": 32, "steps": gen_length // 2}
    for task in tasks:
        used = 6 if task == "mini-chain" else 3
        problems = GENERATORS[task](11, 3, "heldout", num_facts=8, num_distractors=6, num_used=used)
        prompts = tokenizer.encode_batch([problem.prompt for problem in problems])
        for problem, prompt in zip(problems, prompts, strict=True):
            answer = llada(model.state_dict(), dims, tuple(prompt), **how).token_ids
            assert grade(problem, tokenizer.decode(answer)).exact


def test_embedded_files_fit_the_repository():
    files = [path for folder in EMBEDDED.values() for path in folder.iterdir()]
    assert sum(path.stat().st_size for path in files) <= 12 * 2**20


def test_a_start_may_have_another_length_and_the_first_task_its_curriculum(tmp_path):
    config = TrainConfig(tasks=("mini-far",), start="tiny-long", gen_length=96, max_sequence_length=2304)
    assert config.curriculum == CURRICULA["mini-far"] != TrainConfig().curriculum == CURRICULA["mini-gsm"]
    model = loop.build_trainer(config, tmp_path).model
    assert model.config.max_sequence_length == 2304
    weights = loop.load_model(EMBEDDED["tiny-long"]).state_dict()
    assert all(torch.equal(weights[name], each) for name, each in model.state_dict().items())
