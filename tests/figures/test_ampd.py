"""AMPD's figures on made-up runs: what is paired with what, how intervals come about, what is said of the claims."""

import math

import numpy as np
import pytest
from support.figure_runs import by_claim
from support.perturbed_runs import unmoved
from support.session_runs import planner_run, session_run, session_runs

from paper_figures.ampd import fig4, fig6, fig7, knee, table2
from paper_figures.ampd.attainment import Attainments, gains, tabulate
from paper_figures.ampd.contenders import CONTENDERS, FIGURE4, PAIRED_SEEDS, RATES, grid, panel_of, panels
from paper_figures.common.runs import Runs
from paper_figures.common.words import said
from repro.families.cluster.ampd import PLANNER_SYSTEM
from repro.families.platforms import platform
from repro.reports.figures import View
from repro.runs.cell import Cell
from repro.runs.experiment import prepare
from repro.runs.statistics import Interval, student_t_two_sided
from repro.runs.store import StoredRun

pytestmark = pytest.mark.usefixtures("undrawn")

VIEW = View(platform=platform("h20x32"), reading="published", num_runs=3)
SHARES = {"ampd": 0.6, "dynamo-sim": 0.5, "vllm-sim": 0.3, "continuum-sim": 0.3}


def share(cell: Cell) -> float:
    knobs = cell.knob_values
    own = SHARES[cell.system] - 0.05 * (cell.rate or 0) + 0.01 * cell.seed
    own += 0.1 * ("route_order" in knobs) + 0.05 * ("window" in knobs) + 0.02 * (knobs["deployment"] == "search")
    return own - 0.1 * (knobs.get("adaptive_routing") is False) - 0.05 * (knobs.get("prefill_reordering") is False)


def table(values: dict[str, list[float]]) -> Attainments:
    arrays = {name: np.array(each, dtype=float).reshape(1, 1, -1) for name, each in values.items()}
    return Attainments(panels=(panels()[0],), rates=(0.8,), values=arrays)


# ---- panels -------------------------------------------------------------------------------------------


def test_every_cell_can_be_prepared_and_each_question_is_asked_once():
    asked = fig4.FIGURE.cells(VIEW)
    assert len(asked) == len(set(asked)) == 12 * len(RATES) * len(FIGURE4) * 3
    for cell in asked[: len(FIGURE4) * len(RATES) * 12]:
        if cell.rate == 0.8 and cell.system in ("ampd", "vllm-sim"):
            prepare(cell)
    assert fig4.FIGURE.default_num_runs(VIEW.platform) == fig4.FIGURE.num_runs == PAIRED_SEEDS


# ---- intervals ----------------------------------------------------------------------------------------


def test_the_jackknife_of_a_mean_is_students_interval():
    values = [0.2, 0.4, 0.3, 0.7]
    found = table({"ampd": values}).at("ampd", 0, 0)
    assert found.mean == pytest.approx(40.0)
    assert found.half_width == pytest.approx(student_t_two_sided(0.95, 3) * 100 * np.std(values, ddof=1) / 2)


def test_differences_are_paired():
    paired = table({"ampd": [0.2, 0.4, 0.6], "dynamo": [0.1, 0.3, 0.5]})
    difference = paired.at("ampd", 0, 0, less="dynamo")
    assert difference.mean == pytest.approx(10.0)
    assert difference.half_width == pytest.approx(0.0, abs=1e-9)
    assert (paired.at("ampd", 0, 0).half_width or 0) > 10


def test_an_attainment_of_nothing_counts_as_half_a_session():
    zero = table({"ampd": [0.5, 0.5], "dynamo": [0.0, 0.0]})
    assert gains(zero.means, "ampd", "dynamo", 0.5 / 99)[0, 0] == pytest.approx(0.5 * 99 / 0.5)
    assert said(zero.at("dynamo", 0, 0), "%") == "0.0 ± 0.0 %"
    assert {zero.at("dynamo", 0, 0).confidence, table({"ampd": [0.5]}).at("ampd", 0, 0).confidence} == {0.95}


def test_invalid_runs_and_other_seeds_do_not_count():
    own = panel_of("Llama-3.1-70B", "dureader")
    cells = grid(VIEW, ("ampd",), [own], (2.0,))
    runs = [session_run(cells[0], 0.9, valid=False), session_run(cells[1], 0.5), session_run(cells[2], 0.3)]
    found = tabulate(Runs(runs, VIEW), ("ampd",), [own], (2.0,))
    assert np.isnan(found.values["ampd"][0, 0, 0])
    assert found.means["ampd"][0, 0] == pytest.approx(0.4)


# ---- figures ------------------------------------------------------------------------------------------


