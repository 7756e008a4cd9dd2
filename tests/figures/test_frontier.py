"""The frontier: what is compared differs in its rows alone, speed-ups are of pairs, and cards follow what was measured."""

from dataclasses import replace

import pytest
from support.cells import CPU_TINY, H200
from support.stored_runs import caption_of, changed, runs_of

from paper_figures.common.runs import Runs
from paper_figures.dllm_serve import frontier
from paper_figures.dllm_serve.frontier import (
    BLOCK_DIFFUSION,
    FAST_DLLM,
    FIXED,
    ONE,
    POLICIES,
    SETTINGS,
    THRESHOLD,
    cell_of,
    paces_of,
)
from repro.families.block.settings import resolve
from repro.families.platforms import DllmPart
from repro.paths import COMMITTED
from repro.reports.figures import View
from repro.runs.cell import Cell
from repro.runs.experiment import prepare
from repro.runs.store import StoredRun, read_run

pytestmark = pytest.mark.usefixtures("unsaved")

CPU, CARD = (View(platform=where, reading="policy", num_runs=2) for where in (CPU_TINY, H200))


def speed(cell: Cell) -> float:
    """Twice as fast where rows settle, four times by a threshold; repeats differ by a factor that pairs do not have."""
    knobs = cell.knob_values
    return 100.0 * (1 + cell.seed) * (2 if "settle_after" in knobs else 1) * (4 if "threshold" in knobs else 1)


@pytest.mark.parametrize("view", [CPU, CARD], ids=lambda view: view.platform.name)
def test_policies_are_asked_the_same(view):
    own = {name for policy in POLICIES for name, _ in policy.knobs} | {"replay"}
    asked: dict[str, set[tuple[object, ...]]] = {}
    for setting, pace, policy in frontier.asked(view.platform):
        if policy not in (BLOCK_DIFFUSION, POLICIES[-1]):  # another model, and a preset that has its threshold
            cell = cell_of(view, setting, pace, policy)
            rest = tuple((name, value) for name, value in cell.knobs if name not in own)
            asked.setdefault(f"{setting} {pace}", set()).add((cell.dataset, rest))
    assert {len(each) for each in asked.values()} == {1}
    assert len(asked) == (8 if view is CPU else 11)
    # A card answers no task: in blocks of 8 it is asked the same twice, but for the run that it follows.
    assert len({each for given in asked.values() for each in given}) == (8 if view is CPU else 9)


def test_every_policy_has_every_pace_that_it_knows():
    for policy in POLICIES:
        places = {(setting, pace) for setting, pace, each in frontier.asked(CPU_TINY) if each is policy}
        assert places == {(setting, pace) for setting in SETTINGS for pace in paces_of(policy)}
        on_card = {(setting, pace) for setting, pace, each in frontier.asked(H200) if each is policy}
        assert places == {place for place in on_card if place[0] != FIXED}
        assert (len(on_card) - len(places)) == (3 if policy.is_fixed else 0)


def test_presets_are_the_policies_that_they_are_drawn_on():
    """With the knobs of the preset in place of the policy's own the requests' samplers and engines are equal."""
    marked = [policy for policy in POLICIES if policy.preset is not None]
    assert [policy.preset for policy in marked] == ["exact", "balanced", "fast"]
    for policy in marked:
        pace = next(iter(paces_of(policy)))
        cell = cell_of(CPU, "mini-chain in blocks of 16", pace, policy)
        asked = {name: value for name, value in cell.knobs if name not in dict(policy.knobs)}
        ours, preset = (
            prepare(replace(cell, knobs=tuple({**asked, **own}.items()))).deployment
            for own in (dict(policy.knobs), {"preset": policy.preset})
        )
        assert ours.sampler == preset.sampler
        assert ours.config == preset.config
        assert ours.settings.generation.threshold == (0.9 if policy.preset == "fast" else None)


def test_block_diffusion_is_asked_what_its_embedded_model_knows():
    """The same problems, as many tokens and rows a step at most."""
    settings = {setting for setting, _, policy in frontier.asked(CPU_TINY) if policy is BLOCK_DIFFUSION}
    assert settings == set(SETTINGS) - {"mini-chain in blocks of 16"}
    assert all(policy is not BLOCK_DIFFUSION for _, _, policy in frontier.asked(H200))
    for setting in settings:
        full = cell_of(CPU, setting, ONE, FAST_DLLM)
        for pace in paces_of(BLOCK_DIFFUSION):
            cell = cell_of(CPU, setting, pace, BLOCK_DIFFUSION)
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
    runs = [with_rows(run, 800) for run in runs_of(frontier.FIGURE.cells(CPU), speed)]
    points = frontier.points_of(Runs(runs, CPU))
    for point in points:
        settles = "settle_after" in dict(point.policy.knobs)
        due = (2 if settles else 1) * (4 if point.pace.startswith("threshold") and point.policy.name != "fast" else 1)
        assert point.speedup.mean == pytest.approx(due)
        assert point.speedup.half_width == pytest.approx(0)
        assert point.rows == 800 / runs[0].num_requests
    rendered = frontier.FIGURE.render(runs, CPU, tmp_path)
    assert len(rendered.rows) == len(points) == 106
    text = caption_of(rendered)
    assert "Fast-dLLM's rule at one token a step" in text
    assert "baselines" not in text  # none runs in a reading of the view's
    legend = {each.get_text() for each in drawn[0].legends[0].texts}
    assert {"the front", "a preset"} <= legend


def test_cards_follow_the_committed_runs_whose_accuracy_they_have():
    kept = set((COMMITTED / frontier.RUNS).glob("*.jsonl.gz"))
    for setting, pace, policy in frontier.followed_points():
        rows = frontier.measured()[setting, pace, policy.name]
        file = COMMITTED / frontier.followed(setting, pace, policy)
        kept.remove(file)
        run = read_run(file)
        assert run.cell.system == policy.system
        assert dict(policy.knobs).items() <= run.cell.knob_values.items()
        assert run.summary["accuracy"]["value"] == pytest.approx(float(rows[0]["accuracy"]))
        solved = frontier.solved_on_cpu(setting, pace, policy)
        assert solved is not None
        assert solved.n == 50 * len(rows)
        assert solved.share == pytest.approx(sum(float(row["accuracy"]) for row in rows) / len(rows))
    assert kept == set()


def test_a_card_commits_in_a_block_what_the_measured_run_did():
    setting, policy = "mini-gsm in blocks of 32", FAST_DLLM
    cell = cell_of(CARD, setting, THRESHOLD, policy)
    assert cell.knob_values["replay"] == frontier.followed(setting, THRESHOLD, policy)
    steps = {len(block.committed) for path in prepare(cell).deployment.replayed.paths.values() for block in path}
    run = read_run(COMMITTED / frontier.followed(setting, THRESHOLD, policy))
    assert steps <= {len(committed.split()) for committed in run.table("blocks")["committed"]}
    assert max(steps) < 32
