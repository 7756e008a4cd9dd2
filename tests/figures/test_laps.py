"""LAPS's figures on made-up runs: what is paired with what, what is said of the claims, and that all of it could be otherwise."""

import csv
import math
from collections.abc import Callable

import numpy as np
import pytest
from support.figure_runs import by_claim
from support.prefill import prefill_run, prefill_runs

from paper_figures.common.figure import seed_by_seed
from paper_figures.common.runs import Runs
from paper_figures.common.words import is_above, is_below, said
from paper_figures.laps import (
    boundary,
    cost,
    fig1,
    fig2,
    fig3,
    fig5,
    fig6,
    fig7,
    fig8,
    kappa,
    pools,
    queues,
    reserve,
    table2,
    tuned,
)
from paper_figures.laps.contenders import CAPACITY, CONTENDERS, LMSYS, LONGEST, MEAN, MIDDLE, PAIRED_SEEDS, RPS
from paper_figures.laps.layout import crossing
from repro.reports.figures import PAPERS, View
from repro.reports.paper import load_claims
from repro.runs.cell import Cell
from repro.runs.experiment import prepare
from repro.runs.statistics import mean_interval
from repro.systems.cluster.laps_record import PREFILL
from repro.systems.platforms import platform

pytestmark = pytest.mark.usefixtures("undrawn")

VIEW = View(platform=platform("h200"), reading="published", num_runs=3)
Shape = Callable[[Cell], dict[str, float]]
SPEED = {"laps": 1.2, "reserve": 1.1, "laps-graphs-only": 1.02, "laps-disaggregation-only": 1.1}
LATE = {"laps": 0.3, "reserve": 0.1, "sglang-pd-router": 0.4}


def shape(cell: Cell) -> dict[str, float]:
    """LAPS serves 20 % more, more so with every client; the others less."""
    knobs = cell.knob_values
    noise = 1 + 0.001 * cell.seed
    speed = 1 + (SPEED.get(cell.system, 1.0) - 1) * math.log2(1 + float(knobs.get("clients", 64) or 64)) / 6
    speed *= 1 + float(knobs.get("kappa") or 0) * (cell.system == "laps")
    mixed = knobs.get("decode") == "mixed"
    return {
        "rps": 50 * speed * noise * (0.7 if mixed else 1.0),
        "ttft_s": 0.1 / speed * noise,
        "late": min(1.0, LATE.get(cell.system, 0.5) * (cell.rate or 60) / 100),
        "end_s": 100 / speed,
    }


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
    assert not asked or module.default_num_runs(VIEW.platform) == PAIRED_SEEDS
    assert "H200" in module.place(VIEW.platform)
    assert "LLaDA" not in module.place(VIEW.platform)


def test_figures_share_runs():
    keys = {
        name: {cell.key for cell in module.FIGURE.cells(VIEW)}
        for name, module in (("6", fig6), ("7", fig7), ("1", fig1))
    }
    assert {cell.key for cell in fig3.FIGURE.cells(VIEW)} == keys["1"]
    assert keys["6"] & {cell.key for cell in kappa.FIGURE.cells(VIEW)}
    assert keys["7"] & {cell.key for cell in reserve.FIGURE.cells(VIEW)}


def test_a_load_of_one_is_what_sglang_serves():
    """At ten times fewer turns than the constants came from, within 5 %."""
    cell = CONTENDERS["sglang"].cell(VIEW, LMSYS, {"model": MIDDLE, "clients": 256, "num_prompts": 3000})
    experiment = prepare(cell)
    assert PREFILL.summarize(experiment.run())["rps"] == pytest.approx(CAPACITY[MIDDLE], rel=0.05)


