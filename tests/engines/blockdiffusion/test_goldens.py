"""Recorded cases of the authors' own code: tokens and counts of forwards, through the engine and through the plain loop.

They do not come with the package. REPRO_BLOCK_GOLDENS names their folder: ``*_cases.json`` and the tiny checkpoints they were made
with. Two kinds of cases are not to be reproduced: a prompt of exactly a block of Fast-dLLM v2, which its script ignores, and those
whose script failed or wrote over the prompt.
"""

import json
import os
from functools import cache
from pathlib import Path

import pytest

from engines.blockdiffusion.engine import BlockEngine
from engines.blockdiffusion.executor import TorchBlockExecutor
from engines.blockdiffusion.request import BlockRequest, BlockSampling
from engines.blockdiffusion.rules import Dynamic, JointThreshold, LowConfidence, Sequential, Static, SubBlocks
from engines.models.loader import load_block
from repro.checks.plain_blocks import plain_run

FOLDER = os.environ.get("REPRO_BLOCK_GOLDENS")
NEAR = 1e-3
"""A case whose authors came so near to a threshold may differ."""


def cases(name):
    if FOLDER is None:
        why = "REPRO_BLOCK_GOLDENS names no folder with recorded block-diffusion cases"
        return [pytest.param(None, marks=pytest.mark.skip(reason=why), id=name)]
    content = json.loads(Path(FOLDER, f"{name}_cases.json").read_text())
    common = {key: value for key, value in content.items() if key != "cases"}
    return [pytest.param(common | case, id=f"{name}-{i}") for i, case in enumerate(content["cases"])]


@cache
def model(name):
    return load_block(str(Path(FOLDER, f"{name}_tiny")))


def serve(name, block, prompt, gen_length, rule, **options):
    executor = TorchBlockExecutor(model(name), num_slots=1, max_len=512, num_tokens=512, block=block)
    asked = BlockRequest(request_id=0, prompt_ids=tuple(prompt), gen_length=gen_length, rule=rule, **options)
    return BlockEngine(executor).run([asked])[0]


@pytest.mark.parametrize("case", cases("block_engine"))
def test_sglang_s_rules(case):
    given, prompt, block = case["params"], case["prompt"], case["block"]
    if case["algo"] == "LowConfidence":
        rule = LowConfidence(threshold=given["thr"])
    else:
        rule = JointThreshold(threshold=given["thr"], edit_threshold=given["et"], max_post_steps=given["maxpost"])
    expected = case["output_full"][len(prompt) :]
    found = serve("llada2", block, prompt, len(expected), rule)
    plain = plain_run(model("llada2"), prompt, len(expected), rule, block)
    assert list(found.ids) == expected == plain.ids
    assert plain.sglang_forwards == case["denoise_forwards_incl_commit"]
    assert found.denoised == plain.denoised
    # A block that the last forward left as it was is not computed again, and neither is the last one.
    assert found.committed <= case["blocks"] - 1


@pytest.mark.parametrize("case", cases("llada2"))
def test_llada2_s_generate(case):
    given, end = case["params"], case["eos_id"]
    is_first = case["algo"].startswith("llada2.0")
    early = bool(given.get("eos_early_stop"))
    if is_first:
        rule = Dynamic(steps=given["steps"], threshold=given["threshold"])
    else:
        rule = JointThreshold(
            threshold=given["threshold"],
            edit_threshold=given["editing_threshold"],
            max_post_steps=given["max_post_steps"],
        )
    # 2.1 decodes all blocks unless it is told to stop early, and cuts then.
    stops = frozenset([end]) if is_first or early else frozenset()
    options = {"stop_ids": stops, "exits_early": is_first and early}
    found = serve("llada2", given["block_length"], case["prompt"], given["gen_length"], rule, **options)
    ids = list(found.ids)
    ids = ids[: ids.index(end) + 1] if end in ids else ids
    if case["min_margin"] < NEAR and ids != case["output"]:
        pytest.xfail(f"the authors' run came within {case['min_margin']} of a threshold")
    assert ids == case["output"]
    assert found.denoised == case["n_forwards"]


@pytest.mark.parametrize("case", cases("sdar"))
def test_sdar_s_generate(case):
    given, prompt = case["params"], case["prompt"]
    if case["error"] is not None or not case["prompt_preserved"]:
        pytest.skip("the authors' script fails, or writes over the prompt")
    rules = {
        "sequential": lambda: Sequential(steps=given["denoising_steps"]),
        "low_confidence_static": lambda: Static(steps=given["denoising_steps"]),
        "low_confidence_dynamic": lambda: Dynamic(
            steps=given["denoising_steps"], threshold=given.get("confidence_threshold", 0.85)
        ),
    }
    if given["remasking_strategy"] not in rules:
        pytest.skip(f"{given['remasking_strategy']} cannot be used in the authors' script")
    sampling = BlockSampling(
        temperature=given.get("temperature", 1.0),
        top_k=given.get("top_k") or None,
        top_p=given.get("top_p") or 1.0,
        draws=False,
    )
    expected = case["output_full"][len(prompt) :]
    rule = rules[given["remasking_strategy"]]()
    found = serve("sdar", given["block_length"], prompt, len(expected), rule, sampling=sampling)
    assert list(found.ids) == expected
    assert found.denoised == case["n_forwards"] - case["n_store"]


@pytest.mark.parametrize("case", cases("fastdllm2"))
def test_fast_dllm_v2_s_batch_sample(case):
    given, prompt, block = case["params"], case["prompt"], case["params"]["block_size"]
    rule = SubBlocks(
        length=given["small_block_size"], threshold=given["threshold"], dual_cache=given["use_block_cache"]
    )
    stop = given["stop_token"]
    if case["error"] is not None:
        # The script has no cache yet where a stop falls into the very first block; the engine stops there.
        found = serve("fastdllm2", block, prompt, given["max_new_tokens"], rule, stop_ids=frozenset([stop]))
        assert found.ids[-1] == stop
        return
    if len(prompt) == block:
        pytest.skip("the authors' script ignores a prompt of exactly a block")
    expected = case["output_full"][len(prompt) :]
    # A stop that was denoised ends the answer, what follows is padding; one that a commit gave does not.
    has_end = stop in expected[:-1] and not any(expected[expected.index(stop) + 1 :])
    expected = expected[: expected.index(stop) + 1] if has_end else expected
    gen_length = given["max_new_tokens"] if has_end else len(expected)
    found = serve("fastdllm2", block, prompt, gen_length, rule, stop_ids=frozenset([stop] if has_end else []))
    assert list(found.ids) == expected
    prefills = int(len(prompt) >= block)
    assert found.denoised + found.committed + prefills == case["n_forwards"]
    assert found.rows == case["rows"]
    if not rule.dual_cache:
        assert plain_run(model("fastdllm2"), prompt, len(expected), rule, block).ids[: len(expected)] == expected
