"""The memory limit of a CUDA run, on a stand-in for torch's allocator, and what a platform's measured runs default to."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engines.errors import UserError
from engines.runtime.memory_limit import SMALLER_THAN_NAMED, limit_memory
from repro.runs.cell import Cell, Scalar
from repro.runs.experiment import run_cell
from repro.systems.platforms import H200, L40S, RTX4090
from repro.systems.settings import resolve

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


def test_the_limit_becomes_a_share_of_the_card() -> None:
    allocator = FakeAllocator(total=96 * 10**9, current=2)
    assert limit_memory(CUDA, 24 * 10**9, allocator) == 24 * 10**9
    assert allocator.calls == [("properties", 2), "empty", ("fraction", 0.25, 2)]


def test_the_device_that_is_named_is_limited() -> None:
    allocator = FakeAllocator(total=10**9)
    limit_memory(torch.device("cuda:3"), 10**9, allocator)
    assert allocator.calls[-1] == ("fraction", 1.0, 3)


def test_without_a_limit_all_of_the_card_is_free_again() -> None:
    allocator = FakeAllocator(total=10**9)
    assert limit_memory(CUDA, None, allocator) is None
    assert allocator.calls[-1] == ("fraction", 1.0, 0)


def test_a_card_may_have_a_little_less_than_its_name_and_no_less() -> None:
    named = 48 * 10**9
    just = round(SMALLER_THAN_NAMED * named)
    assert limit_memory(CUDA, named, FakeAllocator(total=just + 1)) == just + 1
    small = FakeAllocator(total=24 * 10**9)
    with pytest.raises(
        UserError, match=r"memory_bytes=48000000000: the device has 24000000000.*--memory-limit of at most 24GB"
    ):
        limit_memory(CUDA, named, small)
    assert small.calls == [("properties", 0)]


def test_on_a_cpu_the_plan_alone_holds() -> None:
    allocator = FakeAllocator(total=1)
    assert limit_memory(CPU, 10**12, allocator) is None
    assert allocator.calls == []


# ---- measured runs on a card's platform ---------------------------------------------------------


def cell(platform: str, executor: str = "torch", **knobs: Scalar) -> Cell:
    return Cell(
        system="dllm-serve",
        dataset="osc",
        platform=platform,
        executor=executor,
        rate=None,
        seed=0,
        knobs=tuple(knobs.items()),
    )


@pytest.mark.parametrize("where", [H200, L40S, RTX4090], ids=lambda where: where.name)
def test_a_card_is_measured_on_cuda_in_16_bits(where: Any) -> None:
    settings = resolve(cell(where.name, weights="random"))
    assert (settings.device, settings.dtype, settings.weights) == ("cuda", "bfloat16", "random")
    asked = resolve(cell(where.name, weights="random", device="cpu", dtype="float32"))
    assert (asked.device, asked.dtype) == ("cpu", "float32")


def test_the_embedded_model_stays_where_it_was() -> None:
    settings = resolve(cell("cpu-tiny"))
    assert (settings.device, settings.dtype, settings.weights) == ("cpu", "float32", "checkpoint")


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
@pytest.mark.parametrize("system", ["dllm-serve", "sparse-dllm"])
def test_without_a_card_a_measured_run_is_refused_in_a_sentence(system: str) -> None:
    asked = replace(cell("h200", weights="random", num_requests=1), system=system)
    with pytest.raises(
        UserError, match="device='cuda': this machine has no CUDA device that torch can use: use --device cpu"
    ):
        run_cell(asked)


@pytest.mark.parametrize("platform", ["h200", "l40s", "rtx4090"])
def test_a_shape_has_no_weights_of_its_own(platform: str) -> None:
    with pytest.raises(
        UserError,
        match="model='llada-8b' is a shape without weights: add --weights random, or give a checkpoint with --model",
    ):
        resolve(cell(platform))
    assert resolve(cell(platform, model="tiny")).model == "tiny"
    assert resolve(cell(platform, executor="roofline")).executor == "roofline"