def test_figure_6_takes_its_gains_over_sglang(tmp_path):
    runs = prefill_runs(fig6.FIGURE.cells(VIEW), shape)
    rendered = fig6.FIGURE.render(runs, VIEW, tmp_path)
    with rendered.files[-1].open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == len(runs)
    assert {"ttft_mean_ms_1000+", "violations_percent_1-63"} <= rows[0].keys(), "every mean beside its lengths"
    found = by_claim(fig6.FIGURE.findings(runs, VIEW))
    most = 100 * 0.2 * math.log2(65) / 6
    assert found["laps-rps-single"].value == pytest.approx(most)
    assert found["laps-avg-latency"].value == pytest.approx(100 * (1 - 1 / (1 + most / 100)))
    assert found["laps-consistent-best"].value == 1.0
    assert found["laps-gain-grows"].holds is True
    assert 0 < found["laps-graph-only-weak"].value < most / 10
    assert found["laps-abs-rps"].value == pytest.approx(most)


def test_figure_6_notices_who_is_ahead_of_laps():
    def other(cell: Cell) -> dict[str, float]:
        return shape(cell) | ({"rps": 500.0} if cell.system == "laps-graphs-only" else {})

    found = by_claim(fig6.FIGURE.findings(prefill_runs(fig6.FIGURE.cells(VIEW), other), VIEW))
    assert found["laps-consistent-best"].value == pytest.approx(1 + 1 / 3)
    assert "turns/s in 0 of" in found["laps-consistent-best"].how


def test_figure_7_reports_points_and_percent(tmp_path):
    runs = prefill_runs(fig7.FIGURE.cells(VIEW), shape)
    assert len(fig7.FIGURE.render(runs, VIEW, tmp_path).rows) == sum(
        len(fig7.CLIENTS[count]) + len(fig7.LOADS[count]) for count in (1, 8)
    )
    found = by_claim(fig7.FIGURE.findings(runs, VIEW))
    late = 0.2 * fig7.PAPER_LOAD * CAPACITY[MIDDLE]
    assert found["laps-slo-single-dp"].value == pytest.approx(late, rel=1e-3)
    assert found["laps-controller-single-step"].value == 1.0
    assert fig7.controller_moves()[1] >= 5.0
    assert "points (-40.0" in found["laps-slo-single-dp"].how
    assert found["laps-slo-threshold"].value == 0.4
    assert found["laps-slo-8-router"].value == pytest.approx(100.0)


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


@pytest.mark.parametrize(
    ("odd", "ttft_s", "up", "more"),
    [
        # In one mixture short prompts wait no longer than alone, or less long; long ones even less so.
        ((1, 64), 0.082, 8, 9),
        ((16, 4), 0.05, 8, 9),
        # Alone the short ones of 64 clients wait longer than one long one: relatively that one suffers more from company.
        ((0, 64), 0.15, 9, 8),
        # Nothing is odd.
        ((0, 64), 0.082, 9, 9),
    ],
)
def test_figure_3_holds_where_every_mixture_agrees(odd, ttft_s, up, more):
    def slower(cell: Cell) -> dict[str, float]:
        longs, shorts = (int(cell.knob_values[f"{kind}_clients"] or 0) for kind in ("long", "short"))
        taken = ttft_s if (longs, shorts) == odd else 0.05 * (1 + longs) * (1 + shorts / 100)
        return {"ttft_s": taken * (1 + 0.001 * cell.seed)}

    found = by_claim(fig3.FIGURE.findings(prefill_runs(fig3.FIGURE.cells(VIEW), slower), VIEW))
    rises, convoy = found["laps-fig3-interference"], found["laps-convoy"]
    assert f"in {up} of 9 mixtures" in rises.how
    assert f"than for long ones in {more};" in rises.how
    assert (rises.holds, convoy.holds, convoy.value) == (up == more == 9, more == 9, more)


def test_figure_3_says_how_many_times_as_long_short_prompts_wait():
    def slower(cell: Cell) -> dict[str, float]:
        return {"ttft_s": 0.05 * (1 + 50 * int(cell.knob_values["long_clients"] or 0)) * (1 + 0.001 * cell.seed)}

    rises = by_claim(fig3.FIGURE.findings(prefill_runs(fig3.FIGURE.cells(VIEW), slower), VIEW))[
        "laps-fig3-interference"
    ]
    assert rises.how.startswith("51.0 to 801 times as long;")


