"""Two sides compared: how runs are paired, what the ratio is, and when something has changed."""

import math
from dataclasses import FrozenInstanceError, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.fake_system import NAME, fake_cell
from support.tables import data_beside

from engines.errors import UserError
from repro.api import compare
from repro.runs.cell import Cell
from repro.runs.experiment import prepare
from repro.runs.statistics import Interval, from_logarithms, mean_interval
from repro.runs.store import Store, StoredRun
from repro.runs.sweep import Sweep
from repro.workbench.comparison import Change, _selected

CASES = data_beside(__file__, "cases")

OTHER = "support.fake_system:OTHER"


def made(root: Path, *cells: Cell) -> list[StoredRun]:
    sweep = Sweep([prepare(replace(cell, figure=None)) for cell in cells], Store(root))
    sweep.run(jobs=1)
    return sweep.runs


def repeats(rate: float | None = 0.5, seeds: range = range(5), **knobs: Any) -> list[Cell]:
    return [fake_cell(rate, seed, num_prompts=20, **knobs) for seed in seeds]


def test_a_ratio_is_of_pairs_in_logarithms(tmp_path):
    runs = made(tmp_path, *repeats(), *repeats(service_s=6.0))
    found = compare(f"{NAME}@service_s=default", f"{NAME}@service_s=6.0", result_dir=tmp_path)
    logs = [
        math.log(b.summary["throughput_tok_s"] / a.summary["throughput_tok_s"])
        for a, b in zip(runs[:5], runs[5:], strict=True)
    ]
    (change,) = found.changes
    assert change.ratio == from_logarithms(mean_interval(logs))
    assert change.ratio.mean == pytest.approx(change.b / change.a)
    assert (change.setting, found.overall, change.verdict, found.is_changed) == ((), None, "lower", True)
    with pytest.raises(FrozenInstanceError):
        found.metric = "other"  # type: ignore[misc]
    back = compare(runs[5:], runs[:5], metric="throughput_tok_s")
    assert back.changes[0].verdict == "higher"
    assert back.changes[0].ratio.mean == pytest.approx(1 / change.ratio.mean)


def test_latency_is_a_metric_too(tmp_path):
    runs = made(tmp_path, *repeats(None), *repeats(None, service_s=2.0))
    (change,) = compare(runs[:5], runs[5:], metric="e2el_s.mean").changes
    assert (change.ratio.mean, change.ratio.low, change.verdict) == (pytest.approx(2), pytest.approx(2), "higher")


def test_the_same_code_on_other_seeds_has_not_changed(tmp_path):
    """Arrivals draw the throughput: by a tenth from seed to seed."""
    runs = made(tmp_path, *repeats(seeds=range(20)))
    for first in range(0, 20, 5):
        for second in range(0, 20, 5):
            if first != second:
                found = compare(runs[first : first + 5], runs[second : second + 5])
                assert found.is_in_order
                assert (found.changes[0].ratio.n, found.num_unpaired, found.is_changed) == (5, 0, False)


def test_the_same_runs_made_twice_are_the_same(tmp_path):
    made(tmp_path / "a", *repeats())
    made(tmp_path / "b", *repeats())
    found = compare(tmp_path / "a", tmp_path / "b", tolerance=0)
    assert [(row.verdict, row.ratio.low, row.ratio.high) for row in found.rows] == [("same", 1, 1)]


def test_seeds_that_one_side_alone_has_are_left_out(tmp_path):
    runs = made(tmp_path, *repeats(seeds=range(6)), *repeats(seeds=range(2, 9), service_s=6.0))
    found = compare(runs[:6], runs[6:])
    assert (found.changes[0].ratio.n, found.num_unpaired, found.is_in_order) == (4, 5, False)
    again = compare(runs[2:6], runs[6:10])
    assert again.changes == found.changes


def test_each_setting_is_a_row_and_seeds_repeat_in_the_row_of_all(tmp_path):
    cells = [
        cell
        for rate in (0.4, 0.8)
        for system in (NAME, OTHER)
        for cell in [replace(each, system=system) for each in repeats(rate, service_s=1.0 if system == NAME else 1.2)]
    ]
    made(tmp_path, *cells)
    found = compare(NAME, OTHER, result_dir=tmp_path)
    assert [change.setting for change in found.changes] == [(("rate", 0.4),), (("rate", 0.8),)]
    assert found.overall is not None
    assert (found.overall.setting, found.overall.ratio.n) == ((), 5)
    means = [change.ratio.mean for change in found.changes]
    assert found.overall.ratio.mean == pytest.approx(math.sqrt(math.prod(map(float, filter(None, means)))))
    fewer = compare(f"{NAME}@rate=0.4", OTHER, result_dir=tmp_path)
    assert (fewer.changes[0].ratio, fewer.num_unpaired) == (found.changes[0].ratio, 5)


def test_rows_are_in_the_order_of_values(tmp_path):
    cells = [
        fake_cell(rate, system=system, num_prompts=2, **knobs)
        for system in (NAME, OTHER)
        for rate in (None, 10.0, 9.0)
        for knobs in ({"service_s": 2.0}, {}, {"service_s": 0.5})
    ]
    made(tmp_path, *cells)
    rows = [dict(row.setting) for row in compare(NAME, OTHER, result_dir=tmp_path).changes]
    assert [row["rate"] for row in rows] == [9, 9, 9, 10, 10, 10, None, None, None]
    assert [row["service_s"] for row in rows] == [None, 0.5, 2] * 3


