"""`--system block-diffusion`: its models, rules and refusals, and what its runs record."""

import random
from dataclasses import dataclass
from typing import Annotated

import pytest
from support.block_models import END, write_block
from support.cells import a_cell
from support.tables import data_beside

from engines.errors import UserError
from engines.knobs import Range
from engines.models.block_config import SMALL_BLOCKS
from repro.families.block.settings import RULES, resolve, settings_of_requests
from repro.families.block.system import BLOCK, STEPS
from repro.families.block.text import text_of
from repro.runs.system import SYSTEMS
from repro.serving import stop_ids_of
from repro.workloads.rounds import RecordedRound, TracedSession

DATA = data_beside(__file__, "block_system")

SYSTEM = SYSTEMS.get("block-diffusion")


def cell(**asked):
    given = {"num_prompts": 4, "gen_length": 16, "block_length": 8, "input_len": 20, **asked}
    return a_cell("block-diffusion", **given)


def run(**asked):
    deployment, workload = SYSTEM.prepare(cell(**asked))
    return deployment.run(workload)


@pytest.mark.parametrize("model", [name for name in SMALL_BLOCKS if name != "tiny-diffusiongemma"])
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
    model = {"sub-blocks": "tiny-fast-dllm-v2", "entropy-budget": "tiny-diffusiongemma"}.get(rule, "tiny-llada2")
    options = {"dual_cache": True} if rule == "sub-blocks" else {}
    record = run(model=model, rule=rule, rate=50.0, num_prompts=3, max_num_seqs=2, **options)
    assert record.requests["status"] == ["ok"] * 3
    assert record.manifest["rule"]["is_exact"] == (rule not in ("sub-blocks", "entropy-budget"))


def test_canvases_are_served_and_counted():
    record = run(model="tiny-diffusiongemma", rule="entropy-budget", steps=3, confidence=0.0)
    BLOCK.check_tables(record)
    requests = record.requests
    assert set(requests["prefilled"]) == {20}
    assert (set(requests["committed"]), set(requests["denoised"])) == ({1}, {2 * 3})
    assert sum(record.tables[STEPS]["num_committed"]) == 4


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"temperature": 0.0}, "temperature=0.0 has no meaning for canvases"),
        ({"top_k": 3, "temperature": 0.5}, "temperature=0.5 has no meaning"),
        ({"autoregressive": True, "block_length": None}, "autoregressive=True has no meaning"),
        ({"rule": "static"}, "entropy-budget is for canvases"),
        ({"t_min": 0.9}, "t_min=0.9 must be below t_max=0.8"),
    ],
)
def test_what_canvases_have_no_meaning_of_is_refused(asked, said):
    with pytest.raises(UserError, match=said):
        SYSTEM.prepare(cell(**{"model": "tiny-diffusiongemma", **asked}))
    with pytest.raises(UserError, match="entropy-budget is for canvases"):
        SYSTEM.prepare(cell(model="tiny-sdar", rule="entropy-budget"))


def test_the_decoder_of_canvases_is_charged_one_token_a_step_too():
    """Without what a canvas' logits give the next step, on a card: here its weights are those of canvases alone."""
    given = {"platform": "h100-diffusiongemma", "executor": "roofline", "gen_length": 32}
    made = [resolve(a_cell("block-diffusion", **given, **own)) for own in ({}, {"autoregressive": True})]
    canvases, tokens = (each.shape for each in made)
    assert [each.is_of_canvases for each in made] == [True, False]
    assert canvases.logits_flops_per_row == 2 * tokens.logits_flops_per_row
    assert canvases.linear_flops_per_token - tokens.linear_flops_per_token == 6 * 2816 * 2112
    with pytest.raises(UserError, match="autoregressive=True has no meaning for canvases"):
        resolve(a_cell("block-diffusion", model="tiny-diffusiongemma", autoregressive=True))


def test_a_checkpoint_serves(tmp_path):
    folder = str(write_block(tmp_path / "sdar", "sdar"))
    record = run(model=folder, block_length=None, max_model_len=256, num_tokens=1024)
    assert record.manifest["block_length"] == 4
    assert record.requests["status"] == ["ok"] * 4
    first, second = (SYSTEM.prepare(cell(model=each, max_model_len=256))[0].basis for each in (folder, "tiny-sdar"))
    assert first != second


def test_a_checkpoint_without_a_tokenizer_ends_where_it_says(tmp_path):
    """SDAR's chat models end their turns with an id that is in generation_config.json alone."""
    folder = write_block(tmp_path / "sdar", "sdar", eos_token_id=[END, 7])
    settings = settings_of_requests({"model": str(folder), "max_model_len": 256})
    assert settings.config.eos_token_id == END
    assert stop_ids_of(settings) == {END, 7}
    (folder / "generation_config.json").write_text(f'{{"eos_token_id": [{END}, 8]}}')
    assert stop_ids_of(settings) == {END, 8}
    (folder / "generation_config.json").unlink()
    write_block(tmp_path / "llada2", "llada2", eos_token_id=None, pad_token_id=END)
    assert stop_ids_of(settings_of_requests({"model": str(tmp_path / "llada2"), "max_model_len": 256})) == {END}


