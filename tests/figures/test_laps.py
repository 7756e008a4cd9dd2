"""LAPS's figures on made-up runs: what is paired with what, what is said of the claims, and that all of it could be otherwise."""

import pytest
from support.figure_runs import by_claim
from support.prefill import prefill_run, prefill_runs
from support.tables import data_beside

from paper_figures.common.figure import seed_by_seed
from paper_figures.common.runs import Runs
from paper_figures.common.words import is_above, is_below, said
from paper_figures.laps import fig1, fig3, orders, pools
from paper_figures.laps.contenders import CAPACITY, CONTENDERS, LMSYS, MIDDLE, PAIRED_SEEDS
from paper_figures.laps.layout import crossing
from paper_figures.laps.measures import MEAN, RPS
from repro.families.cluster.laps_record import PREFILL
from repro.families.platforms import platform
from repro.reports.figures import PAPERS, View
from repro.runs.cell import Cell
from repro.runs.experiment import prepare
from repro.runs.statistics import mean_interval

DATA = data_beside(__file__, "laps")

pytestmark = pytest.mark.usefixtures("undrawn")

SEEDS = {"laps/sensitivity": 5}
"""Where they are fewer than elsewhere."""

VIEW = View(platform=platform("h200"), reading="published", num_runs=3)


def test_ratios_and_differences_are_paired_by_seed():
    ours, theirs = (
        seed_by_seed([CONTENDERS[name].cell(VIEW, LMSYS, {"model": MIDDLE})], VIEW) for name in ("laps", "sglang")
    )
    base = [10.0, 20.0, 40.0]
    runs = [prefill_run(cell, rps=value) for cell, value in zip(theirs, base, strict=True)]
    runs += [prefill_run(cell, rps=1.5 * value) for cell, value in zip(ours, base, strict=True)]
    pairs = Runs(runs, VIEW)
    ratio, points = pairs.versus(ours[0], theirs[0], RPS), pairs.versus(ours[0], theirs[0], RPS, "points")
    assert (ratio.mean, ratio.half_width) == (pytest.approx(50.0), pytest.approx(0.0, abs=1e-9))
    assert points == mean_interval([5.0, 10.0, 20.0])
    assert is_above(ratio)
    assert not is_below(points)
    assert not is_above(points), "within noise"


def test_invalid_runs_are_left_out_on_both_sides():
    cells = seed_by_seed([CONTENDERS["laps"].cell(VIEW, LMSYS, {})], VIEW)
    runs = [prefill_run(cell, ttft_s=0.1 * (1 + cell.seed), valid=cell.seed != 1) for cell in cells]
    found = Runs(runs, VIEW).at(cells[0], MEAN)
    assert (found.n, found.mean) == (2, pytest.approx(200.0))
    assert said(Runs([], VIEW).at(cells[0], MEAN)) == "-"


@pytest.mark.parametrize("entry", PAPERS["laps"].entries, ids=lambda entry: entry.name)
def test_every_kind_of_cell_can_be_prepared_and_each_is_asked_once(entry):
    module = entry.load()
    asked = module.cells(VIEW)
    assert len(asked) == len({cell.key for cell in asked})
    seen: dict[tuple[object, ...], Cell] = {}
    for cell in asked:
        seen.setdefault((cell.system, *(name for name, _ in cell.knobs), cell.rate is None), cell)
    for cell in seen.values():
        assert prepare(cell).family is PREFILL
    assert not asked or module.default_num_runs(VIEW.platform) == SEEDS.get(entry.name, PAIRED_SEEDS)
    assert "H200" in module.place(VIEW.platform)
    assert "LLaDA" not in module.place(VIEW.platform)


def test_a_load_of_one_is_what_sglang_serves():
    """At ten times fewer turns than the constants came from, within 5 %."""
    cell = CONTENDERS["sglang"].cell(VIEW, LMSYS, {"model": MIDDLE, "clients": 256, "num_prompts": 3000})
    experiment = prepare(cell)
    assert PREFILL.summarize(experiment.run())["rps"] == pytest.approx(CAPACITY[MIDDLE], rel=0.05)


