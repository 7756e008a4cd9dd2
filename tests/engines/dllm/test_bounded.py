"""What a step could not be faster than, beside what it took."""

from collections.abc import Callable, Mapping
from dataclasses import replace

import pytest
import torch
from support.cells import a_cell
from support.engine_runs import CALIBRATION, Recorder, roofline
from support.tiny_models import GQA, MHA, TinyModel, network, request_on

from baselines.dllm.dllm_cache.method import FeatureCacheRooflineExecutor
from baselines.dllm.dllm_cache.schedule import FeatureCacheConfig
from baselines.dllm.dllm_cache.torch_executor import feature_cache_executor
from baselines.dllm.static.scheduler import StaticBatchScheduler
from engines.cost.peaks import REPEATS, measured_peaks, seconds_of
from engines.cost.roofline import H200, Roofline
from engines.dllm.config import DelayedCache, EngineConfig, GenerationConfig, NoCache
from engines.dllm.engine import Engine
from engines.dllm.executor.compose import packed_executor
from engines.dllm.plan import Executor, ExecutorError, Request, StepOutcome, StepPlan, StepRecord
from engines.dllm.scheduling import KvPool, PhaseScheduler
from engines.dllm.simulated import BoundedExecutor, RooflineExecutor, step_work
from engines.runtime.step_timer import STEP_PARTS, DeviceTimes
from repro.families.dllm import on_torch
from repro.families.dllm.deployment import DllmDeployment
from repro.runs.experiment import prepare

GENERATION = GenerationConfig(gen_length=8, block_length=4, steps=8)
CONFIG = EngineConfig(max_num_batched_tokens=64, max_num_seqs=4)


def requests(model: TinyModel = GQA, lengths: tuple[int, ...] = (5, 12, 3)) -> list[Request]:
    return [request_on(model, i, n, GENERATION) for i, n in enumerate(lengths)]


def serve(executor: Executor) -> Engine:
    engine = Engine(PhaseScheduler(CONFIG, KvPool(60), DelayedCache()), executor)
    for request in requests():
        engine.submit(request)
    return engine


def test_bounds_are_the_datasheet_s_whatever_is_charged():
    recorder = Recorder(RooflineExecutor(roofline(calibration=CALIBRATION), CONFIG))
    records = serve(recorder).run()
    assert [r.outcome.bound_s for r in records] == [
        roofline().lower_bound_s(step_work(p, CONFIG)) for p in recorder.plans
    ]
    assert all(0 < r.outcome.bound_s < r.duration_s for r in records if r.outcome.bound_s is not None)
    assert len({r.outcome.bound_s for r in records}) > 2


def test_a_measured_run_has_the_bounds_of_its_simulation():
    """Nothing else differs from the executor alone, not even the tokens."""
    plain = serve(packed_executor(network(GQA), CONFIG, 60))
    bounded = serve(BoundedExecutor(packed_executor(network(GQA), CONFIG, 60), RooflineExecutor(roofline(), CONFIG)))
    simulated = serve(RooflineExecutor(roofline(), CONFIG)).run()
    alone, records = plain.run(), bounded.run()
    assert [r.outcome.bound_s for r in records] == [r.outcome.bound_s for r in simulated]
    assert [timeless(r) for r in records] == [timeless(r) for r in alone]
    assert {r.outcome.bound_s for r in alone} == {None}
    assert [plain.take_output(i) for i in range(3)] == [bounded.take_output(i) for i in range(3)]


def timeless(record: StepRecord) -> StepRecord:
    return record._replace(duration_s=0.0, outcome=record.outcome._replace(forward_s=0.0, bound_s=None))


def test_dllm_cache_counts_its_own_work():
    config = EngineConfig(max_num_batched_tokens=200, max_num_seqs=2, suppress_mask_token=False)
    cache = FeatureCacheConfig(gen_interval=3, prompt_interval=5)

    def bounds(make: Callable[[], Executor]) -> list[float | None]:
        scheduler = StaticBatchScheduler(config, KvPool(0), NoCache(), batch_size=2)
        engine = Engine(scheduler, make())
        for request in requests(MHA):
            engine.submit(request)
        return [record.outcome.bound_s for record in engine.run()]

    def simulated() -> FeatureCacheRooflineExecutor:
        return FeatureCacheRooflineExecutor(roofline(MHA), config, cache)

    def measured() -> BoundedExecutor:
        return BoundedExecutor(feature_cache_executor(network(MHA), config, cache, batch_size=2), simulated())

    found = bounds(measured)
    assert found == bounds(simulated)
    assert found != bounds(lambda: RooflineExecutor(roofline(MHA), config))


class Failing:
    """Fails at its third step."""

    def __init__(self) -> None:
        self.inner = RooflineExecutor(roofline(), CONFIG)
        self.num_steps = 0
        self.validate, self.release = self.inner.validate, self.inner.release
        self.wait, self.times = self.inner.wait, self.inner.times

    def execute(self, plan: StepPlan) -> StepOutcome:
        self.num_steps += 1
        if self.num_steps == 3:
            raise ExecutorError("out of memory: use a smaller batch")
        return self.inner.execute(plan)


