"""Timing and transfers of a device that lags behind the host, on one made of a list of delays.

What a process asks of the machine.

The memory limit of a CUDA run, on a stand-in for torch's allocator.
"""

from __future__ import annotations

import ctypes
import gc
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.causal import executor
from support.refusals import refuses
from torch import Tensor

from engines import machine
from engines.runtime import device
from engines.runtime.device import CACHE_LINE, SMALLER_THAN_NAMED, PinnedStaging, Staging, limit_memory, zeros
from engines.runtime.step_timer import MAX_IN_FLIGHT, STEP_PARTS, CudaTimer
from repro.paths import REPO


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

    def _new_buffer(self, size: int) -> tuple[Tensor, Any]:
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


WRITTEN = """
import resource, sys
from pathlib import Path
import torch
from engines.runtime.device import zeros
def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
before = resident()
pool = zeros((2, 1 << 20, 32), dtype=getattr(torch, sys.argv[1]), device=torch.device("cpu"))
unwritten = resident() - before
pool[0] = 1
print(unwritten, resident() - before, pool.numel() * pool.itemsize)
"""


@pytest.mark.skipif(not Path("/proc/self/statm").is_file(), reason="no /proc")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_zeros_of_a_cpu_take_memory_as_they_are_written(dtype):
    """In a process of its own: what another has freed is not given back to the system, and is written when it is taken again."""
    done = subprocess.run([sys.executable, "-c", WRITTEN, dtype], cwd=REPO, capture_output=True, text=True, check=True)
    unwritten, half, size = map(int, done.stdout.split())
    assert unwritten < size / 4 < half


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_zeros_of_a_cpu_are_zeros_from_a_cache_line_on(dtype):
    pool = zeros((2, 5, 32), dtype=dtype, device=torch.device("cpu"))
    assert (pool.shape, pool.dtype, pool.data_ptr() % CACHE_LINE) == ((2, 5, 32), dtype, 0)
    assert not pool.any()
    assert zeros((2, 0, 3), dtype=dtype, device=torch.device("cpu")).shape == (2, 0, 3)


@pytest.mark.parametrize("error", [MemoryError("no room"), RuntimeError("no room")])
def test_a_pool_that_does_not_fit_is_refused(monkeypatch, error):
    def fail(*_: object, **__: object) -> Tensor:
        raise error

    monkeypatch.setattr(device, "zeros", fail)
    with refuses("num_tokens=no room"):
        executor()


def test_a_process_keeps_what_it_frees_where_the_c_library_can(monkeypatch):
    asked: list[tuple[int, int]] = []

    class Library:
        def __init__(self, most: int) -> None:
            self.mallopt = lambda name, size: asked.append((name, size)) or int(name == -1 or size <= most)

    def asks_of(most: int) -> bool:
        asked.clear()
        monkeypatch.setattr(ctypes, "CDLL", lambda name: Library(most))
        return machine.keep_freed_memory()

    assert asks_of(1 << 30)
    assert [name for name, _ in asked] == [-3, -1]
    # Older libraries keep blocks of 32 MiB at most; one that takes neither is asked for nothing more.
    assert asks_of(1 << 25)
    assert [name for name, _ in asked] == [-3, -3, -1]
    assert not asks_of(0)
    assert [name for name, _ in asked] == [-3, -3]


def test_freed_memory_goes_back_where_the_c_library_can(monkeypatch):
    kept = [bytearray(1 << 16) for _ in range(1 << 10)]
    monkeypatch.setattr(ctypes, "CDLL", lambda name: SimpleNamespace(malloc_trim=lambda pad: kept.clear()))
    machine.give_back_freed_memory()
    assert not kept
    monkeypatch.setattr(ctypes, "CDLL", lambda name: SimpleNamespace())
    machine.give_back_freed_memory()