def test_figure_5_asks_for_a_gain_in_most_settings():
    def waited(cell: Cell) -> dict[str, float]:
        return {"rps": 100 + 1000 * float(cell.knob_values["max_window_s"] or 0) + 0.01 * cell.seed}

    found = by_claim(fig5.FIGURE.findings(prefill_runs(fig5.FIGURE.cells(VIEW), waited), VIEW))["laps-fig5-window"]
    assert (found.holds, found.value) == (True, pytest.approx(50.0, rel=1e-3))
    flat = prefill_runs(fig5.FIGURE.cells(VIEW), lambda cell: {"rps": 100 + 0.01 * cell.seed})
    assert by_claim(fig5.FIGURE.findings(flat, VIEW))["laps-fig5-window"].holds is False


def test_the_kappa_that_is_needed_lies_between_two_that_were_run():
    def gained(cell: Cell) -> dict[str, float]:
        penalty = float(cell.knob_values.get("kappa", 0) or 0)
        return {"rps": 100 * (1 + penalty) if cell.system == "laps" else 100.0}

    runs = prefill_runs(kappa.FIGURE.cells(VIEW), gained)
    made = Runs(runs, VIEW)
    assert [kappa.needed(made, place) for place in kappa.PLACES] == pytest.approx([0.195, 0.195, 0.325, 0.325])
    none = Runs(prefill_runs(kappa.FIGURE.cells(VIEW), lambda cell: {}), VIEW)
    assert kappa.needed(none, kappa.PLACES[0]) is None
    assert "above 0.6" in kappa.conclusion(none)


def test_reserve_names_the_cells_in_which_it_is_not_ahead():
    def equal_once(cell: Cell) -> dict[str, float]:
        late = 0.1 + 0.001 * cell.seed if cell.system == "reserve" else 0.2 + 0.001 * cell.seed
        is_there = cell.rate == pytest.approx(CAPACITY[MIDDLE] * 0.5) and cell.system == "laps"
        return {"late": 0.1 + 0.001 * cell.seed if is_there else late}

    runs = Runs(prefill_runs(reserve.FIGURE.cells(VIEW), equal_once), VIEW)
    text = reserve.in_how_many(runs, reserve.PUBLISHED)
    assert text.startswith("Reserve violates fewer objectives than SGLang PD and vLLM PD and LAPS, outside noise,")
    assert "in 20 of 21 cells; within noise of one of them in Qwen2.5-14B at 0.5; more in none." in text


def test_queues_name_the_loads_at_which_on_time_is_behind():
    def shape(cell: Cell) -> dict[str, float]:
        own = cell.knob_values
        late = {"on-time": 0.02, "srpt": 0.01 if (cell.rate or 0) > CAPACITY[MIDDLE] else 0.03}.get(cell.system, 0.5)
        if "share" in own:
            late = 0.9 * float(own["share"] or 0)
        wait_s = {"on-time": 1.5}.get(cell.system, 0.75)
        return {"late": late + 0.001 * cell.seed, "ttft_s": wait_s}

    runs = Runs(prefill_runs(queues.FIGURE.cells(VIEW), shape), VIEW)
    assert queues.standing(runs).startswith(
        "Loads at which On-time has more late turns, outside noise, than SGLang PD none; LAPS none; SRPT 1.05; Reserve none."
    )
    front = queues.panel(runs, LONGEST, 0.8).layers[0]
    assert [round(each.mean or 0) for each in front.at] == [0, 11, 2, 45, 90]


def test_a_knee_is_between_the_loads_around_it():
    assert crossing((0.5, 0.7, 0.9), (1.0, 5.0, 15.0)) == pytest.approx(0.8)
    assert crossing((0.5, 0.7, 0.9), (1.0, 5.0, 9.9)) is None
    assert crossing((0.5, 0.7), (12.0, 50.0)) == 0.5
    # Before it falls again.
    assert crossing((0.5, 0.7, 0.9), (0.0, 20.0, 2.0)) == pytest.approx(0.6)


