from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines.errors import UserError
from engines.runtime.step_timer import STEP_PARTS
from repro.runs.metrics import (
    METRICS,
    Slo,
    distribution,
    goodput,
    mean_interval,
    min_count,
    request_times,
    student_t_two_sided,
    summarize,
)
from repro.runs.record import REQUEST_COLUMNS, STEP_COLUMNS, RunRecord, empty_table


def requests_table(*rows: tuple[float, float | None, float | None, float | None, int, str]) -> dict[str, list[Any]]:
    """Rows of (arrival, admitted, first block, finished, gen_length, status)."""
    table = empty_table(REQUEST_COLUMNS)
    for i, (arrival, admitted, first, finished, length, status) in enumerate(rows):
        error = "it broke" if status == "failed" else None
        output_len = length if status == "ok" else None
        values = (i, arrival, 0.0, admitted, first, finished, 10, length, output_len, status, error, None, None)
        for column, value in zip(REQUEST_COLUMNS, values, strict=True):
            table[column.name].append(value)
    return table


def steps_table(*rows: dict[str, float]) -> dict[str, list[Any]]:
    table = empty_table(STEP_COLUMNS)
    for i, row in enumerate(rows):
        for column in STEP_COLUMNS:
            unset = None if column.nullable and column.name != "forward_s" else 0
            table[column.name].append(row.get(column.name, i if column.name == "step" else unset))
    return table


GOLDEN = RunRecord(
    requests=requests_table(
        (1.0, 1.0, 2.0, 3.0, 32, "ok"),
        (1.5, 3.0, 4.5, 5.5, 64, "ok"),
        (2.0, 3.0, None, None, 100, "failed"),
        (4.0, 4.0, 6.0, 9.0, 64, "ok"),
        (8.0, None, None, None, 32, "unfinished"),
    ),
    steps=steps_table(
        {
            "start_s": 1,
            "end_s": 3,
            "duration_s": 2.0,
            "forward_s": 1.5,
            "num_refresh": 1,
            "scheduled_tokens": 100,
            "kv_rows_used": 10,
            "kv_rows_total": 40,
            "num_running": 1,
        },
        {
            "start_s": 3,
            "end_s": 6,
            "duration_s": 3.0,
            "forward_s": 3.0,
            "num_refresh": 1,
            "num_reuse": 2,
            "scheduled_tokens": 200,
            "kv_rows_used": 30,
            "kv_rows_total": 40,
            "num_running": 3,
        },
        {
            "start_s": 6,
            "end_s": 9,
            "duration_s": 3.0,
            "forward_s": 1.5,
            "num_reuse": 1,
            "scheduled_tokens": 0,
            "kv_rows_used": 20,
            "kv_rows_total": 40,
            "num_running": 1,
        },
        {"start_s": 9, "end_s": 9, "duration_s": 0.0},
    ),
    manifest={
        "obtained": "simulated",
        "max_num_batched_tokens": 400,
        "slos": {"fast": {"e2el_s": 4.0, "ttfb_s": 2.0}, "all": {"e2el_s": 100.0}},
    },
)