def test_signals_that_would_end_a_process_take_effect_after_what_has_to_be_whole():
    came: list[int] = []

    def note(number: int, _: object) -> None:
        came.append(number)

    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        signal.signal(signal.SIGINT, note)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        with machine.delay_signals():
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGTERM)
            assert came == []
        assert came == [signal.SIGINT], "one that is ignored stays so"
        assert signal.getsignal(signal.SIGINT) is note
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@pytest.mark.parametrize("error", [AttributeError, OSError, TypeError])
def test_another_c_library_is_left_as_it_is(monkeypatch, error):
    def refuse(name: Any) -> Any:
        raise error

    monkeypatch.setattr(ctypes, "CDLL", refuse)
    assert not machine.keep_freed_memory()


def test_the_collector_is_on_again_whoever_ends_first():
    def callers() -> tuple[Any, Any]:
        return machine.without_collection(), machine.without_collection()

    for is_nested in (True, False):
        first, second = callers()
        first.__enter__()
        second.__enter__()
        assert not gc.isenabled()
        for each in (second, first) if is_nested else (first, second):
            each.__exit__(None, None, None)
        assert gc.isenabled()


def test_the_collector_is_on_again_behind_an_error_and_in_every_call():
    @machine.without_collection()
    def fail() -> None:
        assert not gc.isenabled()
        raise KeyError

    for _ in range(2):
        with pytest.raises(KeyError):
            fail()
        assert gc.isenabled()


def test_a_collector_that_is_off_stays_off():
    gc.disable()
    try:
        with machine.without_collection():
            assert not gc.isenabled()
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_the_collector_is_on_where_another_thread_turns_it_on_meanwhile(monkeypatch):
    """The other ends between the look of this one and what it does then."""
    first, second = machine.without_collection(), machine.without_collection()
    first.__enter__()
    with monkeypatch.context() as patched:
        patched.setattr(gc, "isenabled", lambda: bool(first.__exit__(None, None, None)))
        second.__enter__()
    second.__exit__(None, None, None)
    assert gc.isenabled()


CUDA, CPU = torch.device("cuda"), torch.device("cpu")


class FakeAllocator:
    def __init__(self, total: int, current: int = 0) -> None:
        self.total, self.current = total, current
        self.calls: list[Any] = []

    def current_device(self) -> int:
        return self.current

    def get_device_properties(self, device: int) -> Any:
        self.calls.append(("properties", device))
        return SimpleNamespace(total_memory=self.total)

    def set_per_process_memory_fraction(self, fraction: float, device: int) -> None:
        assert isinstance(fraction, float)
        assert 0 <= fraction <= 1
        self.calls.append(("fraction", fraction, device))

    def empty_cache(self) -> None:
        self.calls.append("empty")


def test_the_limit_becomes_a_share_of_the_card():
    allocator = FakeAllocator(total=96 * 10**9, current=2)
    assert limit_memory(CUDA, 24 * 10**9, allocator) == 24 * 10**9
    assert allocator.calls == [("properties", 2), "empty", ("fraction", 0.25, 2)]


def test_the_device_that_is_named_is_limited():
    allocator = FakeAllocator(total=10**9)
    limit_memory(torch.device("cuda:3"), 10**9, allocator)
    assert allocator.calls[-1] == ("fraction", 1.0, 3)


def test_without_a_limit_all_of_the_card_is_free_again():
    allocator = FakeAllocator(total=10**9)
    assert limit_memory(CUDA, None, allocator) is None
    assert allocator.calls[-1] == ("fraction", 1.0, 0)


def test_a_card_may_have_a_little_less_than_its_name_and_no_less():
    named = 48 * 10**9
    just = round(SMALLER_THAN_NAMED * named)
    assert limit_memory(CUDA, named, FakeAllocator(total=just + 1)) == just + 1
    small = FakeAllocator(total=24 * 10**9)
    with refuses("memory_bytes=48000000000"):
        limit_memory(CUDA, named, small)
    assert small.calls == [("properties", 0)]


def test_on_a_cpu_the_plan_alone_holds():
    allocator = FakeAllocator(total=1)
    assert limit_memory(CPU, 10**12, allocator) is None
    assert allocator.calls == []
