"""What the GPU suite measures, in which order, and how long it expects that to take."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
from support.tables import data_beside

from engines.cost.roofline import GB, gpu
from engines.models.shape import model_shape
from paper_figures.dllm_serve.fig7 import FIXED_INPUT, OUTPUTS
from repro.families.cluster.instance import setting_of
from repro.families.dllm.deployment import DllmDeployment
from repro.families.platforms import MIB
from repro.gpu_suite.checks import CHECK
from repro.gpu_suite.expected import PREPARATION_S
from repro.gpu_suite.stages import COMPARED, FIRST, Planned, figures, scale_of, stages, title_of
from repro.gpu_suite.suite import Job, Suite, jobs_of
from repro.gpu_suite.verdict import _blocks
from repro.runs.cell import Cell
from repro.runs.store import Store

CASES = data_beside(__file__, "cases")

CARDS = ("h200", "h100", "b200", "a100", "l40s", "rtx4090")
LARGE = ("mixing", "prefill")
"""Stages of cards that hold Qwen2.5-7B with its K/V and graphs."""
SERVED = ("dllm-serve", "dllm-serve", "fast-dllm", *COMPARED[1:])
"""dLLM-Serve as published and with a single refresh, and Fast-dLLM's rule on its engine, beside the static baselines."""
ALL = (
    *("tests", "mixing", "throughput", "step", "small-card", "goldens", "profile", "shapes", "block"),
    *("prefill", "paper-length", "burst", "kernels", "agreement", "figures"),
)


@pytest.fixture(scope="module")
def h200(tmp_path_factory: pytest.TempPathFactory) -> list[Job]:
    """All of them; what they take is not asked."""
    asked = [replace(each, estimate_s=each.estimate_s or 1.0) for each in stages(scale_of("h200"))]
    return jobs_of(asked, Store(tmp_path_factory.mktemp("h200")))


def is_growing(cell: Cell) -> bool:
    """Whether it is one of Figure 7's runs of dLLM-Serve, whose outputs grow at the usual length of input."""
    return cell.system == "dllm-serve" and cell.knob_values.get("input_len") == FIXED_INPUT


@pytest.fixture(scope="module")
def estimated(tmp_path_factory: pytest.TempPathFactory) -> list[Job]:
    """What they take is simulated: for all of the first minutes and all that grow, and for some of the rest, which are alike."""
    asked = stages(scale_of("h200"))
    alike = [each for each in asked if each.stage not in FIRST and not is_growing(each.cell)]
    left_out = {each.cell.key for i, each in enumerate(alike) if i % 6}
    some = [each for each in asked if each.cell.key not in left_out]
    return jobs_of(some, Store(tmp_path_factory.mktemp("estimated")))


def served(jobs: Sequence[Job], stage: str) -> list[Cell]:
    """Cells of a stage that serve requests."""
    return [job.experiment.cell for job in jobs if job.stage == stage and job.experiment.family is not CHECK]


def asked_of(asked: Sequence[Planned], stage: str) -> list[Cell]:
    return [each.cell for each in asked if each.stage == stage]


@pytest.mark.parametrize("name", CARDS)
def test_stages_come_in_order_of_worth(name):
    asked = stages(scale_of(name))
    too_large = () if name in CARDS[:4] else LARGE if name == "l40s" else (*LARGE, "block")
    expected = tuple(stage for stage in ALL if stage not in too_large)
    assert tuple(dict.fromkeys(each.stage for each in asked)) == expected
    assert ALL[: len(FIRST)] == FIRST
    assert len({each.cell.key for each in asked}) == len(asked)


def test_the_small_suite_has_every_stage_but_tests_and_another_shape():
    asked = stages(scale_of("cpu-tiny"))
    assert tuple(dict.fromkeys(each.stage for each in asked)) == tuple(
        stage for stage in ALL[1:] if stage not in ("shapes", "paper-length")
    )
    assert all(each.estimate_s is not None for each in asked)
    assert {cell.knob_values["memory_limit"] for cell in asked_of(asked, "small-card")} == {48 * MIB}


def test_block_diffusion_is_a_minute_or_two_of_random_weights(h200):
    own = [job for job in h200 if job.stage == "block"]
    assert sum(job.estimate_s for job in own) <= 120
    assert [job.what.rpartition(",")[0] for job in own] == [
        "block-diffusion, sdar-8b",
        "block-diffusion, sdar-8b, autoregressive",
        "block-diffusion, llada2-mini",
        "block-diffusion, llada2-mini, first done",
    ]
    for job in own:
        settings = job.experiment.deployment.settings
        assert (settings.knobs.device, settings.knobs.dtype, settings.directory) == ("cuda", "bfloat16", None)
        held = settings.shape.weight_bytes + settings.num_tokens * settings.shape.kv_bytes_per_token
        assert 0.5 * gpu("h200").memory_bytes < held < 0.95 * gpu("h200").memory_bytes
        tokens = [request.total + settings.block for request in job.experiment.workload.requests]
        assert sum(tokens) < settings.num_tokens, "all run at once"
    (small,) = {
        each.cell.knob_values["memory_limit"] for each in stages(scale_of("h100", 75 * GB)) if each.stage == "block"
    }
    assert small == 75 * GB


