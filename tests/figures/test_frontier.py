"""The frontier: what is compared differs in its rows alone, and speed-ups are of pairs."""

import pytest
from support.stored_runs import changed, runs_of, text_of

from paper_figures.common.runs import Runs
from paper_figures.dllm_serve import frontier
from repro.reports.figures import View
from repro.runs.cell import Cell
from repro.runs.store import StoredRun
from repro.systems.block.settings import resolve
from repro.systems.dllm.part import DllmPart
from repro.systems.dllm.platforms import CPU_TINY, H200

pytestmark = pytest.mark.usefixtures("unsaved")

VIEWS = [View(platform=where, reading="policy", num_runs=2) for where in (CPU_TINY, H200)]


def speed(cell: Cell) -> float:
    """Twice as fast where rows settle, four times by a threshold; repeats differ by a factor that pairs do not have."""
    knobs = cell.knob_values
    return 100.0 * (1 + cell.seed) * (2 if "settle_after" in knobs else 1) * (4 if "threshold" in knobs else 1)


@pytest.mark.parametrize("view", VIEWS, ids=lambda view: view.platform.name)
def test_policies_are_asked_the_same(view):
    own = {name for policy in frontier.POLICIES for name, _ in policy.knobs}
    asked: dict[str, set[tuple[object, ...]]] = {}
    for setting in frontier.settings(view.platform):
        for pace in frontier.paces(view.platform):
            for policy in frontier.POLICIES:
                cell = frontier.cell_of(view, setting, pace, policy)
                rest = tuple((name, value) for name, value in cell.knobs if name not in own)
                asked.setdefault(f"{setting} {pace}", set()).add((cell.dataset, rest))
    assert {len(each) for each in asked.values()} == {1}
    assert len(asked) == len({each for given in asked.values() for each in given})


def test_block_diffusion_is_asked_what_its_embedded_model_knows():
    """The same problems, as many tokens and rows a step at most; existing cells are what they were."""
    view = VIEWS[0]
    settings = {setting for setting, _, policy in frontier.asked(CPU_TINY) if policy is frontier.BLOCK_DIFFUSION}
    assert settings == {"mini-gsm in blocks of 32", "mini-code in blocks of 8"}
    assert all(policy is not frontier.BLOCK_DIFFUSION for _, _, policy in frontier.asked(H200))
    for setting in settings:
        full = frontier.cell_of(view, setting, "one token a step", frontier.FAST_DLLM)
        for pace in frontier.paces(CPU_TINY, frontier.BLOCK_DIFFUSION):
            cell = frontier.cell_of(view, setting, pace, frontier.BLOCK_DIFFUSION)
            for name in ("gen_length", "num_prompts", "comparison"):
                assert cell.knob_values[name] == full.knob_values[name]
            assert cell.dataset == full.dataset
            assert (
                resolve(cell.without("comparison")).knobs.max_num_batched_tokens
                == CPU_TINY.part(DllmPart).max_num_batched_tokens
            )
            assert resolve(cell.without("comparison")).block == 16


def with_rows(run: StoredRun, rows: int) -> StoredRun:
    tables = dict(run.record.tables)
    name = "num_rows" if run.cell.system == "block-diffusion" else "query_tokens"
    tables["steps"] = {**tables["steps"], name: [rows] * len(tables["steps"]["step"])}
    return changed(run, record=type(run.record)(tables=tables, manifest=run.record.manifest))


def test_speed_ups_are_of_pairs_and_rows_of_a_request(tmp_path, drawn):
    view = VIEWS[0]
    runs = [with_rows(run, 800) for run in runs_of(frontier.FIGURE.cells(view), speed)]
    points = frontier.points_of(Runs(runs, view))
    for point in points:
        settles = "settle_after" in dict(point.policy.knobs)
        due = (2 if settles else 1) * (4 if point.pace.startswith("threshold") else 1)
        assert point.speedup.mean == pytest.approx(due)
        assert point.speedup.half_width == pytest.approx(0)
        assert point.rows == 800 / runs[0].num_requests
    rendered = frontier.FIGURE.render(runs, view, tmp_path)
    assert len(rendered.rows) == len(points) == 34
    text = text_of(drawn[0])
    assert "Fast-dLLM's rule at one token a step" in text
    assert "baselines" not in text  # none runs in a reading of the view's