def verdict(low: float, high: float, tolerance: float = 0.02) -> str:
    ratio = Interval(mean=1.0, half_width=0.1, n=5, confidence=0.95, bounds=(low, high))
    return Change(setting=(), a=1, b=1, ratio=ratio, tolerance=tolerance).verdict


def test_a_tolerance_has_to_be_passed_by_the_whole_interval():
    assert verdict(1.021, 1.5) == "higher"
    assert verdict(1.019, 1.5) == "unclear"
    assert verdict(0.5, 0.98) == "lower"
    assert verdict(0.5, 0.981) == "unclear"
    assert verdict(0.981, 1.019) == "same"
    assert verdict(0.979, 1.019) == "unclear"
    assert verdict(1.001, 1.1, 0) == "higher"


@given(st.floats(0.5, 2), st.floats(1, 1.5), st.floats(0, 0.5))
def test_sides_in_the_other_order_have_the_opposite_verdict(low, factor, tolerance):
    opposite = {"higher": "lower", "lower": "higher"}
    high, most = low * factor, 1 + tolerance
    if min(abs(end * side - 1) for end in (low, high) for side in (most, 1 / most)) > 1e-9:
        there, back = verdict(low, high, tolerance), verdict(1 / high, 1 / low, tolerance)
        assert back == opposite.get(there, there)


def test_one_pair_has_no_interval_and_decides_nothing(tmp_path):
    runs = made(tmp_path, *repeats(seeds=range(1)), *repeats(seeds=range(1), service_s=9.0))
    (change,) = compare(runs[:1], runs[1:]).changes
    assert (change.verdict, change.ratio.low) == ("unclear", None)
    assert change.ratio.mean is not None
    assert change.ratio.mean < 0.5


def invalid(run: StoredRun) -> StoredRun:
    return replace(run, manifest={**run.manifest, "validity": {"valid": False, "reasons": ["too few"]}})


def test_what_is_invalid_or_undefined_is_left_out_and_counted(tmp_path):
    runs = made(tmp_path, *repeats(), *repeats(service_s=6.0))
    runs[7].__dict__["summary"] = {**runs[7].summary, "throughput_tok_s": None}
    found = compare(runs[:5], [runs[5], invalid(runs[6]), *runs[7:]])
    assert (found.changes[0].ratio.n, found.num_invalid, found.num_undefined, found.num_unpaired) == (3, 1, 1, 0)
    found = compare(runs[:5], list(map(invalid, runs[5:])))
    assert (found.rows, found.num_invalid, found.is_changed) == ((), 5, False)


def test_measured_values_of_zero_have_no_ratio(tmp_path):
    runs = made(tmp_path, *repeats(None, range(2)), *repeats(None, range(2), service_s=2.0))
    (change,) = compare(runs[:2], runs[2:], metric="num_requests.failed").changes
    assert (change.a, change.b, change.ratio.mean, change.verdict) == (0, 0, None, "unclear")


SELECTED = CASES["selectors"]


@pytest.mark.parametrize(("text", "num"), SELECTED)
def test_a_selector_picks_runs(text, num, tmp_path):
    others = [replace(cell, system=OTHER) for cell in repeats(None)]
    made(tmp_path, *repeats(None), *repeats(None, service_s=2.0), *others)
    assert len(_selected("a", text, tmp_path, {}).runs) == num


def test_a_run_is_picked_by_its_name_and_a_folder_by_its_path(tmp_path, monkeypatch):
    runs = made(tmp_path / "one", *repeats(), *repeats(service_s=6.0))
    names = [runs[0].file.name, runs[5].cell.folder_name]
    assert compare(*names, result_dir=tmp_path / "one").changes[0].ratio.n == 1
    made(tmp_path / "a@b", *repeats())
    monkeypatch.chdir(tmp_path)
    assert compare("a@b", "one@service_s=6.0").changes[0].verdict == "lower"
    assert compare("a@b", "one").num_unpaired == 5


def test_what_both_would_take_is_of_the_one_that_says_more(tmp_path):
    made(tmp_path, *repeats(), *repeats(service_s=6.0))
    narrow = compare(f"{NAME}@service_s=6.0", NAME, result_dir=tmp_path)
    assert narrow.changes[0].verdict == "higher"
    assert compare(NAME, f"{NAME}@service_s=6.0", result_dir=tmp_path).changes[0].verdict == "lower"


REFUSALS = CASES["refused sides"]


@pytest.mark.parametrize(("sides", "says"), REFUSALS)
def test_a_side_that_is_none_is_refused(sides, says, tmp_path):
    made(tmp_path, *repeats(), *repeats(service_s=1.5), *repeats(service_s=1.25), *repeats(None, service_s=1.25))
    with pytest.raises(UserError, match=says):
        compare(*sides, result_dir=tmp_path)


@pytest.mark.parametrize(("given", "says"), CASES["refused arguments"])
def test_what_cannot_be_asked_is_refused(given, says, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    made(tmp_path, *repeats(seeds=range(1)), *repeats(seeds=range(1), service_s=1.5))
    with pytest.raises(UserError, match=says):
        compare(**{"a": NAME, "b": "@service_s=1.5", "result_dir": tmp_path, **given})


def test_runs_that_are_equal_in_nothing_together_are_no_pairs(tmp_path):
    cells = [fake_cell(rate, num_prompts=4, service_s=service) for rate in (0.5, None) for service in (1.25, 1.5)]
    first, second, third, last = made(tmp_path, *cells)
    with pytest.raises(UserError, match=r"have no pair of runs that are equal in system, dataset, .*rate, .*service_s"):
        compare([first, last], [second, third])
