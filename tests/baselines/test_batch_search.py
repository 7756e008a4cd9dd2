"""The largest static batch: searched without running one that does not fit, by model and by measurement."""

import gc
import random
from collections.abc import Callable, Mapping
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from support.cells import a_cell
from support.refusals import refuses

from baselines.dllm.fast_dllm import FastDllm
from baselines.dllm.published import PublishedMethod
from baselines.dllm.static.scheduler import FoundBatch, StaticFootprint, base_bytes, largest_batch
from engines.dllm.executor.compose import peak_bytes
from engines.errors import UserError
from repro.families.dllm import deployment as deployments
from repro.families.dllm import on_torch
from repro.families.dllm.deployment import DllmDeployment
from repro.runs.cell import Cell, Scalar
from repro.runs.experiment import prepare

Peak = Callable[[int], int]
SYSTEMS = ("fast-dllm", "dllm-cache", "sparse-dllm", "llada")


def search(peak: Peak, limit: int, most: int) -> FoundBatch:
    found = largest_batch(peak, limit, fixed_bytes=peak(0), most=most)
    sizes = [size for size, _ in found.probes]
    assert len(set(sizes)) == len(sizes)
    assert all(1 <= size <= most and held == peak(size) for size, held in found.probes)
    # Doubling, then at most two strides of each power of two.
    assert len(sizes) <= 3 * most.bit_length() + 1
    assert (found.size, found.peak_bytes) in found.probes
    assert found.peak_bytes <= limit
    return found


def true_largest(peak: Peak, limit: int, most: int) -> int:
    return next(size for size in range(most, 0, -1) if peak(size) <= limit)


# ---- any probe ----------------------------------------------------------------------------------


