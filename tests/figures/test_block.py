"""Block diffusion beside other ways to decode and against what SGLang published: the fit is one, and the figures ask what they say."""

import numpy as np
import pytest
from support.cells import H20_LLADA2_MINI, H200_LLADA2_MINI, H200_SDAR_8B
from support.figure_runs import block_run, by_claim
from support.refusals import refuses
from support.tables import data_beside

from paper_figures.block import block_diffusion, canvases, sglang
from repro.families.block.system import BLOCK
from repro.families.platforms import platform
from repro.reports.figures import View
from repro.runs.experiment import prepare

DATA = data_beside(__file__, "block")

pytestmark = pytest.mark.usefixtures("unsaved")
H20_VIEW = View(platform=H20_LLADA2_MINI, reading="published", num_runs=3)
H200_VIEW = View(platform=H200_SDAR_8B, reading="published", num_runs=2)


def simulated(cell):
    experiment = prepare(cell)
    return BLOCK.summarize(experiment.deployment.run(experiment.workload))


def test_the_constant_is_what_meets_the_first_point():
    """So that the throughput of one request, over the figure's seeds, is the published one to half a percent."""
    cell = sglang.cell_of(H20_VIEW, 1)
    found = [simulated(cell.with_seed(seed))["throughput_tok_s"] for seed in H20_VIEW.seeds]
    assert np.mean(found) == pytest.approx(sglang.published(1), rel=0.005)


def test_a_step_s_parts_are_those_of_the_runs():
    """Steps of one request in the middle of its answer, by hand and in a run."""
    cell = sglang.cell_of(H20_VIEW, 1)
    experiment = prepare(cell)
    steps = experiment.deployment.run(experiment.workload).tables["steps"]
    denoises = [
        s
        for s, rows, blocks in zip(steps["duration_s"], steps["num_rows"], steps["num_denoised"], strict=True)
        if blocks
    ]
    assert np.median(denoises) == pytest.approx(sglang.step_of(H20_VIEW, 1).total_s, rel=0.02)
    assert sglang.step_of(H20_VIEW, 1).bound == "memory"
    assert sglang.step_of(H20_VIEW, 128).bound == "compute"


def sglang_runs(of_one=592.0, **by_concurrency):
    """``by_concurrency`` are throughputs of 32 (``n32``), 64 and 128 requests; of 8 and of long prompts whatever."""
    speeds = {"n1": of_one, "n8": 1900.0, "n72": 2000.0, **by_concurrency}
    return [
        block_run(cell, tok_s=speeds[f"n{cell.knob_values['max_num_seqs']}"]) for cell in sglang.FIGURE.cells(H20_VIEW)
    ]


@pytest.mark.parametrize(("some", "more", "most", "holds"), DATA["a_curve_flattens_while_it_still_rises"])
def test_a_curve_flattens_while_it_still_rises(some, more, most, holds):
    runs = sglang_runs(n32=some, n64=more, n128=most)
    found = by_claim(sglang.FIGURE.findings(runs, H20_VIEW))["block-sglang-flattens"]
    assert found.holds is holds
    assert found.value == pytest.approx(100 * (most / more - 1))
    assert found.readings == (("synchronous", pytest.approx(found.value)),)


@pytest.mark.parametrize(("first", "says", "not_says"), DATA["what_misses_the_first_point_is_not_called_fitted"])
def test_what_misses_the_first_point_is_not_called_fitted(first, says, not_says, tmp_path):
    runs = sglang_runs(of_one=592 * first, n32=2853, n64=3241, n128=3412)
    notes = " ".join(sglang.FIGURE.render(runs, H20_VIEW, tmp_path).notes)
    assert says in notes
    assert not_says not in notes


def test_another_card_is_not_put_beside_the_points():
    view = View(platform=H200_LLADA2_MINI, reading="published")
    with refuses("platform='h200-llada2-mini'"):
        sglang.FIGURE.cells(view)


def test_every_way_decodes_the_same_tokens_on_the_same_card():
    cells = block_diffusion.FIGURE.cells(H200_VIEW)
    assert {cell.platform for cell in cells} == {"h200-sdar-8b", "h200"}
    assert {cell.platform for cell in cells if cell.system == "dllm-serve"} == {"h200"}
    assert {cell.knob_values["gen_length"] for cell in cells} == {256}
    for cell in cells:
        experiment = prepare(cell)
        assert len(experiment.workload.requests) == cell.knob_values["max_num_seqs"]
    of_first = [
        prepare(cell).workload.requests for cell in cells if cell.knob_values["max_num_seqs"] == 8 and not cell.seed
    ]
    assert len({tuple(request.prompt_len for request in requests) for requests in of_first}) == 1
    assert len(of_first) == len(block_diffusion.ways(H200_SDAR_8B)) == 5
    assert len(block_diffusion.ways(H200_LLADA2_MINI)) == 3


def canvas_runs(view, tok_s):
    """``tok_s`` of a cell's knobs."""
    return [block_run(cell, tok_s=tok_s(cell.knob_values)) for cell in canvases.FIGURE.cells(view)]


@pytest.mark.parametrize("card", ["h100", "h200"])
def test_what_one_request_gets_is_held_against_what_is_stated_of_its_card(card, tmp_path):
    view = View(platform=platform(f"{card}-diffusiongemma"), reading="published", num_runs=2)

    def tok_s(knobs):
        is_other, n = "kernels" in knobs, knobs["max_num_seqs"]
        if "autoregressive" in knobs:
            return (150.0 if is_other else 200.0) * n
        return 900.0 + 50 * n + 100 * is_other

    runs = canvas_runs(view, tok_s)
    found = by_claim(canvases.FIGURE.findings(runs, view))
    names = {"block-canvas-46212", "block-canvas-blog-h100", "block-diffusion-gemma-speed"}
    assert set(found) == ({*names, "block-canvas-times-ar"} if card == "h100" else {"block-canvas-blog-h200"})
    for claim in set(found) - {"block-canvas-times-ar"}:
        assert (found[claim].value, found[claim].readings) == (950.0, (("TensorRT-LLM's kernels", 1050.0),))
    if card == "h100":
        assert found["block-canvas-times-ar"].value == pytest.approx(950 / 200)
        assert found["block-canvas-times-ar"].readings[0][1] == pytest.approx(1050 / 150)
    notes = canvases.FIGURE.render(runs, view, tmp_path).notes[0]
    assert (
        "ahead of one token a step up to 4 requests at once: 4.75 times its throughput with one request, 0.32" in notes
    )
