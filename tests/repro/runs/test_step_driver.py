import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.driven import FakeEngine, drive, make_requests
from support.refusals import refuses
from support.tables import data_beside

from engines.dllm.plan import StepRecord
from engines.errors import UserError
from repro.families.dllm.record import DLLM, drive_engine
from repro.runs.family import request_times
from repro.runs.record import DriveProgress
from repro.runs.statistics import mean_interval
from repro.runs.step_driver import Clock, EngineStalledError, VirtualClock, WallClock

CASES = data_beside(__file__, "cases")


def test_golden_stamps():
    # Request 1 falls due inside the first step, 2 at its very end, 3 after an idle stretch.
    record = drive([1.0, 1.5, 3.0, 10.0], 2.0)
    table = record.requests
    assert table["submit_lag_s"] == [0.0, 1.5, 0.0, 0.0]
    assert table["admitted_s"] == [1.0, 3.0, 5.0, 10.0]
    assert table["first_output_s"] == table["finished_s"] == [3.0, 5.0, 7.0, 12.0]
    assert table["status"] == ["ok"] * 4
    assert record.tables["steps"]["start_s"] == [1.0, 3.0, 5.0, 10.0]
    assert record.tables["steps"]["end_s"] == [3.0, 5.0, 7.0, 12.0]
    assert record.tables["steps"]["num_waiting"] == [0, 1, 0, 0]
    assert record.tables["steps"]["num_admitted"] == record.tables["steps"]["num_finished"] == [1, 1, 1, 1]
    DLLM.check_tables(record)
    assert record.manifest == {"obtained": "simulated"}
    assert DLLM.assess(record).valid


@pytest.mark.parametrize("service_s", [0.5, 0.75])
def test_a_deterministic_queue(service_s):
    """D/D/1 with T = 0.5: the k-th waits k (D - T), exactly in binary floating point."""
    record = drive([0.5 * k for k in range(100)], service_s)
    waits = [(service_s - 0.5) * k for k in range(100)]
    assert request_times(record, "queue_wait_s").tolist() == waits
    assert request_times(record, "e2el_s").tolist() == [wait + service_s for wait in waits]


@pytest.mark.parametrize("load", [0.3, 0.6])
def test_poisson_arrivals_meet_pollaczek_khinchine(load):
    """M/D/1: mean wait = load * D / (2 (1 - load)). Batch means give nearly independent samples of it."""
    arrivals = np.random.default_rng(7).exponential(1 / load, size=20_000).cumsum()
    waits = request_times(drive(arrivals.tolist(), 1.0), "queue_wait_s")
    interval = mean_interval(waits.reshape(20, 1000).mean(axis=1).tolist(), confidence=0.999)
    expected = load / (2 * (1 - load))
    assert interval.mean is not None
    assert interval.half_width is not None
    assert interval.half_width < 0.15 * expected
    assert abs(interval.mean - expected) <= interval.half_width
    # Exponential service would wait twice as long, so the interval does tell them apart.
    assert abs(interval.mean - 2 * expected) > interval.half_width


quarters = st.integers(0, 40).map(lambda n: n / 4)


@settings(deadline=None)
@given(
    workload=st.lists(st.tuples(quarters, st.integers(1, 4)), max_size=25),
    service_s=st.integers(0, 8).map(lambda n: n / 4),
    capacity=st.integers(1, 4),
    fail=st.frozensets(st.integers(0, 24)),
)
def test_every_request_ends_once_and_none_is_submitted_early(workload, service_s, capacity, fail):
    requests = make_requests([arrival for arrival, _ in workload], [steps for _, steps in workload])
    clock = VirtualClock()
    engine = FakeEngine(clock, service_s=service_s, capacity=capacity, fail=fail)
    record = drive_engine(engine, requests, clock)
    table = record.requests

    due = {request.request_id: request.arrival_s for request in requests}
    assert sorted(table["request_id"]) == sorted(i for i, _ in engine.submissions) == list(range(len(requests)))
    assert all(now >= due[i] for i, now in engine.submissions)
    # In arrival order, ties in the order given.
    assert [i for i, _ in engine.submissions] == sorted(due, key=lambda i: (due[i], i)) == table["request_id"]
    assert table["submit_lag_s"] == [now - due[i] for i, now in engine.submissions]

    expected = ["failed" if i in fail else "ok" for i in table["request_id"]]
    assert table["status"] == expected
    assert sum(record.tables["steps"]["num_finished"]) == expected.count("ok")
    assert sum(record.tables["steps"]["num_failed"]) == expected.count("failed")
    assert [error is not None for error in table["error"]] == [status == "failed" for status in expected]
    assert [finished is not None for finished in table["finished_s"]] == [status == "ok" for status in expected]
    problems = [r for r in DLLM.assess(record).reasons if "failed" not in r and "fewer" not in r]
    assert problems == ([] if requests else ["there are no requests"])


