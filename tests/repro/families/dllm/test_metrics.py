"""Every metric of a diffusion-LLM run on a record small enough to reckon by hand, and what a driver writes down of its steps."""

from typing import Any

import pytest
from support.driven import FakeEngine, make_requests
from support.records import record_of, requests_table, stats, steps_table

from engines.dllm.plan import StepRecord
from engines.runtime.step_timer import STEP_PARTS, DeviceTimes
from repro.families.dllm.record import DLLM, drive_engine
from repro.runs.step_driver import VirtualClock


def step(start_s: int, end_s: int, forward_s: float, sequences: tuple[int, int], **rest: int) -> dict[str, Any]:
    """``sequences`` are in Refresh, and in Reuse."""
    times = {"start_s": start_s, "end_s": end_s, "duration_s": float(end_s - start_s), "forward_s": forward_s}
    counts = {"num_refresh": sequences[0], "num_reuse": sequences[1], "num_running": sum(sequences)}
    return {**times, **counts, "kv_rows_total": 40, **rest}


GOLDEN = record_of(
    requests_table(
        (1.0, 1.0, 2.0, 3.0, 32, "ok"),
        (1.5, 3.0, 4.5, 5.5, 64, "ok"),
        (2.0, 3.0, None, None, 100, "failed"),
        (4.0, 4.0, 6.0, 9.0, 64, "ok"),
        (8.0, None, None, None, 32, "unfinished"),
    ),
    steps_table(
        step(1, 3, 1.5, (1, 0), scheduled_tokens=100, kv_rows_used=10),
        step(3, 6, 3.0, (1, 2), scheduled_tokens=200, kv_rows_used=30),
        step(6, 9, 1.5, (0, 1), kv_rows_used=20),
        {"start_s": 9, "end_s": 9, "duration_s": 0.0},
    ),
    obtained="simulated",
    max_num_batched_tokens=400,
    slos={"fast": {"e2el_s": 4.0, "ttft_s": 2.0}, "all": {"e2el_s": 100.0}},
)