def test_the_tiny_block_stage_runs_and_is_shown(tmp_path):
    asked = [each for each in stages(scale_of("cpu-tiny")) if each.stage == "block"]
    suite = Suite(
        jobs=jobs_of(asked, Store(tmp_path / "expected")),
        root=tmp_path,
        platform="cpu-tiny",
        command="repro gpu-suite",
        on_line=lambda line: None,
    )
    outcome = suite.run(600.0)
    assert (outcome.ran, outcome.failed, outcome.left) == (len(asked), (), ())
    page = "\n".join(_blocks(suite))
    # One row for each, and a token a forward where every token is a block.
    assert page.count("| block-diffusion, ") == len(asked) == 4
    assert "| block-diffusion, tiny-sdar, autoregressive | 2 |" in page


def test_everything_can_be_prepared_without_a_card(h200):
    assert len(h200) == len(stages(scale_of("h200"))) > 90
    for job in h200:
        assert job.experiment.is_measured
        assert job.experiment.cell.platform == "h200"
        assert job.experiment.cell.executor == "torch"
        deployment = job.experiment.deployment
        if isinstance(deployment, DllmDeployment):
            on = deployment.settings.on
            assert (on.device, on.dtype, on.weights) == ("cuda", "bfloat16", "random")


@pytest.mark.parametrize("name", CARDS[1:])
def test_other_cards_can_be_prepared_too(name):
    from repro.runs.experiment import prepare

    asked = [prepare(each.cell) for each in stages(scale_of(name)) if each.stage != "figures"]
    assert {each.cell.platform for each in asked} == {name}
    # No run asks for more than the card has.
    assert all(
        each.deployment.settings.memory_limit <= gpu(name).memory_bytes
        for each in asked
        if isinstance(each.deployment, DllmDeployment)
    )


@pytest.mark.parametrize("name", CARDS)
def test_scripts_of_prefills_fit_the_card(name):
    for cell in (*asked_of(stages(scale_of(name)), "mixing"), *asked_of(stages(scale_of(name)), "prefill")):
        model = str(cell.knob_values["options"]).split()[1]
        shape = model_shape(model)
        held = shape.weight_bytes + setting_of(model).num_tokens * shape.kv_bytes_per_token
        assert held < 0.75 * gpu(name).memory_bytes, cell


@pytest.mark.parametrize(
    ("name", "batches"),
    [("h200", "1 16 64 128"), ("h100", "1 16 64 128"), ("l40s", "1 16 64 128"), ("rtx4090", "1 16")],
)
def test_steps_are_timed_of_batches_that_fit(name, batches):
    """LLaDA-8B: 16 GB of weights, and 75 MB of K/V and 29 MB of activations a request."""
    timed = {cell.knob_values.get("script"): cell for cell in asked_of(stages(scale_of(name)), "step")}
    assert f"--batch {batches} --length" in str(timed["step"].knob_values["options"])


def test_a_card_with_less_memory_is_planned_for_what_it_has():
    cells = [each.cell for each in stages(scale_of("h100", 70 * GB)) if each.stage in ("throughput", "small-card")]
    assert [cell.knob_values["memory_limit"] for cell in cells] == [70 * GB] * 6 + [24 * GB] * 6
    assert "memory_limit" not in stages(scale_of("h100", 81_559 * MIB))[2].cell.knob_values


@pytest.mark.parametrize(("stage", "dataset", "num_prompts", "model"), CASES["compared"])
def test_all_systems_are_compared_side_by_side(h200, stage, dataset, num_prompts, model):
    """One after the other on the same load, so that a call that ends early has whole comparisons."""
    cells = served(h200, stage)
    assert [cell.system for cell in cells] == [*SERVED]
    loads = {(c.dataset, c.rate, c.knob_values["num_prompts"], c.knob_values.get("model")) for c in cells}
    assert loads == {(dataset, None, num_prompts, model)}
    published, single, rule, static, *_ = cells
    assert single.knob_values == {**published.knob_values, "refresh_delay": 0}
    assert rule.knob_values == {**published.knob_values, "reading": "policy", "basis": rule.knob_values["basis"]}
    titles = ["dllm-serve", "dllm-serve, one refresh", "fast-dllm, on our engine", "fast-dllm"]
    assert [title_of(cell) for cell in (published, single, rule, static)] == titles


