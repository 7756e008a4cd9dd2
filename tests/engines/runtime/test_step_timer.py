"""Timing and transfers of a device that lags behind the host, on one made of a list of delays."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from engines.runtime.device import PinnedStaging, Staging, Transfer
from engines.runtime.step_timer import MAX_IN_FLIGHT, STEP_PARTS, CudaTimer


class Device:
    """Work is queued with its milliseconds; ``now`` is how far the device has got."""

    def __init__(self) -> None:
        self.queued = 0.0
        self.now = 0.0
        self.num_events = 0

    def event(self) -> Event:
        self.num_events += 1
        return Event(self)


class Event:
    def __init__(self, device: Device) -> None:
        self.device = device
        self.at = 0.0

    def record(self) -> None:
        self.at = self.device.queued

    def synchronize(self) -> None:
        self.device.now = max(self.device.now, self.at)

    def query(self) -> bool:
        return self.device.now >= self.at

    def elapsed_time(self, end: Event) -> float:
        assert self.device.now >= max(self.at, end.at), "asked before it is over"
        return end.at - self.at


PARTS = ("metadata", "gemm", "logits", "commit")


@given(st.lists(st.tuples(*[st.integers(0, 50)] * 5), min_size=1, max_size=12))
def test_parts_are_what_the_device_took(steps):
    device = Device()
    timer = CudaTimer(device.event)
    for i, (idle, *work) in enumerate(steps):
        device.queued += idle
        timer.begin(detailed=i % 2 == 0)
        assert device.now >= sum(map(sum, steps[: max(0, i - MAX_IN_FLIGHT + 1)])), "too far ahead"
        for part, milliseconds in zip(PARTS, work, strict=True):
            device.queued += milliseconds
            timer.lap(part)
        assert timer.end() is None
    times = timer.times()
    assert list(times) == list(range(len(steps)))
    for i, (idle, metadata, gemm, logits, commit) in enumerate(steps):
        assert times[i].forward_s == pytest.approx((gemm + logits) / 1e3)
        expected = dict.fromkeys(STEP_PARTS, 0.0) | {
            "idle": idle if i else 0,
            "metadata": metadata,
            "gemm": gemm,
            "logits": logits,
            "commit": commit,
        }
        parts = times[i].parts
        assert (parts is None) == (i % 2 == 1)
        if parts is not None:
            assert parts == {part: pytest.approx(value / 1e3) for part, value in expected.items()}
    assert timer.times() == {}
    assert device.num_events <= (MAX_IN_FLIGHT + 1) * 5 + 1


def test_time_without_requests_is_not_idle():
    device = Device()
    timer = CudaTimer(device.event)
    for rests in (False, True, False):
        device.queued += 100
        if rests:
            timer.rest()
        timer.begin(detailed=True)
        device.queued += 1
        timer.lap("gemm")
        timer.end()
    idle = [times.parts["idle"] for times in timer.times().values() if times.parts is not None]
    assert idle == pytest.approx([0, 0, 0.1])


def test_a_failed_step_counts_for_nothing():
    device = Device()
    timer = CudaTimer(device.event)
    for fails in (True, False):
        timer.begin(detailed=True)
        timer.lap("gemm")
        if fails:
            timer.abandon()
        else:
            timer.end()
    assert list(timer.times()) == [0]


class PagedStaging(PinnedStaging):
    """Without page-locked memory, which needs a GPU."""

    def __init__(self, device: Device) -> None:
        super().__init__(torch.device("cpu"))
        self.fake = device

    def _new_buffer(self, size: int) -> tuple[Tensor, Transfer]:
        return torch.empty(size, dtype=torch.int64), self.fake.event()


@given(
    st.lists(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 5)), min_size=1, max_size=4), min_size=1, max_size=6)
)
def test_one_transfer_brings_all_arrays(batches):
    staging, numbers = PagedStaging(Device()), np.random.default_rng(0)
    for shapes in batches:
        arrays = [numbers.integers(-9, 9, shape) for shape in shapes]
        for sent in (staging.send(*arrays), Staging().send(*arrays)):
            assert [tensor.tolist() for tensor in sent] == [array.tolist() for array in arrays]
            assert all(tensor.dtype == torch.int64 for tensor in sent)


def test_a_buffer_is_used_again_once_it_has_left():
    device = Device()
    staging = PagedStaging(device)
    for _ in range(5):
        device.queued += 1
        staging.send(np.arange(7))
        device.now = device.queued
    assert device.num_events == 1
    for _ in range(3):  # nothing leaves
        device.queued += 1
        staging.send(np.arange(7))
    assert device.num_events == 3
    staging.send(np.arange(5000))
    assert device.num_events == 4