def test_figures_1_and_3_are_of_opposite_classes():
    def slower(cell: Cell) -> dict[str, float]:
        knobs = cell.knob_values
        longs, shorts = int(knobs["long_clients"] or 0), int(knobs["short_clients"] or 0)
        return {"ttft_s": 0.05 * (1 + longs) * (1 + shorts / 100) * (1 + 0.001 * cell.seed)}

    runs = prefill_runs(fig1.FIGURE.cells(VIEW), slower)
    assert by_claim(fig1.FIGURE.findings(runs, VIEW))["laps-fig1-interference"].holds is True
    found = by_claim(fig3.FIGURE.findings(runs, VIEW))
    assert found["laps-fig3-interference"].holds is True
    assert found["laps-convoy"].value == 9
    flat = prefill_runs(fig1.FIGURE.cells(VIEW), lambda cell: {"ttft_s": 0.1 + 0.001 * cell.seed})
    assert by_claim(fig1.FIGURE.findings(flat, VIEW))["laps-fig1-interference"].holds is False


@pytest.mark.parametrize(("odd", "ttft_s", "up", "more"), DATA["figure_3"])
def test_figure_3_holds_where_every_mixture_agrees(odd, ttft_s, up, more):
    def slower(cell: Cell) -> dict[str, float]:
        longs, shorts = (int(cell.knob_values[f"{kind}_clients"] or 0) for kind in ("long", "short"))
        taken = ttft_s if [longs, shorts] == odd else 0.05 * (1 + longs) * (1 + shorts / 100)
        return {"ttft_s": taken * (1 + 0.001 * cell.seed)}

    found = by_claim(fig3.FIGURE.findings(prefill_runs(fig3.FIGURE.cells(VIEW), slower), VIEW))
    rises, convoy = found["laps-fig3-interference"], found["laps-convoy"]
    assert f"in {up} of 9 mixtures" in rises.how
    assert f"than for long ones in {more};" in rises.how
    assert (rises.holds, convoy.holds, convoy.value) == (up == more == 9, more == 9, more)


def test_a_knee_is_between_the_loads_around_it():
    assert crossing((0.5, 0.7, 0.9), (1.0, 5.0, 15.0)) == pytest.approx(0.8)
    assert crossing((0.5, 0.7, 0.9), (1.0, 5.0, 9.9)) is None
    assert crossing((0.5, 0.7), (12.0, 50.0)) == 0.5
    # Before it falls again.
    assert crossing((0.5, 0.7, 0.9), (0.0, 20.0, 2.0)) == pytest.approx(0.6)


@pytest.mark.parametrize(
    ("ours", "ahead", "behind", "far"), [(0.02, 10, 0, 0), (0.052, 0, 10, 0), (0.06, 0, 10, 10), (None, 0, 0, 10)]
)
def test_the_standing_is_against_the_rival_with_the_fewest_late_turns(ours, ahead, behind, far):
    """SRPT has 5 %, others more; None has 6 % in the mean, whose repeats differ widely."""

    def late(cell: Cell) -> dict[str, float]:
        own = 0.02 + 0.04 * cell.seed if ours is None else ours
        return {"late": {"on-time": own, "srpt": 0.05}.get(cell.system, 0.2)}

    found = Runs(prefill_runs(orders.FIGURE.cells(VIEW), late), VIEW)
    assert orders.best_of(found, ("sglang", "srpt"), 0.9) == "srpt"
    for is_tuned in (True, False):
        standing = orders.standing(found, ("sglang", "srpt"), is_tuned=is_tuned)
        assert tuple(map(len, standing)) == (ahead, behind, far)


def test_pools_report_the_runs_in_which_the_controller_moved():
    def moved(cell: Cell) -> dict[str, float]:
        is_mended = cell.knob_values.get("controller") == "mended"
        return {"late": 0.2 if is_mended and cell.seed else 0.1}

    runs = prefill_runs(pools.FIGURE.cells(VIEW), moved)
    for run in runs:
        run.summary["moves_per_minute"] = float(run.cell.seed > 0)
    assert "at 0.9 in 2 of 3 runs, worse in 2: 20.0 % late against 10.0 %" in pools.where_it_moved(Runs(runs, VIEW))