def test_golden_summary() -> None:
    # Window: first arrival 1.0 to last finish 9.0.
    assert summarize(GOLDEN) == {
        "num_requests": {"ok": 3, "failed": 1, "unfinished": 1},
        "window_s": 8.0,
        "throughput_tok_s": (32 + 64 + 64) / 8,
        "request_throughput": 3 / 8,
        # 2, 4, 5
        "e2el_s": {
            "n": 3,
            "mean": pytest.approx(11 / 3),
            "std": pytest.approx((14 / 9) ** 0.5),
            "min": 2.0,
            "max": 5.0,
            "span": 3.0,
            "p50": 4.0,
            "p90": None,
            "p95": None,
            "p99": None,
        },
        # 1, 3, 2
        "ttfb_s": {
            "n": 3,
            "mean": 2.0,
            "std": pytest.approx((2 / 3) ** 0.5),
            "min": 1.0,
            "max": 3.0,
            "span": 2.0,
            "p50": 2.0,
            "p90": None,
            "p95": None,
            "p99": None,
        },
        # 0, 1.5, 0
        "queue_wait_s": {
            "n": 3,
            "mean": 0.5,
            "std": pytest.approx(0.5**0.5),
            "min": 0.0,
            "max": 1.5,
            "span": 1.5,
            "p50": 0.0,
            "p90": None,
            "p95": None,
            "p99": None,
        },
        # Of fast, the second misses ttfb, the fourth e2el; failed and unfinished ones stay in the denominator.
        "goodput": {
            "fast": {"limits": {"e2el_s": 4.0, "ttfb_s": 2.0}, "num_good": 1, "requests_s": 1 / 8, "attainment": 1 / 5},
            "all": {"limits": {"e2el_s": 100.0}, "num_good": 3, "requests_s": 3 / 8, "attainment": 3 / 5},
        },
        "num_steps": 4,
        "busy_s": 8.0,
        "mean_running": (1 * 2 + 3 * 3 + 1 * 3) / 8,
        # The last step held no sequence.
        "phase_mix": {
            "refresh_only_steps": 1 / 3,
            "reuse_only_steps": 1 / 3,
            "mixed_steps": 1 / 3,
            "refresh_sequences": 2 / 5,
        },
        "budget_occupancy": (100 + 200) / 4 / 400,
        "kv_occupancy": (0.25 * 2 + 0.75 * 3 + 0.5 * 3) / 8,
        "kv_occupancy_peak": 0.75,
        "outside_forward_share": 1 - 6 / 8,
        "roofline_share": None,
        "graph_hit_rate": 0.0,
        "host_share": None,
        "profile": None,
        "accuracy": None,
        "accuracy_strict": None,
    }


def test_no_requests_and_no_steps() -> None:
    summary = summarize(
        RunRecord(requests=requests_table(), steps=steps_table(), manifest={"slos": {"a": {"e2el_s": 1}}})
    )
    empty = {
        "n": 0,
        "mean": None,
        "std": None,
        "min": None,
        "max": None,
        "span": None,
        "p50": None,
        "p90": None,
        "p95": None,
        "p99": None,
    }
    assert summary["e2el_s"] == summary["ttfb_s"] == summary["queue_wait_s"] == empty
    assert summary["num_requests"] == {"ok": 0, "failed": 0, "unfinished": 0}
    assert summary["goodput"]["a"] == {"limits": {"e2el_s": 1}, "num_good": 0, "requests_s": None, "attainment": None}
    assert set(summary["phase_mix"].values()) == {None}
    for name in (
        "window_s",
        "throughput_tok_s",
        "request_throughput",
        "mean_running",
        "budget_occupancy",
        "kv_occupancy",
        "kv_occupancy_peak",
        "outside_forward_share",
        "roofline_share",
        "graph_hit_rate",
        "host_share",
        "profile",
    ):
        assert summary[name] is None, name
    assert summary["num_steps"] == summary["busy_s"] == 0


# ---- profiles -----------------------------------------------------------------------------------


def profiled(duration_s: float, **seconds: float) -> dict[str, float]:
    return {"duration_s": duration_s, **{f"{part}_s": seconds.get(part, 0.0) for part in STEP_PARTS}}


def test_a_profile_by_kind_of_step() -> None:
    steps = steps_table(
        {"num_refresh": 2, **profiled(8.0, gemm=4.0, attention=3.0, idle=1.0)},
        {"num_refresh": 1, "num_reuse": 1, **profiled(4.0, gemm=2.0, selection=2.0)},
        {"num_reuse": 2, **profiled(2.0, gemm=1.0, commit=0.5, idle=0.5)},
        {"num_reuse": 2, "graph": True, "duration_s": 100.0},
        {"num_reuse": 2, **profiled(2.0, metadata=0.5, logits=1.5)},
    )
    summary = summarize(RunRecord(requests=requests_table(), steps=steps))
    found = summary["profile"]
    assert {kind: entry["num_steps"] for kind, entry in found.items()} == {
        "refresh": 1,
        "reuse": 2,
        "mixed": 1,
        "all": 4,
    }
    none = dict.fromkeys(STEP_PARTS, 0.0)
    assert found["refresh"]["seconds"] == {**none, "gemm": 4.0, "attention": 3.0, "idle": 1.0}
    assert found["refresh"]["share"] == {**none, "gemm": 0.5, "attention": 0.375, "idle": 0.125}
    assert found["reuse"]["seconds"] == {
        **none,
        "gemm": 1.0,
        "commit": 0.5,
        "idle": 0.5,
        "metadata": 0.5,
        "logits": 1.5,
    }
    assert found["reuse"]["share"]["logits"] == 1.5 / 4
    assert found["all"]["seconds"] == {
        part: sum(found[kind]["seconds"][part] for kind in ("refresh", "reuse", "mixed")) for part in STEP_PARTS
    }
    assert summary["host_share"] == 1.5 / 16
    # Two that are Reuse only were profiled.
    assert summary["graph_hit_rate"] == 1.0


