"""What the GPU suite measures, in which order, and how long it expects that to take."""

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parents[2]), str(Path(__file__).parents[3])]

from engines.cost.roofline import GB, gpu
from engines.models.shape import model_shape
from paper_figures.dllm_serve.fig7 import FIXED_INPUT, OUTPUTS
from repro.families.cluster.instance import setting_of
from repro.families.dllm.deployment import DllmDeployment
from repro.families.platforms import MIB
from repro.files import csv_text
from repro.gpu_suite.checks import CHECK
from repro.gpu_suite.suite import (
    FIRST,
    PREPARATION_S,
    Job,
    Planned,
    Suite,
    figures,
    jobs_of,
    scale_of,
    stages,
    title_of,
)
from repro.gpu_suite.verdict import _block_table
from repro.runs.cell import Cell
from repro.runs.store import Store

PLANNED = Path(__file__).with_name("planned.csv")

CARDS = ("h200", "h100", "b200", "a100", "l40s", "rtx4090")
LARGE = ("mixing", "prefill")
"""Stages of cards that hold Qwen2.5-7B with its K/V and graphs."""
ALL = (
    *("tests", "mixing", "throughput", "step", "small-card", "goldens", "profile", "shapes", "block"),
    *("prefill", "paper-length", "burst", "agreement", "figures"),
)


@pytest.fixture(scope="module")
def h200(tmp_path_factory: pytest.TempPathFactory) -> list[Job]:
    """All of them; what they take is not asked."""
    asked = [replace(each, estimate_s=each.estimate_s or 1.0) for each in stages(scale_of("h200"))]
    return jobs_of(asked, Store(tmp_path_factory.mktemp("h200")))


def planned() -> str:
    """One row for each cell of the suite on each card, but for those of figures, and on one with less memory than it is sold with."""
    rows = []
    for name, memory_bytes in (*((name, None) for name in (*CARDS, "cpu-tiny")), ("h100", 70 * GB)):
        for each in stages(scale_of(name, memory_bytes)):
            knobs = " ".join(f"{knob}={value}" for knob, value in each.cell.knobs)
            if each.stage != "figures":
                rows.append((name, each.stage, title_of(each.cell), each.cell.dataset, each.estimate_s, knobs))
    return csv_text(("card", "stage", "what", "dataset", "seconds", "knobs"), rows)


def test_the_suite_asks_for_what_it_asked_for():
    """On purpose it changes by ``python tests/repro/gpu_suite/test_stages.py``."""
    assert planned() == PLANNED.read_text(encoding="utf-8")


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


def test_block_diffusion_is_a_minute_or_two_of_random_weights(h200):
    own = [job for job in h200 if job.stage == "block"]
    assert sum(job.estimate_s for job in own) <= 120
    for job in own:
        settings = job.experiment.deployment.settings
        assert (settings.knobs.device, settings.knobs.dtype, settings.directory) == ("cuda", "bfloat16", None)
        held = settings.shape.weight_bytes + settings.num_tokens * settings.shape.kv_bytes_per_token
        assert 0.5 * gpu("h200").memory_bytes < held < 0.95 * gpu("h200").memory_bytes
        tokens = [request.total + settings.block for request in job.experiment.workload.requests]
        assert sum(tokens) < settings.num_tokens, "all run at once"


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
    page = "\n".join(_block_table(suite))
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
            on = deployment.settings
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


def test_the_first_minutes_leave_room_in_half_an_hour(estimated):
    """By an estimate that is meant to be too long: a card is often lent for half an hour."""
    assert sum(job.estimate_s for job in estimated if job.stage in FIRST) <= 24 * 60


def test_a_card_that_reports_more_than_its_platform_counts_on_is_not_held_to_less():
    assert "memory_limit" not in stages(scale_of("h100", 81_559 * MIB))[2].cell.knob_values


def test_laps_takes_at_most_twenty_minutes_and_asks_for_mixing_first(h200):
    of_laps = [job for job in h200 if job.stage in LARGE]
    assert sum(job.estimate_s for job in of_laps) <= 20 * 60
    assert "--parts kappa" in str(of_laps[0].experiment.cell.knob_values["options"])
    assert all(str(job.experiment.cell.knob_values["script"]).startswith("prefill") for job in of_laps)


def test_every_benchmark_is_a_script(h200):
    from repro.paths import REPO

    scripts = {job.experiment.cell.knob_values.get("script") for job in h200} - {None}
    assert scripts == {"step", "peaks", "host", "prefill", "prefill_loops"}
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


if __name__ == "__main__":
    PLANNED.write_text(planned(), encoding="utf-8")
