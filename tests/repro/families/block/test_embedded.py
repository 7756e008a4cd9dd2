"""The embedded block-diffusion model: its files, its answers, and that batches, caches and clients change none of them."""

import hashlib
import re
from collections import Counter
from functools import partial

import pytest
import torch
from support.cells import a_cell
from support.refusals import refuses

from engines.blockdiffusion import sequence
from engines.blockdiffusion.engine import BlockEngine
from engines.blockdiffusion.executor import TorchBlockExecutor
from engines.blockdiffusion.rules import JointThreshold, LowConfidence, Sequential, SubBlocks
from engines.blockdiffusion.scheduler import BlockEngineConfig
from engines.blockdiffusion.sequence import BlockRequest
from engines.errors import UserError
from engines.models.checkpoint import TINY_DIR
from engines.models.loader import load_block
from repro.checks.blocks import block_cases, embedded_cases, masked_logits, verify_blocks
from repro.families.block.settings import EMBEDDED, EMBEDDED_DIRS, EMBEDDED_TASKS, settings_of_requests
from repro.families.block.text import answer_of, encoded, text_of
from repro.runs.system import SYSTEMS
from repro.serving import answer_alone
from repro.tasks.mini import GENERATORS
from repro.tasks.problem import grade

SYSTEM = SYSTEMS.get("block-diffusion")
EMBEDDED_DIR = EMBEDDED_DIRS[EMBEDDED]
LENGTH = 64


@pytest.fixture(scope="module")
def model():
    return load_block(str(EMBEDDED_DIR))


@pytest.fixture(scope="module")
def text():
    return text_of(settings_of_requests({}))


def problems(count, **sizes):
    given = {"num_facts": 8, "num_distractors": 6, **sizes}
    return [each for task in EMBEDDED_TASKS for each in GENERATORS[task](11, count, "heldout", **given)]


def served(model, prompts, rules, text, *, batching="mixed", num_slots=8, rows=2048, **options):
    executor = TorchBlockExecutor(model, num_slots=num_slots, max_len=512, num_tokens=4096, **options)
    engine = BlockEngine(executor, BlockEngineConfig(max_num_batched_tokens=rows, batching=batching))
    asked = [
        BlockRequest(request_id=i, prompt_ids=ids, gen_length=LENGTH, rule=rule, stop_ids=text.end_ids)
        for i, (ids, rule) in enumerate(zip(prompts, rules, strict=True))
    ]
    return engine.run(asked)


@pytest.mark.parametrize("name", EMBEDDED_DIRS)
def test_its_files_are_small_and_those_of_its_card(name):
    folder = EMBEDDED_DIRS[name]
    assert sum(path.stat().st_size for path in folder.iterdir()) <= 4 * 2**20
    card = (folder / "README.md").read_text()
    digest = re.search(r"`([0-9a-f]{64})`", card)
    assert digest is not None
    assert digest[1] == hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()
    assert (folder / "tokenizer.json").read_bytes() == (TINY_DIR / "tokenizer.json").read_bytes()


def test_the_one_of_canvases_is_served_by_its_name_and_solves_what_it_is_asked():
    deployment, workload = SYSTEM.prepare(
        a_cell("block-diffusion", dataset="mini-gsm", num_prompts=4, model="tiny-canvas", steps=16)
    )
    record = deployment.run(workload)
    assert deployment.settings.is_of_canvases
    assert max(record.tables["requests"]["output_len"]) < LENGTH
    assert SYSTEM.family.summarize(record)["accuracy"]["value"] == 1


def test_it_is_as_large_as_the_full_diffusion_one_and_reads_its_tokens(model):
    from engines.models.loader import load_model as load_full

    full = load_full("tiny")
    sizes = [sum(each.numel() for each in one.parameters()) for one in (model, full)]
    assert abs(sizes[0] - sizes[1]) < 0.001 * sizes[1]
    assert (EMBEDDED_DIR / "tokenizer.json").read_bytes() == (TINY_DIR / "tokenizer.json").read_bytes()
    assert (model.config.mask_token_id, model.config.eos_token_id) == (
        full.config.mask_token_id,
        full.config.eos_token_id,
    )


def test_it_solves_held_out_problems_by_every_rule(model, text):
    asked = problems(3)
    prompts = [text.encode(each.prompt) for each in asked]
    for rule in (LowConfidence(), JointThreshold(threshold=0.9, edit_threshold=0.9), Sequential(steps=16), SubBlocks()):
        answers = served(model, prompts, [rule] * len(asked), text)
        solved = [grade(each, answer_of(answers[i].ids, text).text).exact for i, each in enumerate(asked)]
        assert sum(solved) >= len(asked) - 1, (rule, solved)


