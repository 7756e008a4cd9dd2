"""`--system block-diffusion`: its models, rules and refusals, and what its runs record."""

import pytest
from support.block_models import write_block
from support.cells import a_cell

from engines.errors import UserError
from repro.runs.system import SYSTEMS
from repro.systems.block.family import BLOCK, STEPS
from repro.systems.block.settings import RULES, TINY

SYSTEM = SYSTEMS.get("block-diffusion")


def cell(**asked):
    given = {"num_prompts": 4, "gen_length": 16, "block_length": 8, "input_len": 20, **asked}
    return a_cell("block-diffusion", **given)


def run(**asked):
    deployment, workload = SYSTEM.prepare(cell(**asked))
    return deployment.run(workload)


@pytest.mark.parametrize("model", TINY)
def test_a_run_is_valid_and_counts_what_it_did(model):
    record = run(model=model, rule="static", steps=4)
    BLOCK.check_tables(record)
    assert BLOCK.assess(record).reasons == ()
    requests, steps = record.requests, record.tables[STEPS]
    assert requests["output_len"] == [16] * 4
    # 20 tokens of prompt are two blocks and half of one; so three blocks are denoised, the last is not committed. Fast-dLLM v2
    # has a token of each block but the first from the one before.
    assert set(requests["prefilled"]) == {2}
    assert set(requests["committed"]) == {2}
    assert set(requests["denoised"]) == {2 + 4 + 4}
    assert sum(steps["num_committed"]) == sum(requests["committed"])
    assert sum(steps["num_taken"]) == 4 * (20 - 2 * (model == "tiny-fast-dllm-v2"))
    assert BLOCK.summarize(record)["tokens_per_forward"] == pytest.approx(16 / 12)
    assert record.manifest["obtained"] == "measured"
    assert record.manifest["rule"]["is_exact"]


@pytest.mark.parametrize("rule", RULES)
def test_every_rule_serves(rule):
    model = "tiny-fast-dllm-v2" if rule == "sub-blocks" else "tiny-llada2"
    options = {"dual_cache": True} if rule == "sub-blocks" else {}
    record = run(model=model, rule=rule, rate=50.0, num_prompts=3, max_num_seqs=2, **options)
    assert record.requests["status"] == ["ok"] * 3
    assert record.manifest["rule"]["is_exact"] == (rule != "sub-blocks")


def test_a_checkpoint_serves(tmp_path):
    folder = str(write_block(tmp_path / "sdar", "sdar"))
    record = run(model=folder, block_length=None, max_model_len=256, num_tokens=1024)
    assert record.manifest["block_length"] == 4
    assert record.requests["status"] == ["ok"] * 4
    first, second = (SYSTEM.prepare(cell(model=each, max_model_len=256))[0].basis for each in (folder, "tiny-sdar"))
    assert first != second


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ({"executor": "roofline"}, "block-diffusion runs its model, use --executor torch"),
        ({"platform": "rtx4090"}, "block-diffusion knows no card's defaults"),
        ({"rule": "best"}, "rule='best'"),
        ({"rule": "sequential", "threshold": 0.5}, "threshold=0.5 has no effect with rule='sequential'"),
        ({"rule": "static", "steps": 9}, "steps=9 exceeds the block's 8 tokens"),
        ({"rule": "sub-blocks", "sub_block": 3}, "length=3 of a sub-block must divide"),
        ({"top_p": 0.5}, "top_p=0.5 has no effect at temperature=0"),
        ({"max_model_len": 20}, "max_model_len=20 must hold gen_length=16 and a block of 8"),
        ({"model": "tiny-none"}, "model='tiny-none' is not a directory"),
        ({"retention_ratio": 0.5}, "retention_ratio=0.5 has no effect with system='block-diffusion'"),
    ],
)
def test_what_makes_no_sense_is_refused(asked, says):
    with pytest.raises(UserError, match=says):
        SYSTEM.prepare(cell(**asked))