@given(fixed=st.integers(0, 10**10), each=st.integers(1, 10**9), spare=st.integers(0, 10**11), most=st.integers(1, 400))
def test_straight_lines_are_followed_exactly(fixed, each, spare, most):
    limit = fixed + each + spare
    found = search(lambda size: fixed + each * size, limit, most)
    assert found.size == min(most, (limit - fixed) // each)
    assert all(held <= limit for _, held in found.probes)


@given(
    fixed=st.integers(0, 10**6),
    each=st.integers(8, 10**4),
    spare=st.integers(0, 10**6),
    most=st.integers(1, 300),
    seed=st.integers(0, 2**31),
)
def test_uneven_members_cost_one_of_them_and_at_most_the_guard_band(fixed, each, spare, most, seed):
    """Peaks up to half a member above the line, each as high above it as it happens to be."""
    above = random.Random(seed).choices((0.0, 0.1, 0.3, 0.5), k=most + 1)

    def peak(size: int) -> int:
        return fixed + each * size + (int(above[size] * each) if size else 0)

    limit = peak(1) + spare
    found = search(peak, limit, most)
    assert true_largest(peak, limit, most) - 1 <= found.size <= true_largest(peak, limit, most)
    # Off the line by one wobble at the probe and by two where the line was drawn.
    assert all(held <= limit + 3 * each / 2 for _, held in found.probes)


@example(each=3209, share=0.9531, most=144, bend=-0.1559)  # the line is flatter where a stride was given up
@given(each=st.integers(1000, 10**4), share=st.floats(0, 1), most=st.integers(1, 300), bend=st.floats(-0.3, 0.3))
def test_bent_lines(each, share, most, bend):
    """The last members cost up to three tenths more, or less, than the first ones."""

    def peak(size: int) -> int:
        return 10**5 + int(each * size * (1 + bend * size / most))

    limit = peak(1) + int(share * (peak(most) - peak(1)))
    found = search(peak, limit, most)
    assert true_largest(peak, limit, most) - 1 <= found.size <= true_largest(peak, limit, most)


def test_what_does_not_fit_alone_is_refused_after_one_probe():
    run: list[int] = []

    def peak(size: int) -> int:
        run.append(size)
        return 70 + 40 * size

    with refuses("memory_bytes=100"):
        largest_batch(peak, 100, fixed_bytes=70, most=9)
    assert run == [1]
    assert largest_batch(peak, 110, fixed_bytes=70, most=9).probes == ((1, 110),)
    assert largest_batch(peak, 10**6, fixed_bytes=70, most=1).probes == ((1, 110),)


# ---- the memory model of a simulated card -------------------------------------------------------


def cell_of(system: str, platform: str, **knobs: Scalar) -> Cell:
    simulated = platform != "cpu-tiny"
    if simulated:
        knobs.setdefault("reading", "efficient")
    return a_cell(system, platform=platform, executor="roofline" if simulated else "torch", **knobs)


def planned(cell: Cell) -> DllmDeployment:
    deployment = prepare(cell).deployment
    assert isinstance(deployment, DllmDeployment)
    return deployment


def footprint_of(deployment: DllmDeployment, longest: int, *, is_upstream: bool = False) -> StaticFootprint:
    settings, method = deployment.settings, deployment.method
    assert isinstance(method, PublishedMethod)
    return method.footprint(
        settings.shape,
        deployment.sampler,
        settings.generation,
        memory_bytes=settings.memory_limit,
        longest=longest,
        is_upstream=is_upstream,
    )


@pytest.mark.parametrize(("platform", "system"), list(product(("rtx4090", "l40s"), SYSTEMS)))
def test_on_a_card_the_search_is_exact_and_stays_inside(monkeypatch, platform, system):
    probes: list[tuple[int, int]] = []

    def recording(*arguments: object, **named: object) -> FoundBatch:
        found = largest_batch(*arguments, **named)
        probes.extend(found.probes)
        return found

    monkeypatch.setattr(deployments, "largest_batch", recording)
    for input_len in (100, 300, 1000, 3744):
        probes.clear()
        deployment = planned(cell_of(system, platform, input_len=input_len, length_scale=1.0))
        settings = deployment.settings
        assert deployment.longest == input_len + 256
        footprint = footprint_of(deployment, deployment.longest)
        true = (settings.memory_limit - footprint.fixed_bytes) // footprint.per_request_bytes
        assert deployment.batch_size == min(true, 256)
        assert probes
        assert all(held <= settings.memory_limit for _, held in probes)
        assert deployment.facts["batch_peak_bytes"] == footprint.peak_bytes(deployment.batch_size)


@pytest.mark.parametrize("reading", ["efficient", "published"])
@pytest.mark.parametrize(("platform", "system"), list(product(("rtx4090", "l40s"), SYSTEMS)))
def test_a_batch_that_was_asked_for_must_fit_a_card(platform, system, reading):
    """In published code's memory where that is simulated, though it is run with one request whatever that takes."""

    def facts_of(size: int) -> object:
        cell = cell_of(system, platform, input_len=744, length_scale=1.0, reading=reading, batch_size=size)
        return planned(cell).facts

    deployment = planned(cell_of(system, platform, input_len=744, length_scale=1.0, reading=reading))
    settings = deployment.settings
    footprint = footprint_of(deployment, 1000, is_upstream=reading == "published")
    fitting = (settings.memory_limit - footprint.fixed_bytes) // footprint.per_request_bytes
    size = max(1, fitting)
    peak = footprint.peak_bytes(size)
    assert facts_of(size) == {"batch_size": size, "batch_obtained": "asked for", "batch_peak_bytes": peak} | (
        {"oom_requests": 0 if fitting else 256} if reading == "published" else {}
    )
    with pytest.raises(
        UserError, match=rf"batch_size={size + 1} does not fit .* which holds {fitting}: ask for no more"
    ):
        facts_of(size + 1)


def test_fast_dllm_fits_its_longest_request_on_24_gb():
    """4000 tokens: float64 copies of all their logits would take 8 GB more."""
    deployment = planned(cell_of("fast-dllm", "rtx4090", input_len=3744, length_scale=1.0))
    assert deployment.longest == 4000
    assert deployment.batch_size == 1
    ours, theirs = (footprint_of(deployment, 4000, is_upstream=flag) for flag in (False, True))
    vocabulary = 126464
    assert theirs.per_request_bytes - ours.per_request_bytes == 4000 * vocabulary * 16
    assert ours.fixed_bytes - theirs.fixed_bytes == 128 * vocabulary * 16
    assert ours.peak_bytes(1) < deployment.settings.memory_limit < theirs.peak_bytes(1)


# ---- measured -----------------------------------------------------------------------------------

SHORT = {"num_prompts": 8, "gen_length": 16, "block_length": 8, "steps": 8, "input_len": 106, "length_scale": 1.0}
MIB = 2**20


def tiny_cell(system: str, **knobs: Scalar) -> Cell:
    return cell_of(system, "cpu-tiny", **{**SHORT, "memory_limit": 12 * MIB, **knobs})


def measured_facts(cell: Cell) -> Mapping[str, Any]:
    return on_torch.assemble(planned(cell))[1].facts


@pytest.mark.parametrize("system", SYSTEMS)
def test_the_model_and_the_measurement_agree(system):
    """The model keeps all temporaries of a layer alive together, and leaves out attention's scores: a member
    takes 60 to 100 % of what it says, and no batch more."""
    held: dict[int, int] = {}
    for size in (4, 8):
        cell = tiny_cell(system, max_num_seqs=size, memory_limit=60 * MIB)
        facts = measured_facts(cell)
        assert facts["batch_size"] == size
        held[size] = facts["batch_peak_bytes"]
    footprint = footprint_of(planned(cell), 122)
    assert 0.6 < (held[8] - held[4]) / 4 / footprint.per_request_bytes < 1
    for size, found in held.items():
        assert 0.75 < found / footprint.peak_bytes(size) < 1


@pytest.mark.parametrize("system", SYSTEMS)
def test_a_measured_batch_runs_within_the_memory(system):
    """The whole workload, not just the steps that were probed; and a batch of one member more would not have fitted."""
    settings = planned(tiny_cell(system)).settings
    on_torch.load(*on_torch.model_key(settings))

    def run(size: int | None = None) -> int:
        cell = tiny_cell(system) if size is None else tiny_cell(system, batch_size=size, memory_limit=24 * MIB)
        experiment = prepare(cell)
        # The search measures too, which cannot be done while this does; what it found is kept.
        on_torch.assemble(experiment.deployment)

        def serve() -> None:
            with experiment.deployment.serving() as (engine, _):
                for request in experiment.workload.requests[:size]:
                    engine.submit(request)
                engine.run()

        return base_bytes(settings.shape, settings.memory_limit) + peak_bytes(serve, torch.device("cpu"))

    facts = measured_facts(tiny_cell(system))
    assert facts["batch_obtained"] == "largest that holds the workload's longest request, by the measured peak"
    assert 1 < facts["batch_size"] < 8
    held = run()
    assert 0.9 * facts["batch_peak_bytes"] < held <= settings.memory_limit
    assert run(facts["batch_size"] + 1) > settings.memory_limit


@pytest.mark.parametrize("is_enabled", [True, False])
def test_a_peak_does_not_depend_on_when_garbage_is_looked_for(is_enabled):
    """What an earlier run left, freed in the middle of this one, would hide as many bytes."""

    def leave_garbage() -> None:
        left = SimpleNamespace(memory=torch.empty(2 * MIB, dtype=torch.uint8))
        left.itself = left

    def run() -> None:
        leave_garbage()
        many: list[object] = [[] for _ in range(1000)]  # enough that garbage would be looked for
        del many
        torch.empty(MIB, dtype=torch.uint8)

    was_enabled, threshold, device = gc.isenabled(), gc.get_threshold(), torch.device("cpu")
    gc.disable()
    try:
        peak_bytes(leave_garbage, device)
        gc.set_threshold(100, 1, 1)
        if is_enabled:
            gc.enable()
        assert peak_bytes(run, device) == 3 * MIB
        assert gc.isenabled() is is_enabled
    finally:
        gc.set_threshold(*threshold)
        (gc.enable if was_enabled else gc.disable)()


def test_a_batch_that_was_asked_for_must_fit_when_it_is_tried():
    def facts_of(**knobs: Scalar) -> Mapping[str, Any]:
        return measured_facts(tiny_cell("sparse-dllm", **knobs))

    largest = facts_of()
    size = largest["batch_size"]
    assert facts_of(batch_size=size) == {**largest, "batch_obtained": "asked for"}
    with pytest.raises(UserError, match=rf"batch_size={size + 1} does not fit .* which holds {size}: ask for no more"):
        facts_of(batch_size=size + 1)
    # No more than there are requests are ever together.
    all_of_them = facts_of(batch_size=50, memory_limit=24 * MIB)
    assert all_of_them["batch_size"] == SHORT["num_prompts"] == 8
    assert all_of_them["batch_obtained"] == "asked for 50, all 8 requests"
    with refuses("batch_size=9"):
        facts_of(batch_size=9, max_num_seqs=4)


def forget_measured() -> None:
    on_torch._largest_measured.cache_clear()
    on_torch._batch_bytes.cache_clear()


def test_it_is_measured_once_for_all_rates(monkeypatch):
    sizes: list[int] = []
    original = on_torch.static_batch_bytes

    def counting(*arguments: object, **named: object) -> int:
        sizes.append(named["batch_size"])
        return original(*arguments, **named)

    monkeypatch.setattr(on_torch, "static_batch_bytes", counting)
    forget_measured()
    facts = []
    for rate in (None, 4.0, 8.0):
        cell = a_cell("sparse-dllm", rate=rate, **SHORT, memory_limit=12 * MIB)
        facts.append(measured_facts(cell))
    assert facts[0] == facts[1] == facts[2]
    once = list(sizes)
    # Another number of requests asks for sizes that were run, most of them.
    fewer = {**SHORT, "num_prompts": 3}
    assert measured_facts(a_cell("sparse-dllm", rate=4.0, **fewer, memory_limit=12 * MIB))["batch_size"] == 3
    assert sizes == [*once, 1, 3]
    sizes.clear()
    forget_measured()
    assert measured_facts(cell) == facts[0]
    assert sizes == once


def test_planning_measures_nothing(monkeypatch):
    monkeypatch.setattr(on_torch, "static_batch_bytes", None)
    assert (
        planned(tiny_cell("sparse-dllm")).facts["batch_obtained"]
        == "largest that holds the workload's longest request, by the memory model"
    )
    asked = planned(tiny_cell("sparse-dllm", batch_size=3)).facts
    assert asked == {"batch_size": 3, "batch_obtained": "asked for"}


def test_a_batch_whose_cache_finds_no_memory_is_one_that_does_not_fit(monkeypatch):
    """Its slabs are allocated before any step."""
    made = FastDllm.static_torch

    def starved(self: FastDllm, *args: Any, batch_size: int, **options: Any) -> Any:
        if batch_size > 2:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return made(self, *args, batch_size=batch_size, **options)

    monkeypatch.setattr(FastDllm, "static_torch", starved)
    forget_measured()
    cell = tiny_cell("fast-dllm", memory_limit=61 * MIB)
    assert measured_facts(cell)["batch_size"] == 2

    def broken(self: FastDllm, *args: Any, **options: Any) -> Any:
        raise RuntimeError("something else")

    monkeypatch.setattr(FastDllm, "static_torch", broken)
    forget_measured()
    with pytest.raises(RuntimeError, match="something else"):
        measured_facts(tiny_cell("fast-dllm", memory_limit=62 * MIB))
    forget_measured()