def test_the_first_minutes_decode_fewer_tokens_than_the_paper(h200):
    fewer = dict.fromkeys(FIRST, 128) | {"shapes": 64}
    for job in h200:
        if isinstance(deployment := job.experiment.deployment, DllmDeployment) and job.stage != "figures":
            generation, tokens = deployment.settings.generation, fewer.get(job.stage, 256)
            assert (generation.gen_length, generation.steps) == (tokens, tokens), job.name


def test_the_first_minutes_leave_room_in_half_an_hour(estimated):
    """By an estimate that is meant to be too long: a card is often lent for half an hour."""
    assert sum(job.estimate_s for job in estimated if job.stage in FIRST) <= 24 * 60


def test_laps_takes_at_most_twenty_minutes_and_asks_for_mixing_first(h200):
    of_laps = [job for job in h200 if job.stage in LARGE]
    assert sum(job.estimate_s for job in of_laps) <= 20 * 60
    assert "--parts kappa" in str(of_laps[0].experiment.cell.knob_values["options"])
    assert all(str(job.experiment.cell.knob_values["script"]).startswith("prefill") for job in of_laps)


def test_a_small_card_has_its_memory_and_the_papers_token_budget(h200):
    small = served(h200, "small-card")
    assert {cell.knob_values["memory_limit"] for cell in small} == {24 * GB}
    assert [cell.knob_values.get("max_num_batched_tokens") for cell in small] == [4000, 4000, 4000, None, None, None]


def test_the_profiled_run_is_one_of_its_own(h200):
    (profiled,) = served(h200, "profile")
    plain = served(h200, "throughput")[0]
    assert profiled.knob_values["profile_every"] == 7
    ignored = {"basis", "profile_every", "num_prompts"}
    knobs = [{k: v for k, v in cell.knobs if k not in ignored} for cell in (profiled, plain)]
    assert knobs[0] == knobs[1]
    assert profiled.system == plain.system == "dllm-serve"


@pytest.mark.parametrize(
    ("name", "models"), [("h200", ["tiny", "llada-8b"]), ("l40s", ["tiny"]), ("rtx4090", ["tiny"])]
)
def test_both_precisions_at_once_only_where_they_fit(name, models):
    cells = asked_of(stages(scale_of(name)), "agreement")
    assert [cell.knob_values["model"] for cell in cells] == models


def test_every_benchmark_is_a_script(h200):
    from repro.paths import REPO

    scripts = {job.experiment.cell.knob_values.get("script") for job in h200} - {None}
    assert scripts == {"step", "peaks", "host", "attention", "kernels", "logits", "prefill", "prefill_loops"}
    assert all((REPO / "repro" / "bench" / f"{script}.py").is_file() for script in scripts)


def test_figures_begin_with_the_saturated_rate_and_share_runs(h200):
    drawn = {each.name: each for each in figures(scale_of("h200"))}
    assert list(drawn) == ["fig3", "fig4", "fig5", "table4", "fig7", "fig8"]
    rates = [cell.rate for cell in drawn["fig3"].cells]
    assert list(dict.fromkeys(rates)) == [6.0, 2.0]
    assert {each.view.obtained for each in drawn.values()} == {"measured"}
    assert {each.view.reading for each in drawn.values()} == {"efficient"}
    keys = {cell.key for each in drawn.values() for cell in each.cells}
    assert len(served(h200, "figures")) == len(keys)
    assert len(keys) < sum(len(each.cells) for each in drawn.values())


def test_estimates_are_of_the_simulated_run_and_grow_with_the_work(estimated):
    served_jobs = [job for job in estimated if job.experiment.family is not CHECK]
    assert all(PREPARATION_S < job.estimate_s < 900 for job in served_jobs)
    growing = [job for job in served_jobs if is_growing(job.experiment.cell)]
    growing.sort(key=lambda job: job.experiment.cell.knob_values["gen_length"])
    estimates = [job.estimate_s for job in growing]
    assert len(estimates) == len(OUTPUTS)
    assert estimates == sorted(estimates)
    assert estimates[0] < estimates[-1]
    # A run at a rate takes at least until its last request arrives.
    slow = [job for job in served_jobs if job.experiment.cell.rate == 2.0]
    assert len({job.experiment.cell.system for job in slow}) >= 2
    for job in slow:
        last = max(request.arrival_s for request in job.experiment.workload.requests)
        assert job.estimate_s >= PREPARATION_S + last
