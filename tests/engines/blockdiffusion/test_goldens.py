"""Recorded cases of the authors' own code: tokens and counts of forwards, through the engine and through the plain loop.

They do not come with the package: REPRO_BLOCK_GOLDENS names their folder.
"""

import json
import os
from functools import cache
from pathlib import Path

import pytest
from support.block_models import MASK, write_block

from engines.blockdiffusion.rules import Static, SubBlocks
from engines.models.loader import load_block
from repro.checks.blocks import FOLDER_VARIABLE, NEAR, BlockCase, recorded_cases, verify_blocks
from repro.checks.plain_blocks import plain_run

FOLDER = os.environ.get(FOLDER_VARIABLE)


def cases():
    if FOLDER is None:
        why = f"{FOLDER_VARIABLE} names no folder with recorded block-diffusion cases"
        return [pytest.param(None, marks=pytest.mark.skip(reason=why), id="recorded")]
    return [pytest.param(case, id=case.id) for case in recorded_cases(Path(FOLDER))]


@cache
def model(checkpoint):
    return load_block(str(checkpoint))


@pytest.mark.parametrize("case", cases())
def test_the_authors_tokens_and_counts(case):
    (found,) = verify_blocks([case])
    if not case.required and not found.passed:
        pytest.xfail(f"the authors' run came within {NEAR} of a threshold")
    assert found.difference is None
    # A block that the last forward left as it was is not computed again, and neither is the last one.
    assert found.answer.committed <= -(-(len(case.prompt) % case.block + case.gen_length) // case.block) - 1
    is_drawn = case.sampling.temperature > 0
    if is_drawn or case.exits_early or (isinstance(case.rule, SubBlocks) and case.rule.dual_cache):
        return
    plain = plain_run(model(case.checkpoint), list(case.prompt), case.gen_length, case.rule, case.block)
    assert plain.ids[: len(case.expected)] == list(case.expected)


@pytest.mark.skipif(FOLDER is None, reason=f"{FOLDER_VARIABLE} names no folder")
def test_sglang_s_loop_runs_final_blocks_once_more():
    folder = Path(FOLDER or "")
    content = json.loads((folder / "block_engine_cases.json").read_text())
    asked = [case for case in recorded_cases(folder) if case.id.startswith("block_engine")]
    for case, stored in zip(asked, content["cases"], strict=True):
        plain = plain_run(model(case.checkpoint), list(case.prompt), case.gen_length, case.rule, case.block)
        assert plain.sglang_forwards == stored["denoise_forwards_incl_commit"]
        (found,) = verify_blocks([case])
        assert found.answer.denoised == plain.denoised


def test_a_stop_in_the_first_block_ends_the_answer():
    """Where the script of Fast-dLLM v2 has no cache yet, and fails."""
    if FOLDER is None:
        pytest.skip(f"{FOLDER_VARIABLE} names no folder")
    folder = Path(FOLDER)
    content = json.loads((folder / "fastdllm2_cases.json").read_text())
    failed = [case for case in content["cases"] if case["error"] is not None]
    assert failed
    for case in failed:
        given = case["params"]
        asked = BlockCase(
            id="failed",
            method="fastdllm2",
            checkpoint=folder / "fastdllm2_tiny",
            block=given["block_size"],
            prompt=tuple(case["prompt"]),
            gen_length=given["max_new_tokens"],
            rule=SubBlocks(
                length=given["small_block_size"], threshold=given["threshold"], dual_cache=given["use_block_cache"]
            ),
            expected=(),
            stop_ids=frozenset([given["stop_token"]]),
        )
        assert verify_blocks([asked])[0].answer.ids[-1] == given["stop_token"]


@pytest.mark.parametrize("ends", ["id", "list"])
@pytest.mark.parametrize("prompt", [(5, 7, 11), (5, 7, 11, 2), (9,)], ids=len)
def test_a_recorded_stop_of_sdar_ends_the_answer_and_not_its_block(tmp_path, prompt, ends):
    """As the authors' script leaves it: the stop's block is whole, and masks follow."""
    block, length = 4, 16
    write_block(tmp_path / "sdar_tiny", "sdar")
    plain = plain_run(model(tmp_path / "sdar_tiny"), list(prompt), length, Static(steps=2), block)
    place = next(i for i in range(2, length - 2 * block) if plain.ids[i] not in plain.ids[:i])
    whole = -(-(len(prompt) + place + 1) // block) * block - len(prompt)
    ids = [*plain.ids[:whole], *[MASK] * (length - whole)]
    stop = plain.ids[place]
    params = {
        "gen_length": length,
        "block_length": block,
        "denoising_steps": 2,
        "temperature": 1.0,
        "remasking_strategy": "low_confidence_static",
    }
    denoised = plain_run(model(tmp_path / "sdar_tiny"), list(prompt), whole, Static(steps=2), block).denoised
    case = {
        "prompt": [*prompt],
        "output_full": [*prompt, *ids],
        "error": None,
        "prompt_preserved": True,
        "n_forwards": denoised + 3,
        "n_store": 3,
        "params": params | {"stopping_criteria_idx": stop if ends == "id" else [MASK - 3, stop]},
    }
    for name in ("block_engine", "llada2", "fastdllm2"):
        (tmp_path / f"{name}_cases.json").write_text(json.dumps({"cases": []}))
    (tmp_path / "sdar_cases.json").write_text(json.dumps({"cases": [case, case | {"params": params}]}))
    stopped, unread = verify_blocks(recorded_cases(tmp_path))
    assert stopped.difference is None
    assert stopped.answer.ids[-1] == stop
    assert len(stopped.answer.ids) == place + 1
    assert unread.difference is not None, "the same ids without a stop"