def test_printed_attainments_are_of_one_cell_and_asked_of_no_other():
    there = panel_of(fig4.DETAIL_MODEL, "dureader")
    other = next(each for each in panels() if each != there)
    values = table({name: [0.25 if name.endswith("-tuned") else 0.5] for name in FIGURE4}).values
    for panel, rate, count in ((there, fig4.DETAIL_RATE, 1), (there, 0.8, 0), (other, fig4.DETAIL_RATE, 0)):
        found = fig4.absolute(Runs([], VIEW), Attainments(panels=(panel,), rates=(rate,), values=values))
        assert len(found) == count
        # All on one plan: none is tuned that stands beside one that is not.
        assert [each.values for each in found] == count * [(50.0, 50.0, 50.0)]


def test_cells_in_which_all_are_at_the_ceiling_do_not_count():
    """Ahead of one and not of the other is not ahead; behind two of them in one cell is once."""
    panel = panels()[0]

    def standing(**shares: float) -> tuple[int, int, int]:
        values = {name.replace("_", "-"): np.full((1, 1, 3), share) for name, share in shares.items()}
        found = fig4.standing(Attainments(panels=(panel,), rates=(0.8,), values=values), "ampd", ("dynamo", "vllm"))
        return found.contested, found.ahead, found.behind

    assert standing(ampd=0.98, dynamo=0.97, vllm=0.975) == (0, 0, 0)
    assert standing(ampd=0.98, dynamo=0.97, vllm=0.969) == (1, 1, 0)
    assert standing(ampd=0.98, dynamo=0.99, vllm=0.5) == (1, 0, 1)
    assert standing(ampd=0.98, dynamo=0.98, vllm=0.5) == (1, 0, 0)
    assert standing(ampd=0.5, dynamo=0.98, vllm=0.6) == (1, 0, 1)


@pytest.mark.parametrize(("best", "expected"), [(0.9, 0.9), (0.75, -0.75), (1.0, -1.0)])
def test_figure_6_calls_a_peak_what_stands_above_both_ends(best, expected, tmp_path):
    def peaked(cell: Cell) -> float:
        alpha = float(cell.knob_values.get("alpha", 0.9) or 0)
        return 0.5 + 0.01 * cell.seed - abs(alpha - best)

    runs = session_runs(fig6.FIGURE.cells(VIEW), peaked)
    fig6.FIGURE.render(runs, VIEW, tmp_path)
    found = by_claim(fig6.FIGURE.findings(runs, VIEW))
    assert found["ampd-alpha-peak"].value == expected
    assert found["ampd-beta-peak"].value == -0.75, "flat"
    assert found["ampd-w-insensitive"].value == pytest.approx(0.0)
    assert {"ampd-f6-alpha-1", "ampd-f6-w-5", "ampd-f6-beta-0.75"} <= found.keys()

    def level_with_an_end(cell: Cell) -> float:
        return 0.6 if cell.knob_values.get("alpha", 0.9) in (0.9, 1.0) else 0.5

    level = by_claim(fig6.FIGURE.findings(session_runs(fig6.FIGURE.cells(VIEW), level_with_an_end), VIEW))
    assert level["ampd-alpha-peak"].value < 0, "what is as high as an end is no peak"

    def noisy(cell: Cell) -> float:
        return 0.5 + (0.01 + 0.2 * (cell.seed - 1)) * (cell.knob_values.get("alpha", 0.9) == 0.9)

    unsure = by_claim(fig6.FIGURE.findings(session_runs(fig6.FIGURE.cells(VIEW), noisy), VIEW))
    assert unsure["ampd-alpha-peak"].value < 0, "nor what is above them within noise"


def test_figure_6_calls_apart_what_differs_by_more_than_its_interval():
    def interval(mean: float | None, half_width: float | None) -> Interval:
        return Interval(mean=mean, half_width=half_width, n=3, confidence=0.95)

    for mean, half_width, is_apart in (
        (0.5, 0.4, True),
        (-0.5, 0.4, True),
        (0.5, 0.6, False),
        (-0.5, 0.6, False),
        (0.5, None, True),
        (0.0, None, False),
        (0.0, 0.0, False),
        (None, None, False),
    ):
        assert fig6.is_apart(interval(mean, half_width)) is is_apart


@pytest.mark.parametrize(
    ("shares", "rate"),
    [
        ([1.0, 0.95, 0.85, 0.5], 2 * 2**0.5),
        ([1.0, 1.0, 0.9, 0.5], 4.0),
        ([0.95, 0.85, 0.99, 0.99], 2**0.5),
        ([0.89, 0.8, 0.5, 0.1], 1.0),
        ([1.0, 1.0, 1.0, 0.95], 8.0),
        ([math.nan, 1.0, 1.0, 1.0], 1.0),
    ],
)
def test_attainment_falls_between_two_rates_by_their_logarithms(shares, rate):
    """The first time; beyond the rates that were run it is at their end."""
    assert knee.crossing((1.0, 2.0, 4.0, 8.0), shares) == pytest.approx(rate)


