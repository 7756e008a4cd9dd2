"""No executor outlives its run: nothing keeps it but its user, and closing it gives its memory back."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from support.graph_recorders import CountingRecorder
from support.tiny_models import GQA, MHA, network, prompt_of
from torch.multiprocessing.reductions import StorageWeakRef

from baselines.dllm.dllm_cache.schedule import FeatureCacheConfig
from baselines.dllm.dllm_cache.torch_executor import feature_cache_executor
from baselines.dllm.static.executor import padded_executor
from baselines.dllm.static.scheduler import StaticBatchScheduler
from engines.cost.roofline import L40S, Roofline
from engines.dllm.config import DelayedCache, EngineConfig, GenerationConfig, NoCache
from engines.dllm.engine import Engine
from engines.dllm.executor import compose
from engines.dllm.executor.compose import packed_executor
from engines.dllm.executor.torch import LeadingExecutor, TorchExecutor
from engines.dllm.plan import Executor, Request
from engines.dllm.scheduling import KvPool, PhaseScheduler, Scheduler
from engines.dllm.simulated import BoundedExecutor, RooflineExecutor
from engines.models.shape import ModelShape
from engines.parallel.group import TensorParallel
from engines.runtime.device import limit_memory, on

CONFIG = EngineConfig(max_num_batched_tokens=120, max_num_logits=16, max_num_seqs=3, max_model_len=60)
REPLAYED = EngineConfig(
    max_num_batched_tokens=120, max_num_logits=16, max_num_seqs=3, max_model_len=60, attention_backend="sdpa-padded"
)
KV_ROWS = 150


def packed(config: EngineConfig = CONFIG, **how: Any) -> tuple[Scheduler, TorchExecutor]:
    scheduler = PhaseScheduler(config, KvPool(KV_ROWS), DelayedCache(delay=1))
    return scheduler, packed_executor(network(GQA), config, KV_ROWS, **how)


def replayed() -> tuple[Scheduler, TorchExecutor]:
    scheduler, executor = packed(REPLAYED, recorder=CountingRecorder())
    executor.prepare(8)
    return scheduler, executor


def padded() -> tuple[Scheduler, TorchExecutor]:
    scheduler = StaticBatchScheduler(CONFIG, KvPool(KV_ROWS), DelayedCache(delay=1), batch_size=3)
    return scheduler, padded_executor(network(MHA), CONFIG, KV_ROWS, batch_size=3)


def feature_cache() -> tuple[Scheduler, TorchExecutor]:
    scheduler = StaticBatchScheduler(CONFIG, KvPool(0), NoCache(), batch_size=3)
    return scheduler, feature_cache_executor(network(MHA), CONFIG, FeatureCacheConfig(gen_interval=3), batch_size=3)


MAKERS: dict[str, Callable[[], tuple[Scheduler, TorchExecutor]]] = {
    "packed": packed,
    "replayed": replayed,
    "padded": padded,
    "feature cache": feature_cache,
}
makers = pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)


def submit(engine: Engine, **generation: Any) -> None:
    settings = GenerationConfig(gen_length=16, block_length=8, steps=16, **generation)
    for i, length in enumerate((5, 9, 7)):
        ids = prompt_of(MHA, i, length)
        engine.submit(Request(request_id=i, prompt_len=length, prompt_ids=ids, generation=settings))


@contextmanager
def no_collection() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@makers
@pytest.mark.parametrize("steps", [3, None], ids=["in the middle", "to its end"])
def test_no_executor_outlives_its_run(make, steps):
    """References alone end it, whether or not it was closed, with a layout, graphs and features at hand."""
    scheduler, executor = make()
    engine = Engine(scheduler, executor)
    submit(engine)
    with no_collection():
        alive, pool = weakref.ref(executor), StorageWeakRef(executor.pool.k.untyped_storage())
        if steps is None:
            engine.run()
        else:
            for _ in range(steps):
                engine.step()
        del engine, executor
        assert alive() is None
        assert pool.expired()


@pytest.mark.parametrize("wrapper", ["leading", "bounded"])
def test_what_is_around_it_does_not_keep_it(wrapper):
    scheduler, executor = packed()
    around: Executor
    if wrapper == "leading":
        around = LeadingExecutor(executor, TensorParallel())
    else:
        shape = ModelShape.from_config(GQA.config, name="gqa", dtype_bytes=4)
        around = BoundedExecutor(executor, RooflineExecutor(Roofline(shape, L40S), CONFIG))
    engine = Engine(scheduler, around)
    submit(engine)
    with no_collection():
        alive = weakref.ref(executor)
        engine.run()
        engine.close()
        assert executor.pool.num_rows == 0
        del engine, around, executor
        assert alive() is None


@makers
def test_a_closed_executor_holds_nothing(make):
    scheduler, executor = make()
    engine = Engine(scheduler, executor)
    submit(engine)
    for _ in range(3):
        engine.step()
    with no_collection():
        storages = [StorageWeakRef(x.untyped_storage()) for x in (executor.pool.k, executor.pool.v)]
        recorder = executor.graphs._recorder if executor.graphs is not None else None
        engine.close()
        assert all(storage.expired() for storage in storages)
        assert executor.graphs is None or executor.graphs.keys == ()
        if isinstance(recorder, CountingRecorder):
            assert recorder.num_made > recorder.num_live == 0
        assert getattr(executor.forward, "batch", None) is None
    engine.close()
    with pytest.raises(AssertionError, match="closed"):
        engine.step()


def test_a_failed_step_keeps_nothing_either():
    scheduler, executor = packed()
    engine = Engine(scheduler, executor)
    submit(engine)
    engine.step()

    def fails(*inputs: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    executor.head = fails
    with no_collection():
        alive = weakref.ref(executor)
        record = engine.step()
        assert record is not None
        assert len(record.done.failed) == 3
        assert executor.layouts._last is None
        del engine, executor
        assert alive() is None


def test_garbage_is_collected_before_a_limit_is_set():
    """What only the collector frees would count against the limit."""
    events: list[str] = []

    class Allocator:
        def current_device(self) -> int:
            return 0

        def get_device_properties(self, device: int) -> Any:
            return type("Card", (), {"total_memory": 10**9})

        def set_per_process_memory_fraction(self, fraction: float, device: int) -> None:
            events.append("limited")

        def empty_cache(self) -> None:
            events.append("emptied")

    class Ring:
        def __init__(self) -> None:
            self.itself = self

        def __del__(self) -> None:
            events.append("collected")

    with no_collection():
        Ring()
        limit_memory(torch.device("cuda"), 10**9, Allocator())
    assert events == ["collected", "emptied", "limited"]


class Scope:
    """Counts who is inside."""

    def __init__(self) -> None:
        self.depth = self.num_entered = 0

    def __call__(self, *_: object) -> Scope:
        return self

    def __enter__(self) -> None:
        self.depth += 1
        self.num_entered += 1

    def __exit__(self, *_: object) -> None:
        self.depth -= 1


def test_everything_of_an_executor_happens_on_its_device():
    """``--device cuda:1``: events and graphs belong to the current device, which is another where nobody says so."""
    _, executor = packed(REPLAYED, recorder=CountingRecorder())
    scope = executor.scope = Scope()
    inside: list[str] = []

    class Inside:
        """Stands for a part; notes that it was used, and where."""

        def __init__(self, part: Any) -> None:
            self._part = part

        def __getattr__(self, name: str) -> Any:
            assert scope.depth > 0, f"{name} is used outside"
            inside.append(name)
            return getattr(self._part, name)

    for name in ("timer", "graphs", "layouts", "pool", "state"):
        setattr(executor, name, Inside(getattr(executor, name)))
    engine = Engine(PhaseScheduler(REPLAYED, KvPool(KV_ROWS), DelayedCache(delay=1)), executor)
    executor.prepare(8)
    submit(engine)
    engine.run()
    engine.close()
    assert {"capture", "begin", "lap", "end", "wait", "times", "admit", "release", "of", "close"} <= set(inside)
    assert scope.depth == 0


def test_parts_are_made_on_their_device(monkeypatch):
    scope = Scope()
    depths: list[int] = []
    choice = compose.KernelChoice

    def noting(*inputs: Any, **options: Any) -> Any:
        depths.append(scope.depth)
        return choice(*inputs, **options)

    monkeypatch.setattr(compose, "on", scope)
    monkeypatch.setattr(compose, "KernelChoice", noting)
    packed()
    padded()
    feature_cache()
    assert depths == [1, 1, 1]


def test_only_cuda_devices_are_made_current(monkeypatch):
    asked: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "device", lambda device: asked.append(device) or Scope())
    for name in ("cpu", "cuda:1"):
        with on(torch.device(name)):
            pass
    assert asked == [torch.device("cuda:1")]