def test_golden_summary():
    # Window: first arrival 1.0 to last finish 9.0.
    assert DLLM.summarize(GOLDEN) == {
        "num_requests": {"ok": 3, "failed": 1, "unfinished": 1},
        "window_s": 8.0,
        "throughput_tok_s": (32 + 64 + 64) / 8,
        "request_throughput": 3 / 8,
        # 2, 4, 5
        "e2el_s": stats(3, pytest.approx(11 / 3), pytest.approx((14 / 9) ** 0.5), 2.0, 5.0, 4.0),
        # 1, 3, 2
        "ttft_s": stats(3, 2.0, pytest.approx((2 / 3) ** 0.5), 1.0, 3.0, 2.0),
        # 0, 1.5, 0
        "queue_wait_s": stats(3, 0.5, pytest.approx(0.5**0.5), 0.0, 1.5, 0.0),
        # Of fast, the second misses ttft, the fourth e2el; failed and unfinished ones stay in the denominator.
        "goodput": {
            "fast": {"limits": {"e2el_s": 4.0, "ttft_s": 2.0}, "num_good": 1, "requests_s": 1 / 8, "attainment": 1 / 5},
            "all": {"limits": {"e2el_s": 100.0}, "num_good": 3, "requests_s": 3 / 8, "attainment": 3 / 5},
        },
        "num_steps": 4,
        "step_requests": stats(4, 1.25, pytest.approx(1.0897247358851685), 0.0, 3.0, 1.0),
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


def test_no_requests_and_no_steps():
    summary = DLLM.summarize(record_of(slos={"a": {"e2el_s": 1}}))
    assert summary["e2el_s"] == summary["ttft_s"] == summary["queue_wait_s"] == stats(0, None, None, None, None, None)
    assert summary["num_requests"] == {"ok": 0, "failed": 0, "unfinished": 0}
    assert summary["goodput"]["a"] == {"limits": {"e2el_s": 1}, "num_good": 0, "requests_s": None, "attainment": None}
    assert set(summary["phase_mix"].values()) == {None}
    for name in (
        *("window_s", "throughput_tok_s", "request_throughput", "mean_running", "budget_occupancy", "kv_occupancy"),
        *("kv_occupancy_peak", "outside_forward_share", "roofline_share", "graph_hit_rate"),
        *("host_share", "profile"),
    ):
        assert summary[name] is None, name
    assert summary["num_steps"] == summary["busy_s"] == 0


def profiled(duration_s: float, **seconds: float) -> dict[str, float]:
    return {"duration_s": duration_s, **{f"{part}_s": seconds.get(part, 0.0) for part in STEP_PARTS}}


def test_a_profile_by_kind_of_step():
    steps = steps_table(
        {"num_refresh": 2, **profiled(8.0, gemm=4.0, attention=3.0, idle=1.0)},
        {"num_refresh": 1, "num_reuse": 1, **profiled(4.0, gemm=2.0, selection=2.0)},
        {"num_reuse": 2, **profiled(2.0, gemm=1.0, commit=0.5, idle=0.5)},
        {"num_reuse": 2, "graph": True, "duration_s": 100.0},
        {"num_reuse": 2, **profiled(2.0, metadata=0.5, logits=1.5)},
    )
    summary = DLLM.summarize(record_of(steps=steps))
    found = summary["profile"]
    kinds = {"refresh": 1, "reuse": 2, "mixed": 1, "all": 4}
    assert {kind: entry["num_steps"] for kind, entry in found.items()} == kinds
    none = dict.fromkeys(STEP_PARTS, 0.0)
    assert found["refresh"]["seconds"] == {**none, "gemm": 4.0, "attention": 3.0, "idle": 1.0}
    assert found["refresh"]["share"] == {**none, "gemm": 0.5, "attention": 0.375, "idle": 0.125}
    reuse = {"gemm": 1.0, "commit": 0.5, "idle": 0.5, "metadata": 0.5, "logits": 1.5}
    assert found["reuse"]["seconds"] == {**none, **reuse}
    assert found["reuse"]["share"]["logits"] == 1.5 / 4
    assert found["all"]["seconds"] == {
        part: sum(found[kind]["seconds"][part] for kind in ("refresh", "reuse", "mixed")) for part in STEP_PARTS
    }
    assert summary["host_share"] == 1.5 / 16
    # Two that are Reuse only were profiled.
    assert summary["graph_hit_rate"] == 1.0


def test_a_kind_of_step_that_was_not_profiled_has_no_shares():
    steps = steps_table({"num_reuse": 1, **profiled(1.0, gemm=1.0)}, {"num_refresh": 1, "duration_s": 1.0})
    found = DLLM.summarize(record_of(steps=steps))["profile"]
    seconds, share = dict.fromkeys(STEP_PARTS, 0.0), dict.fromkeys(STEP_PARTS)
    assert found["refresh"] == {"num_steps": 0, "seconds": seconds, "share": share}


def test_shares_of_time_are_over_the_steps_that_have_them():
    steps = steps_table(
        {"duration_s": 4.0, "bound_s": 1.0, "forward_s": None},
        {"duration_s": 6.0, "bound_s": 3.0, "forward_s": 3.0},
        {"duration_s": 10.0, "bound_s": None, "forward_s": None},
    )
    summary = DLLM.summarize(record_of(steps=steps))
    assert summary["roofline_share"] == 4 / 10
    assert summary["outside_forward_share"] == 1 - 3 / 6


def test_a_graph_counts_where_all_are_in_reuse():
    refreshes = ({"num_refresh": 1, "num_reuse": 1, "graph": True}, {"num_refresh": 1, "graph": True})
    steps = steps_table(*refreshes, {"num_reuse": 1, "graph": True}, {"num_reuse": 1}, {"num_reuse": 1})
    assert DLLM.summarize(record_of(steps=steps))["graph_hit_rate"] == 1 / 3
    steps = steps_table(*refreshes)
    assert DLLM.summarize(record_of(steps=steps))["graph_hit_rate"] is None


class LaggingEngine(FakeEngine):
    """Its device says what a step took once all are over; every other step is profiled."""

    def step(self, now_s: float = 0.0) -> StepRecord | None:
        record = super().step()
        if record is None:
            return None
        return record._replace(outcome=record.outcome._replace(forward_s=None, graph=record.step > 0, bound_s=0.25))

    def times(self) -> dict[int, DeviceTimes]:
        parts = {part: 1.0 + i for i, part in enumerate(STEP_PARTS)}
        return {step: DeviceTimes(0.5 + step, None if step % 2 else parts) for step in range(self._step)}


def test_what_is_known_late_is_in_the_record():
    clock = VirtualClock()
    steps = drive_engine(LaggingEngine(clock, service_s=10.0), make_requests([0.0, 1.0, 2.0]), clock).tables["steps"]
    assert steps["forward_s"] == [0.5, 1.5, 2.5]
    assert steps["graph"] == [False, True, True]
    assert steps["bound_s"] == [0.25] * 3
    for i, part in enumerate(STEP_PARTS):
        assert steps[f"{part}_s"] == [1.0 + i, None, 1.0 + i]