def test_rates_of_the_knee_are_multiples_of_what_the_prefill_workers_of_the_plan_keep_up_with():
    cells = knee.FIGURE.cells(VIEW)
    rates = 12 * len(knee.MULTIPLES) + len(knee.STEEP) * len(knee.BEYOND)
    assert len(cells) == len(set(cells)) == rates * len(knee.SHOWN) * 3
    panel = panel_of("Llama-3.1-70B", "gaia")
    rate = knee.keeps_up(VIEW, panel)
    own = [cell for cell in cells if (cell.dataset, cell.knob_values["model"]) == ("gaia", panel.model)]
    assert sorted({cell.rate for cell in own}) == [
        float(f"{each * rate:.2g}") for each in (*knee.MULTIPLES, *knee.BEYOND)
    ]
    usual = {cell.rate for cell in cells if (cell.dataset, cell.knob_values["model"]) == ("toolbench", panel.model)}
    assert len(usual) == len(knee.MULTIPLES), "not a steep panel"
    tuned = [cell for cell in own if cell.knob_values["deployment"] == "search"]
    told = {float(f"{each * rate:.2g}") for each in knee.TUNED_FOR}
    assert {cell.knob_values["planning_rate"] for cell in tuned} == told
    assert all(cell.rate <= cell.knob_values["planning_rate"] for cell in tuned)
    # At that rate prefills ask for all the time of the workers: as the run of a cell counts it.
    load = prepare(knee.cell_of(VIEW, "dynamo", panel, 1.0)).run().facts["prefill_load"]
    assert load == pytest.approx(1.0, rel=0.3)


def table_2_runs(first: str) -> list[StoredRun]:
    """The planner ranks ``first`` first, then the largest even split."""

    def planned(cell: Cell) -> StoredRun:
        even = table2.even(panel_of(str(cell.knob_values["model"]), cell.dataset), VIEW)
        return planner_run(cell, plans=(first, str(even)))

    return [
        planned(cell) if cell.system == PLANNER_SYSTEM else session_run(cell, share(cell))
        for cell in table2.FIGURE.cells(VIEW)
    ]


def test_the_planner_ranks_by_its_own_numbers_so_that_what_it_says_can_be_otherwise():
    runs = table_2_runs("P:TP1x1 D:TP1x1")
    still = unmoved(lambda changed: table2.FIGURE.findings(changed, VIEW), runs)
    assert "ampd-gpus" in still
    assert "ampd-plan-match" not in still


def test_figure_7_holds_where_time_grows_about_as_the_gpus_do():
    for exponent, holds in ((-0.5, False), (0.0, False), (0.85, True), (1.3, True), (1.5, False)):
        grown = [
            planner_run(cell, seconds=(float(cell.knob_values["num_gpus"] or 0) / 8) ** exponent)
            for cell in fig7.FIGURE.cells(VIEW)
        ]
        assert by_claim(fig7.FIGURE.findings(grown, VIEW))["ampd-plan-growth"].holds is holds, exponent


def test_figure_7_has_a_line_a_method_and_no_interval_below_zero():
    cells = fig7.FIGURE.cells(VIEW)
    runs = [planner_run(cell, seconds=(0.08, 0.30, 0.36)[cell.seed]) for cell in cells]
    for run in runs:
        run.record.manifest["facts"]["method"] = (
            "closed" if int(run.cell.knob_values["num_gpus"] or 0) > 64 else "direct"
        )
    one, two = fig7.lines(Runs(runs, VIEW))
    assert (one.label, list(one.places)) == ("ours, measured: direct simulation", [8, 16, 32, 64])
    assert (two.label, list(two.places)) == ("ours, measured: closed forms", [128, 256])
    assert all(0 < (at.low or 0.0) < (at.mean or 0.0) < (at.high or 0.0) for at in (*one.at, *two.at))


def test_all_titles_are_told_apart():
    titles = [each.title for each in CONTENDERS.values()]
    assert len(titles) == len(set(titles))


def test_a_knee_beyond_the_rates_is_said_to_lie_there():
    panel = panel_of("Qwen3-32B", "gaia")
    shares = {"ampd": [0.8, 0.7], "dynamo": [1.0, 0.95], "vllm": [1.0, 0.8]}
    values = {name: np.array([[[share, share] for share in own]]) for name, own in shares.items()}
    found = knee.Knees(table=Attainments(panels=(panel,), rates=(1.0, 4.0), values=values), rates=((1.0, 4.0),))
    assert [found.said(name, 0) for name in shares] == ["< 1", "> 4", "2 [2, 2]"]
    assert math.exp(found.ratio("vllm", "dynamo", [0]).mean) == pytest.approx(2 / 4)