def test_stopping_leaves_open_requests_unfinished():
    clock = VirtualClock()
    seen: list[DriveProgress] = []
    record = drive_engine(
        FakeEngine(clock, service_s=1.0),
        make_requests([0.0, 0.0, 9.0]),
        clock,
        on_progress=seen.append,
        should_stop=lambda: clock.now() >= 1.0,
    )
    assert record.requests["status"] == ["ok", "unfinished", "unfinished"]
    assert record.requests["finished_s"] == [1.0, None, None]
    assert record.requests["submit_lag_s"] == [0.0, 0.0, None]
    assert seen == [DriveProgress(now_s=1.0, num_total=3, num_submitted=2, num_closed=1)]


class SleepyClock(VirtualClock):
    """A wall clock without the wait: durations pass during the step, ``advance`` adds nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.sleeps: list[float] = []

    def advance(self, duration_s: float) -> None:
        return None

    def pass_time(self, duration_s: float) -> None:
        super().advance(duration_s)

    def sleep_until(self, time_s: float) -> None:
        self.sleeps.append(time_s)
        super().sleep_until(time_s)


class BlockingEngine(FakeEngine):
    def step(self, now_s: float = 0.0) -> StepRecord | None:
        self._clock.pass_time(self._service_s + 0.25)
        return super().step()


def test_a_blocking_step_is_stamped_by_the_clock_not_by_its_own_duration():
    clock = SleepyClock()
    record = drive_engine(BlockingEngine(clock, service_s=1.0), make_requests([0.5, 1.0]), clock)
    assert clock.sleeps == [0.5]
    assert record.requests["finished_s"] == [1.75, 3.0]
    assert record.requests["submit_lag_s"] == [0.0, 0.75]
    assert record.tables["steps"]["duration_s"] == [1.0, 1.0]


def test_wall_clock():
    clock = WallClock()
    record = drive_engine(FakeEngine(clock, service_s=0.0), make_requests([0.0, 0.002, 0.004]), clock)
    assert record.obtained == "measured"
    assert all(lag >= 0 for lag in record.requests["submit_lag_s"])
    assert record.requests["finished_s"] == sorted(record.requests["finished_s"])
    assert clock.now() >= 0.004


def test_virtual_clock_refuses_impossible_durations():
    for duration in (-1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="finite and not negative"):
            VirtualClock().advance(duration)


def test_sleeping_never_turns_the_clock_back():
    clock = VirtualClock()
    clock.sleep_until(5.0)
    clock.sleep_until(3.0)
    assert clock.now() == 5.0


def test_bad_workloads_are_refused():
    clock = VirtualClock()
    request = make_requests([0.0])[0]
    with refuses("request_id=0"):
        drive_engine(FakeEngine(clock, service_s=1.0), [request, request], clock)
    for arrival in (-1.0, float("nan"), float("inf")):
        with pytest.raises(UserError, match="arrival_s="):
            drive_engine(FakeEngine(clock, service_s=1.0), make_requests([arrival]), clock)


class StuckEngine(FakeEngine):
    """Runs only with two requests at hand."""

    def step(self, now_s: float = 0.0) -> StepRecord | None:
        return super().step() if self.num_waiting >= 2 else None


def test_an_engine_with_nothing_to_run_waits_for_the_next_arrival():
    clock = VirtualClock()
    record = drive_engine(StuckEngine(clock, service_s=1.0, capacity=2), make_requests([0.0, 4.0]), clock)
    assert record.requests["admitted_s"] == [4.0, 4.0]


def test_a_stalled_engine_is_an_error():
    clock = VirtualClock()
    with pytest.raises(EngineStalledError, match="1 requests waiting and 0 running"):
        drive_engine(StuckEngine(clock, service_s=1.0), make_requests([0.0]), clock)


class LyingEngine(FakeEngine):
    def __init__(self, clock: Clock, part: str, reported: dict[str, object]) -> None:
        super().__init__(clock, service_s=1.0)
        self._part, self._reported = part, reported

    def step(self, now_s: float = 0.0) -> StepRecord | None:
        record = super().step()
        assert record is not None
        return record._replace(**{self._part: getattr(record, self._part)._replace(**self._reported)})


@pytest.mark.parametrize(("part", "reported", "said"), CASES["miscounts"])
def test_an_engine_that_miscounts_is_an_error(part, reported, said):
    clock = VirtualClock()
    with pytest.raises(RuntimeError, match=said):
        drive_engine(LyingEngine(clock, part, reported), make_requests([0.0, 9.0]), clock)