def test_a_step_that_failed_has_no_bound():
    records = serve(BoundedExecutor(Failing(), RooflineExecutor(roofline(), CONFIG))).run()
    assert [r.outcome.bound_s is None for r in records] == [bool(r.done.failed) for r in records]
    assert sum(bool(r.done.failed) for r in records) == 1


class Profiled:
    """A simulated step that claims ``seconds`` in every part, at once or when it is asked."""

    def __init__(self, seconds: float, *, lags: bool) -> None:
        self.inner = RooflineExecutor(roofline(), CONFIG)
        self.parts = dict.fromkeys(STEP_PARTS, seconds)
        self.lags, self.num_steps = lags, 0
        self.validate, self.release, self.wait = self.inner.validate, self.inner.release, self.inner.wait

    def execute(self, plan: StepPlan) -> StepOutcome:
        self.num_steps += 1
        outcome = self.inner.execute(plan)._replace(duration_s=None)
        return outcome._replace(forward_s=None) if self.lags else outcome._replace(parts=self.parts)

    def times(self) -> Mapping[int, DeviceTimes]:
        return {i: DeviceTimes(forward_s=1.0, parts=self.parts) for i in range(self.num_steps)} if self.lags else {}


def test_the_engine_s_own_time_is_idle_unless_parts_are_longer():
    for record in serve(Profiled(0.0, lags=False)).run():
        assert record.outcome.parts is not None
        assert record.outcome.parts["idle"] == record.duration_s > 0
        assert sum(record.outcome.parts.values()) == record.duration_s
    executor = Profiled(1e3, lags=False)
    assert all(record.outcome.parts == executor.parts for record in serve(executor).run())


def test_what_a_device_says_is_not_held_against_the_host_s_clock():
    executor = Profiled(1e-9, lags=True)
    for record in serve(executor).run():
        assert (record.outcome.parts, record.outcome.forward_s) == (executor.parts, 1.0)


def test_rates_are_work_over_time(monkeypatch):
    """Where a product of n x n takes n^3 ns, 1024 x 1024 8 times that, and a copy 1 ms."""

    def takes(run: Callable[[], object], device: torch.device, repeats: int = REPEATS) -> list[float]:
        result = run()
        assert isinstance(result, torch.Tensor)
        n = result.shape[0]
        return [1e-3] * repeats if result.dim() == 1 else [n**3 * 1e-9 * (8 if n == 1024 else 1)] * repeats

    monkeypatch.setattr("engines.cost.peaks.seconds_of", takes)
    monkeypatch.setattr("engines.cost.peaks.BUDGET_S", float("inf"))
    peaks = measured_peaks(torch.device("cpu"), torch.float32)
    assert peaks.flops_per_s == pytest.approx(2e9)
    assert peaks.bytes_per_s == pytest.approx(2 * 64 * 2**20 * 1e3)
    assert "float32 matrix products of 256, 512, 1024 and of a copy of 64 MiB" in peaks.how
    # The largest would take 6 x 1 s.
    monkeypatch.setattr("engines.cost.peaks.BUDGET_S", 1.0)
    assert "products of 256, 512 and" in measured_peaks(torch.device("cpu"), torch.float32).how


def test_every_repeat_is_timed_and_the_first_run_is_not():
    ran: list[int] = []
    assert len(seconds_of(lambda: ran.append(1), torch.device("cpu"), 3)) == 3
    assert len(ran) == 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_peaks_of_this_machine(dtype, monkeypatch):
    monkeypatch.setattr("engines.cost.peaks.BUDGET_S", 0.05)
    peaks = measured_peaks(torch.device("cpu"), dtype)
    assert 1e8 < peaks.flops_per_s < 1e15
    assert 1e8 < peaks.bytes_per_s < 1e13


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_peaks_of_this_card(dtype):
    peaks = measured_peaks(torch.device("cuda"), dtype)
    assert 1e11 < peaks.flops_per_s < 1e16
    assert 1e10 < peaks.bytes_per_s < 1e14


def bound_of(monkeypatch: pytest.MonkeyPatch, device_name: str | None, **knobs: object) -> Roofline | None:
    """For a measured run of the embedded model; on a CUDA device of that name where there is one."""
    system = "llada" if "cfg_scale" in knobs else "dllm-serve"
    cell = a_cell(system, **{"num_prompts": 1, **knobs})
    deployment = prepare(cell).deployment
    assert isinstance(deployment, DllmDeployment)
    settings = deployment.settings
    if device_name is not None:
        settings = replace(settings, device="cuda")
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: device_name)
    return on_torch._card_roofline(settings)


def test_whose_peaks_bound_a_measured_run(monkeypatch):
    assert bound_of(monkeypatch, None) is None
    assert bound_of(monkeypatch, "NVIDIA A100-SXM4-40GB") is None
    for profiled in ({}, {"profile_every": 7}):
        known = bound_of(monkeypatch, "NVIDIA H200", **profiled)
        assert known is not None
        assert known.gpu is H200
        assert not known.calibration.fitted_on
        assert known.shape.dtype_bytes == 4
    here = bound_of(monkeypatch, None, profile_every=1)
    assert here is not None
    assert here.gpu.name == "this cpu (measured peaks)"
    assert bound_of(monkeypatch, None, profile_every=1, quantization="int8") is None
    # The second forward of guided requests has no cost in the model.
    assert bound_of(monkeypatch, "NVIDIA H200", cfg_scale=1.0) is None
