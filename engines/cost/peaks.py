"""Measures what a device reaches in practice: the yardstick if there is no datasheet, and a comparison if there is one."""

from collections.abc import Callable, Sequence
from time import perf_counter
from typing import NamedTuple

import torch

from engines.cost.roofline import Gpu, gpu_of_device
from engines.models.product import product_of

REPEATS = 5
MATRIX_SIZES = {"cpu": (256, 512, 1024), "cuda": (2048, 4096, 8192)}
COPY_BYTES = {"cpu": 64 * 2**20, "cuda": 2**30}
MOST_REPEATS = 200
BUDGET_S = 0.3
"""A larger matrix is left out if it would take longer."""


class Peaks(NamedTuple):
    flops_per_s: float
    bytes_per_s: float
    """Bytes read and written, together."""
    how: str


@torch.inference_mode()
def measured_peaks(device: torch.device, dtype: torch.dtype) -> Peaks:
    """The largest rate of square matrix products and of a copy. Each is the best of REPEATS or more after a warm-up, because a peak
    is reached undisturbed. Takes under 1 s on a CPU, with as many threads as torch has."""
    sizes: list[int] = []
    rates: list[float] = []
    for size in MATRIX_SIZES[device.type]:
        flops = 2 * size**3
        if rates and (REPEATS + 1) * flops / max(rates) > BUDGET_S:
            break
        sizes.append(size)
        rates.append(flops / _matmul_s(size, device, dtype))
    num_bytes = COPY_BYTES[device.type]
    bandwidth = 2 * num_bytes / _copy_s(num_bytes, device)
    if device.type == "cuda":
        torch.cuda.empty_cache()  # what follows may need all of the memory
    note = (
        f"measured: rates of square {str(dtype).removeprefix('torch.')} matrix products of "
        f"{', '.join(map(str, sizes))} and of a copy of {num_bytes // 2**20} MiB, read and written; "
        f"best of {REPEATS} or more"
    )
    if device.type == "cpu":
        note += (
            f", threads: {torch.get_num_threads()}; products the faster of torch's and oneDNN's with reordered weights"
        )
    return Peaks(max(rates), bandwidth, note)


def datasheet_gpu(device: torch.device) -> Gpu | None:
    """The device's card in the catalogue; None if it is not there, and for a CPU."""
    return gpu_of_device(torch.cuda.get_device_name(device)) if device.type == "cuda" else None


def measured_gpu(device: torch.device, dtype: torch.dtype) -> Gpu:
    """A card with the peaks measured here, for bounds alone."""
    peaks = measured_peaks(device, dtype)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "this cpu"
    return Gpu.of_peaks(name, peaks.flops_per_s, peaks.bytes_per_s, peaks.how)


def _matmul_s(size: int, device: torch.device, dtype: torch.dtype) -> float:
    # Zeros would draw less power than numbers do, and so run faster.
    generator = torch.Generator(device=device).manual_seed(0)
    a, b = (torch.randn((size, size), generator=generator, device=device).to(dtype) for _ in range(2))
    out = torch.empty_like(a)
    products: list[Callable[[], object]] = [lambda: torch.mm(a, b, out=out)]
    our_product = product_of(b)
    if our_product is not None:
        products.append(lambda: our_product(a))
    times = [min(seconds_of(product, device)) for product in products]
    # Small products are disturbed easily, so we repeat the faster one for a third of the budget.
    best = min(times)
    num_repeats = int(min(MOST_REPEATS, BUDGET_S / 3 / best))
    return min(best, *seconds_of(products[times.index(best)], device, num_repeats)) if num_repeats else best


def _copy_s(num_bytes: int, device: torch.device) -> float:
    source = torch.ones(num_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return min(seconds_of(lambda: target.copy_(source), device))


def seconds_of(run: Callable[[], object], device: torch.device, repeats: int = REPEATS) -> Sequence[float]:
    """Seconds of each of ``repeats`` runs after one to warm up, by the device's own clock if it has one."""
    run()
    if device.type != "cuda":
        seconds = []
        for _ in range(repeats):
            start_s = perf_counter()
            run()
            seconds.append(perf_counter() - start_s)
        return seconds
    with torch.cuda.device(device):
        events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
        for start, end in events:
            start.record()
            run()
            end.record()
        torch.cuda.synchronize()
        return [start.elapsed_time(end) / 1e3 for start, end in events]