def test_a_kind_of_step_that_was_not_profiled_has_no_shares() -> None:
    steps = steps_table({"num_reuse": 1, **profiled(1.0, gemm=1.0)}, {"num_refresh": 1, "duration_s": 1.0})
    found = summarize(RunRecord(requests=requests_table(), steps=steps))["profile"]
    assert found["refresh"] == {
        "num_steps": 0,
        "seconds": dict.fromkeys(STEP_PARTS, 0.0),
        "share": dict.fromkeys(STEP_PARTS),
    }


def test_shares_of_time_are_over_the_steps_that_have_them() -> None:
    steps = steps_table(
        {"duration_s": 4.0, "bound_s": 1.0, "forward_s": None},
        {"duration_s": 6.0, "bound_s": 3.0, "forward_s": 3.0},
        {"duration_s": 10.0, "bound_s": None, "forward_s": None},
    )
    summary = summarize(RunRecord(requests=requests_table(), steps=steps))
    assert summary["roofline_share"] == 4 / 10
    assert summary["outside_forward_share"] == 1 - 3 / 6


def test_a_graph_counts_where_all_are_in_reuse() -> None:
    refreshes = ({"num_refresh": 1, "num_reuse": 1, "graph": True}, {"num_refresh": 1, "graph": True})
    steps = steps_table(*refreshes, {"num_reuse": 1, "graph": True}, {"num_reuse": 1}, {"num_reuse": 1})
    assert summarize(RunRecord(requests=requests_table(), steps=steps))["graph_hit_rate"] == 1 / 3
    steps = steps_table(*refreshes)
    assert summarize(RunRecord(requests=requests_table(), steps=steps))["graph_hit_rate"] is None


def test_one_request() -> None:
    summary = summarize(RunRecord(requests=requests_table((2.0, 2.0, 3.0, 6.0, 32, "ok")), steps=steps_table()))
    assert summary["throughput_tok_s"] == 8.0
    assert summary["e2el_s"] == {
        "n": 1,
        "mean": 4.0,
        "std": None,
        "min": 4.0,
        "max": 4.0,
        "span": 0.0,
        "p50": None,
        "p90": None,
        "p95": None,
        "p99": None,
    }


def test_a_window_of_no_length_has_no_rate() -> None:
    summary = summarize(RunRecord(requests=requests_table((2.0, 2.0, 2.0, 2.0, 32, "ok")), steps=steps_table()))
    assert summary["window_s"] is summary["throughput_tok_s"] is summary["request_throughput"] is None


def test_a_failed_request_has_no_latency_even_with_stamps() -> None:
    record = RunRecord(
        requests=requests_table((0.0, 0.0, 1.0, None, 8, "failed"), (0.0, 0.0, 2.0, 3.0, 8, "ok")), steps=steps_table()
    )
    assert request_times(record, "ttfb_s").tolist() == [2.0]


def test_a_stamp_nobody_saw_meets_no_limit() -> None:
    record = RunRecord(requests=requests_table((0.0, None, None, 3.0, 8, "ok")), steps=steps_table())
    assert goodput(record, Slo(name="a", limits=(("ttfb_s", 100.0),)))["num_good"] == 0
    assert goodput(record, Slo(name="a", limits=(("e2el_s", 3.0),)))["num_good"] == 1