def test_knees_and_prices_are_those_of_each_form(tmp_path):
    """A tuned system is late half as often; each form's knee is read off its own runs."""

    def halved(cell: Cell) -> dict[str, float]:
        share = (cell.rate or 0.0) / CAPACITY[cell.knob_values["model"]] / cell.knob_values["num_instances"]
        return {"late": share**2 * (0.1 if cell.knob_values.get("tune") else 0.2) * (1 + 1e-4 * cell.seed)}

    runs = Runs(prefill_runs(tuned.FIGURE.cells(VIEW), halved), VIEW)
    text = tuned.knees(runs, tuned.PLACES[0])
    assert "SGLang PD 0.71 ± 0.00 -> 1.00 ± 0.00;" in text, text
    assert tuned.near(runs, tuned.PLACES[0]).startswith(
        "Qwen2.5-7B, 1 instance at a load of 0.9, late, not tuned -> tuned: SGLang PD 16.2 ± 0.0 -> 8.1 ± 0.0 % (longest 1.0 -> 1.0 s);"
    )


def test_the_price_of_an_order_by_length_is_told():
    text = reserve.price(Runs(prefill_runs(reserve.FIGURE.cells(VIEW), shape), VIEW))
    assert "paid by prompts above 1,000 tokens" in text
    assert text.count("% late, P90") == text.count("longest TTFT") == 3


def test_pools_report_the_runs_in_which_the_controller_moved():
    def moved(cell: Cell) -> dict[str, float]:
        is_mended = cell.knob_values.get("controller") == "mended"
        return {"late": 0.2 if is_mended and cell.seed else 0.1}

    runs = prefill_runs(pools.FIGURE.cells(VIEW), moved)
    for run in runs:
        run.summary["moves_per_minute"] = float(run.cell.seed > 0)
    assert "at 0.9 in 2 of 3 runs, worse in 2: 20.0 % late against 10.0 %" in pools.where_it_moved(Runs(runs, VIEW))


def test_other_figures_answer_their_claims(tmp_path):
    found = by_claim(fig8.FIGURE.findings(prefill_runs(fig8.FIGURE.cells(VIEW), shape), VIEW))
    assert (found["laps-fig8-mix"].holds, found["laps-fig8-mix"].value) == (True, pytest.approx(-30.0))
    runs = prefill_runs(table2.FIGURE.cells(VIEW), shape)
    saved = by_claim(table2.FIGURE.findings(runs, VIEW))["laps-distill"].value
    assert saved == pytest.approx(100 * (1 - 1 / (1 + 0.2 * math.log2(513) / 6)))
    assert len(table2.FIGURE.render(runs, VIEW, tmp_path).rows) == 3
    computed = by_claim(cost.FIGURE.findings([], VIEW))
    assert computed["laps-grid-memory"].value == pytest.approx((9.576, 10.08, 11.634))
    assert computed["laps-bucket-grid"].value == 42


def test_figure_2_meets_the_printed_shares_by_construction(tmp_path):
    assert len(fig2.FIGURE.render([], VIEW, tmp_path).rows) == 2
    found = by_claim(fig2.FIGURE.findings([], VIEW))
    assert found["laps-first-turn-short"].value == pytest.approx(63, abs=0.02)
    assert found["laps-later-turn-short"].value == pytest.approx(81, abs=0.02)


def test_boundaries():
    found = boundary.boundaries(MIDDLE, "h200")
    assert found.printed == 0.0
    assert 10 < found.printed_limit < 50
    assert 150 < found.floor < 512
    assert found.floor_far < found.floor


def test_findings_answer_claims_of_laps():
    known = {claim.id for claim in load_claims("laps")}
    for module in (fig1, fig3, fig5, fig6, fig7, fig8, table2, cost):
        found = by_claim(module.FIGURE.findings(prefill_runs(module.FIGURE.cells(VIEW), shape), VIEW))
        assert found.keys() <= known
        assert not any(math.isnan(value) for each in found.values() for value in np.atleast_1d(each.value))