def test_bfloat16_and_float32_find_the_same_tokens_likely(model, text):
    """At nearly all places of a block that is all holes; its README has the share of more problems."""
    rounded, same = load_block(str(EMBEDDED_DIR), dtype=torch.bfloat16), []
    mask, block = model.config.mask_token_id, model.config.block_length
    for problem in problems(6):
        prompt = list(text.encode(problem.prompt))
        ids = prompt + [mask] * (2 * block - len(prompt) % block)
        holes = slice(len(prompt), len(ids) - block)
        with torch.no_grad():
            best = [masked_logits(each, ids, block)[holes].float().argmax(-1) for each in (model, rounded)]
        same += (best[0] == best[1]).tolist()
    assert len(same) > 50
    assert sum(same) >= 0.97 * len(same)


def test_no_batch_changes_an_answer(model, text):
    """Of any rules together, in any order of steps, with and without a prefix cache."""
    asked = problems(4)
    rules = [LowConfidence(), JointThreshold(threshold=0.7, edit_threshold=0.5), Sequential(steps=8), SubBlocks()]
    prompts, own = [text.encode(each.prompt) for each in asked], [rules[i % 4] for i in range(len(asked))]
    single = {
        i: served(model, [ids], [rule], text)[0].ids for i, (ids, rule) in enumerate(zip(prompts, own, strict=True))
    }
    for options in (
        {},
        {"batching": "synchronous"},
        {"rows": 96, "num_slots": 3},
        {"rows": 96, "num_slots": 3, "batching": "synchronous", "prefix_cache": False},
    ):
        answers = served(model, prompts, own, text, **options)
        assert {i: answer.ids for i, answer in answers.items()} == single


def test_a_commit_left_out_of_a_block_that_is_read_later_is_caught(monkeypatch):
    """K/V of a forward that still saw holes: answers are no longer those of the plain loop."""
    cases = [case for case in embedded_cases(2) if case.method == "block low-confidence"]
    finish = sequence.BlockSequence.finish_block
    monkeypatch.setattr(sequence.BlockSequence, "finish_block", lambda self, has_kv: finish(self, has_kv=True))
    left_out = verify_blocks(cases)
    assert all(result.answer.committed == 0 for result in left_out)
    assert not all(result.passed for result in left_out)


def test_the_engine_is_the_plain_loop_under_every_rule(monkeypatch):
    monkeypatch.delenv("REPRO_BLOCK_GOLDENS", raising=False)
    _, cases = block_cases()
    results = verify_blocks(cases)
    assert [result.difference for result in results] == [None] * len(cases)
    assert Counter(case.method for case in cases) == dict.fromkeys({case.method for case in cases}, 4)


# --- behind the harness


def run(dataset="mini-gsm", **asked):
    cell = a_cell("block-diffusion", dataset=dataset, **{"num_prompts": 6, **asked})
    deployment, workload = SYSTEM.prepare(cell)
    return deployment.run(workload)


def test_a_task_s_problems_are_asked_and_graded():
    for dataset in EMBEDDED_TASKS:
        record = run(dataset)
        SYSTEM.family.check_tables(record)
        assert SYSTEM.family.assess(record).reasons == ()
        summary = SYSTEM.family.summarize(record)
        assert summary["accuracy"]["n"] == 6
        assert summary["accuracy"]["value"] >= 5 / 6
        assert record.manifest["model"] == EMBEDDED
        assert record.facts["processor_s"] > 0


def test_a_simulation_asks_lengths_and_grades_nothing():
    """Its tokens mean nothing: they may be the end of a text."""
    asked = {"model": EMBEDDED, "cost": "roofline", "num_prompts": 2, "max_model_len": 1024}
    cell = partial(a_cell, "block-diffusion", platform="h200-sdar-8b", executor="roofline", **asked)
    with refuses("dataset='mini-gsm'"):
        SYSTEM.prepare(cell(dataset="mini-gsm"))
    deployment, workload = SYSTEM.prepare(cell(dataset="gsm8k"))
    assert deployment.task is None
    assert not any(each.stop_ids for each in workload.requests)


def test_one_prompt_alone_as_text_or_in_a_conversation(text):
    (problem,) = GENERATORS["mini-gsm"](11, 1, "heldout", num_facts=8, num_distractors=6)
    settings = settings_of_requests({"rule": "static", "steps": 16})
    ids = encoded(text, problem.prompt)
    assert encoded(text, problem.prompt.removesuffix("Answer:"), chat=True) == ids
    answer = answer_of(answer_alone(settings, ids, seed=0).ids, text)
    assert (answer.text, answer.finish_reason) == (problem.answer, "stop")
    with refuses("max_model_len=1024"):
        answer_alone(settings, ids * 20, seed=0)
    with pytest.raises(UserError, match="has the id 99999"):
        answer_alone(settings, (99999,), seed=0)
    with refuses("system_prompt='be'"):
        encoded(text, "a", system_prompt="be")
    with refuses("model='tiny-sdar'"):
        text_of(settings_of_requests({"model": "tiny-sdar"}))