def test_percentiles_appear_with_enough_samples_and_interpolate() -> None:
    def shown(n: int) -> list[str]:
        return [k for k, v in distribution(list(range(n))).items() if k.startswith("p") and v is not None]

    assert [min_count(q) for q in (50, 90, 95, 99)] == [2, 10, 20, 100]
    assert [shown(n) for n in (1, 2, 9, 10)] == [[], ["p50"], ["p50"], ["p50", "p90"]]
    assert [len(shown(n)) for n in (19, 20, 99, 100)] == [2, 3, 3, 4]
    # 0..100: the q-th order statistic is q itself. 0..99: between the 99th and the 100th.
    assert [distribution(list(range(101)))[f"p{q}"] for q in (50, 90, 95, 99)] == [50.0, 90.0, 95.0, 99.0]
    assert distribution(list(range(100)))["p99"] == pytest.approx(98.01)


def test_ties_at_a_percentile_edge() -> None:
    # 100 values: p99 lies between the 99th and the 100th, equal here, so the outlier below must not matter.
    values = [1.0] * 98 + [5.0] * 2
    summary = distribution(values)
    assert summary["p99"] == 5.0
    assert summary["p95"] == 1.0
    assert distribution([1.0] * 99 + [5.0])["p99"] == pytest.approx(1.04)
    assert distribution([2.0] * 100) == {
        "n": 100,
        "mean": 2.0,
        "std": 0.0,
        "min": 2.0,
        "max": 2.0,
        "span": 0.0,
        "p50": 2.0,
        "p90": 2.0,
        "p95": 2.0,
        "p99": 2.0,
    }


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=150))
def test_distribution_is_ordered(values: list[float]) -> None:
    summary = distribution(values)
    known = [summary[k] for k in ("min", "p50", "p90", "p95", "p99", "max") if summary[k] is not None]
    assert known == sorted(known)
    assert summary["span"] == max(values) - min(values)
    json.dumps(summary, allow_nan=False)


def test_nan_is_refused() -> None:
    with pytest.raises(ValueError, match="finite"):
        distribution([1.0, float("nan")])
    with pytest.raises(ValueError, match="finite"):
        mean_interval([1.0, float("inf")])


# Two-sided 95 % and 99 % points of Student's t, from printed tables.
@pytest.mark.parametrize(
    ("degrees", "at_95", "at_99"),
    [
        (1, 12.706, 63.657),
        (2, 4.303, 9.925),
        (3, 3.182, 5.841),
        (4, 2.776, 4.604),
        (5, 2.571, 4.032),
        (9, 2.262, 3.250),
        (10, 2.228, 3.169),
        (29, 2.045, 2.756),
        (30, 2.042, 2.750),
        (120, 1.980, 2.617),
    ],
)
def test_student_t(degrees: int, at_95: float, at_99: float) -> None:
    assert student_t_two_sided(0.95, degrees) == pytest.approx(at_95, abs=6e-4)
    assert student_t_two_sided(0.99, degrees) == pytest.approx(at_99, abs=6e-4)


def test_interval() -> None:
    # mean 2, s = 1, n = 3: 4.3027 / sqrt(3)
    interval = mean_interval([1.0, 2.0, 3.0])
    assert (interval.mean, interval.n) == (2.0, 3)
    assert interval.half_width == pytest.approx(2.4841, abs=1e-4)
    assert mean_interval([4.0]).half_width is None
    assert mean_interval([]).mean is None
    with pytest.raises(UserError, match=r"confidence=1\.0"):
        mean_interval([1.0, 2.0], confidence=1.0)


def test_interval_covers_as_often_as_it_says() -> None:
    rng = np.random.default_rng(11)
    covered = 0
    for sample in rng.normal(5.0, 2.0, size=(2000, 4)):
        interval = mean_interval(sample.tolist(), confidence=0.9)
        assert interval.mean is not None
        assert interval.half_width is not None
        covered += abs(interval.mean - 5.0) <= interval.half_width
    # Binomial(2000, 0.9) has a standard deviation of 13.4; four of them.
    assert abs(covered - 1800) < 54


def test_every_metric_is_documented_once() -> None:
    names = [metric.name for metric in METRICS]
    assert len(set(names)) == len(names)
    assert all(metric.unit and metric.formula and metric.undefined for metric in METRICS)


@pytest.mark.parametrize("limits", [(), (("ttft", 1.0),), (("e2el_s", 0.0),), (("e2el_s", float("nan")),)])
def test_bad_slo_is_refused(limits: tuple[tuple[str, float], ...]) -> None:
    with pytest.raises(UserError, match="slo 'x'"):
        Slo(name="x", limits=limits)
