"""Decode rules over plain arrays: against lists, and in closed form.

Recorded cases of the authors' own code: tokens and counts of forwards, through the engine and through the plain loop.

They do not come with the package: REPRO_BLOCK_GOLDENS names their folder.
"""

import json
import os
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.block_models import MASK, write_block

from engines.blockdiffusion.rules import (
    Blocks,
    Dynamic,
    JointThreshold,
    LowConfidence,
    Sequential,
    Static,
    SubBlocks,
    quota,
)
from engines.blockdiffusion.sequence import BlockRequest, BlockSampling
from engines.errors import UserError
from engines.models.loader import load_block
from repro.checks.blocks import FOLDER_VARIABLE, NEAR, BlockCase, plain_run, plain_take, recorded_cases, verify_blocks

B = 8
RULES = (
    LowConfidence(threshold=0.6),
    LowConfidence(threshold=1.5),
    JointThreshold(threshold=0.6, edit_threshold=0.3, max_post_steps=2),
    Static(steps=3),
    Dynamic(steps=4, threshold=0.6),
    Sequential(steps=3),
    SubBlocks(length=4, threshold=0.6),
    SubBlocks(length=2, threshold=1.0),
)
LEVELS = st.sampled_from((0.1, 0.3, 0.5, 0.6, 0.61, 0.9, 1.0))


@st.composite
def states(draw):
    """A block before a forward, with at least a hole."""
    leading = draw(st.integers(0, B - 1))
    holes = draw(st.lists(st.integers(leading, B - 1), min_size=1, unique=True))
    ids = draw(st.lists(st.integers(0, 3), min_size=B, max_size=B))
    tokens = draw(st.lists(st.integers(0, 3), min_size=B, max_size=B))
    return (
        ids,
        sorted(holes),
        list(range(leading)),
        tokens,
        draw(st.lists(LEVELS, min_size=B, max_size=B)),
        draw(st.integers(0, 2)),
    )


def blocks_of(cases):
    def mask(places):
        return np.isin(np.arange(B), places)

    return Blocks(
        np.array([case[0] for case in cases]),
        np.stack([mask(case[1]) for case in cases]),
        np.stack([mask(case[2]) for case in cases]),
        np.array([case[5] for case in cases]),
        np.zeros(len(cases), dtype=np.int64),
    )


@given(st.lists(states(), min_size=1, max_size=5), st.sampled_from(RULES))
def test_a_rule_takes_what_its_text_says(cases, rule):
    """Many blocks at once as each in lists; only holes and, where the rule edits, tokens that were written are touched."""
    blocks = blocks_of(cases)
    tokens = np.array([case[3] for case in cases])
    confidence = np.array([case[4] for case in cases], dtype=np.float64)
    verdict = rule.decide(blocks, tokens, confidence)
    for i, (ids, holes, leading, own, sure, step) in enumerate(cases):
        expected = plain_take(rule, ids, holes, leading, own, sure, step)
        assert set(np.flatnonzero(verdict.take[i]).tolist()) == expected
        assert not verdict.take[i, leading].any()
        if not rule.edits:
            assert expected <= set(holes)
            assert verdict.is_done[i] == (expected == set(holes))
        assert (expected & set(holes)) or isinstance(rule, Static | Dynamic | Sequential)
    assert not (verdict.take & ~rule.wanted(blocks)).any()


@given(st.lists(states(), min_size=1, max_size=4), st.sampled_from(RULES))
def test_what_no_rule_asked_for_decides_nothing(cases, rule):
    blocks = blocks_of(cases)
    tokens = np.array([case[3] for case in cases])
    confidence = np.array([case[4] for case in cases])
    wanted = rule.wanted(blocks)
    verdict = rule.decide(blocks, tokens, confidence)
    noise = rule.decide(blocks, np.where(wanted, tokens, 99), np.where(wanted, confidence, 2.0))
    assert np.array_equal(verdict.take, noise.take)
    assert np.array_equal(verdict.is_done, noise.is_done)


def one_block(*, holes=(), given=(), ids=None, full=0):
    return Blocks(
        np.zeros((1, B), dtype=np.int64) if ids is None else np.array([ids]),
        np.isin(np.arange(B), holes)[None],
        np.isin(np.arange(B), given)[None],
        np.array([3]),
        np.array([full]),
    )


def test_joint_threshold_ends_with_a_forward_that_changes_nothing_or_at_its_limit():
    rule = JointThreshold(threshold=0.5, edit_threshold=0.2, max_post_steps=2)
    same, other = np.zeros((1, B), dtype=np.int64), np.ones((1, B), dtype=np.int64)
    sure = np.full((1, B), 0.9)
    assert rule.decide(one_block(), same, sure).is_done[0]
    assert not rule.decide(one_block(full=0), other, sure).is_done[0]
    limit = rule.decide(one_block(full=1), other, sure)
    assert limit.is_done[0]
    assert limit.take.all()  # its changes count
    filled = rule.decide(one_block(holes=(7,), full=0), same, sure)
    assert not filled.is_done[0]  # the next forward may edit
    assert JointThreshold(max_post_steps=0).decide(one_block(holes=(7,)), same, sure).is_done[0]
    # The prompt's tokens stay whatever the model makes of them.
    assert np.flatnonzero(rule.decide(one_block(given=(0, 1)), other, sure).take[0]).tolist() == list(range(2, B))
    # Strictly more than the threshold.
    assert not rule.decide(one_block(), other, np.full((1, B), 0.2)).take.any()


@given(st.integers(1, 64), st.integers(1, 64))
def test_a_quota_shares_the_block_over_its_steps(steps, length):
    shares = quota(steps, length, np.arange(steps)).tolist()
    assert sum(shares) == length
    assert shares == sorted(shares, reverse=True)
    assert max(shares) - min(shares) <= 1


def test_a_dual_cache_computes_its_part_once_that_has_begun():
    rule = SubBlocks(length=4, dual_cache=True)
    holes = np.isin(np.arange(B), (5, 6, 7))
    assert not rule.is_exact
    assert rule.span(holes, 0) == (0, B)  # nothing of the block is cached
    assert rule.span(holes, 1) == (4, 8)
    holes[4] = True
    assert rule.span(holes, 3) == (0, B)
    assert SubBlocks(length=4).span(holes, 3) == (0, B)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: SubBlocks(length=3).check_block(B), "sub_block=3"),
        (lambda: Static(steps=9).check_block(B), "steps=9"),
        (lambda: LowConfidence(threshold=-1.0), "threshold=-1.0"),
        (lambda: BlockSampling(top_p=0.5), "top_p=0.5"),
        (lambda: BlockSampling(top_k=5), "top_k=5"),
        (lambda: BlockRequest(request_id=0, prompt_ids=(), gen_length=1), "prompt_ids is empty"),
        (lambda: BlockRequest(request_id=0, prompt_ids=(1,), gen_length=0), "gen_length=0"),
        (
            lambda: BlockRequest(request_id=0, prompt_ids=(1,), gen_length=1, rule=JointThreshold(), exits_early=True),
            "exits_early with JointThreshold",
        ),
    ],
)
def test_what_makes_no_sense_is_refused(make, says):
    with pytest.raises(UserError, match=says):
        make()


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
