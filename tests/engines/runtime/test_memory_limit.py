"""The memory limit of a CUDA run, on a stand-in for torch's allocator."""

from types import SimpleNamespace
from typing import Any

import torch
from support.refusals import refuses

from engines.runtime.memory_limit import SMALLER_THAN_NAMED, limit_memory

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