def test_a_request_that_the_cache_never_holds_is_refused_by_what_was_asked():
    with pytest.raises(UserError, match="a sequence may have 32: shorten it, or raise num_tokens and max_model_len"):
        run(num_tokens=32)


def simulated(platform="h200-sdar-8b", **asked):
    given = {"num_prompts": 8, "gen_length": 32, "input_len": 64, **asked}
    deployment, workload = SYSTEM.prepare(a_cell("block-diffusion", platform=platform, executor="roofline", **given))
    return deployment.run(workload)


@pytest.mark.parametrize(
    ("platform", "holds"),
    [("h20-llada2-mini", 96), ("h200-llada2-mini", 141), ("h200-sdar-8b", 141), ("h100-sdar-8b", 80)],
)
def test_a_simulated_run_is_valid_and_says_what_it_was_charged_by(platform, holds):
    record = simulated(platform)
    BLOCK.check_tables(record)
    assert BLOCK.assess(record).reasons == ()
    assert record.manifest["obtained"] == "composed"
    assert "composed of vllm kernels" in record.manifest["calibration"]
    assert ("transferred from the h200" in record.manifest["calibration"]) == platform.startswith("h20-")
    assert record.manifest["platform"].startswith(f"NVIDIA {platform.partition('-')[0].upper()} {holds} GB")
    other = simulated(platform, cost="roofline")
    assert other.manifest["obtained"] == "simulated"
    # No step is quicker than the datasheet allows, and kernels are slower.
    assert 1.0 < sum(record.tables[STEPS]["duration_s"]) / sum(other.tables[STEPS]["duration_s"]) < 4.0


def test_an_autoregressive_decoder_is_one_row_a_token():
    record = simulated(autoregressive=True)
    assert set(record.requests["output_len"]) == {32}
    assert set(record.tables[STEPS]["num_rows"][1:]) == {8}
    assert sum(record.tables[STEPS]["num_committed"]) == 8 * 31
    measured = run(model="tiny-sdar", block_length=None, autoregressive=True)
    assert measured.requests["output_len"] == [16] * 4
    assert set(measured.requests["denoised"]) == {0}
    nothing = {"rule": "low-confidence", "temperature": 0.0, "batching": "mixed"}
    assert simulated(autoregressive=True, **nothing).requests == record.requests


@dataclass(frozen=True, kw_only=True)
class Asked:
    num_prompts: int = 3
    answer: Annotated[int, Range(1, 100)] = 21
    text: str | None = None

    def sessions(self, seed):
        draw = random.Random(seed)
        for index in range(self.num_prompts):
            asked = RecordedRound(draw.randint(5, 40), self.answer + index)
            yield TracedSession((asked,), arrival_s=0.5 * index, prompt=self.text)


def served(**asked):
    knobs = {"workload": f"{__name__}:Asked", "block_length": 8, **asked}
    deployment, workload = SYSTEM.prepare(a_cell("block-diffusion", "Asked", **knobs))
    return deployment, workload


def test_a_workload_of_one_s_own_is_served_as_it_asks():
    deployment, workload = served(arrivals="trace", answer=13, num_prompts=4, rule="static", steps=4)
    draw = random.Random(0)
    assert [len(each.prompt_ids) for each in workload.requests] == [draw.randint(5, 40) for _ in range(4)]
    assert [each.gen_length for each in workload.requests] == [13, 14, 15, 16]
    assert [each.arrival_s for each in workload.requests] == [0.0, 0.5, 1.0, 1.5]
    record = deployment.run(workload)
    # A busy machine may submit one late.
    assert all("late by the harness" in reason for reason in BLOCK.assess(record).reasons)
    assert record.requests["output_len"] == [13, 14, 15, 16]
    assert record.manifest["prompts"] == "random ids"
    on_card = {"platform": "h200-sdar-8b", "executor": "roofline", "workload": f"{__name__}:Asked"}
    simulated, same = SYSTEM.prepare(a_cell("block-diffusion", "Asked", answer=13, **on_card))
    assert sorted(each.gen_length for each in same.requests) == [13, 14, 15]
    assert BLOCK.assess(simulated.run(same)).reasons == ()


def test_a_workload_s_text_is_the_prompt_of_a_model_that_reads_it():
    text = "Story: Ben has 3 coins."
    deployment, workload = served(model="tiny-block", block_length=None, text=text)
    expected = text_of(deployment.settings).encode(text)
    assert {each.prompt_ids for each in workload.requests} == {expected}
    assert deployment.facts["prompts"] == "texts"


@pytest.mark.parametrize(("asked", "says"), DATA["no_room"])
def test_what_a_workload_leaves_no_room_for_is_refused(asked, says):
    with pytest.raises(UserError, match=says):
        served(**asked)
