"""The executor on CUDA: the same ids as on a CPU, replayed or not, and no waiting for the device."""

import gc
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import replace
from functools import lru_cache
from typing import Any

import pytest
import torch
from support.engine_runs import rows_of
from support.on_card import no_waiting
from support.tiny_models import GQA, MHA, MQA, TinyModel, network, request_on

from baselines.dllm.static.executor import padded_executor
from baselines.dllm.static.scheduler import StaticBatchScheduler
from engines import kernels
from engines.attention.registry import availability
from engines.dllm.config import DelayedCache, EngineConfig, GenerationConfig, SparsityConfig
from engines.dllm.denoise import Reduced
from engines.dllm.engine import Engine
from engines.dllm.executor.compose import packed_executor
from engines.dllm.executor.torch import TorchExecutor
from engines.dllm.plan import Request, StepRecord
from engines.dllm.scheduling import KvPool, PhaseScheduler
from engines.models.llada import LLaDAModelLM
from engines.runtime.graphs import capture_stream
from engines.runtime.step_timer import STEP_PARTS, CudaTimer

pytestmark = pytest.mark.gpu

CONFIG = EngineConfig(max_num_batched_tokens=2000, max_num_logits=64, max_num_seqs=8, max_model_len=200)
BLOCK = 8


@lru_cache
def on_gpu(model: TinyModel, dtype: torch.dtype) -> LLaDAModelLM:
    return deepcopy(network(model)).to("cuda", dtype)


def requests_of(model: TinyModel, count: int = 6) -> list[Request]:
    return [
        request_on(model, i, 20 + 9 * i, GenerationConfig(gen_length=24, block_length=BLOCK, steps=24))
        for i in range(count)
    ]


def engine_of(
    model: TinyModel, dtype: torch.dtype, config: EngineConfig, device: str = "cuda", profile_every: int = 0
) -> Engine:
    rows = sum(rows_of(request, config.sparsity) for request in requests_of(model))
    weights = network(model) if device == "cpu" else on_gpu(model, dtype)
    executor = packed_executor(weights, config, rows, profile_every=profile_every)
    executor.prepare(BLOCK)
    return Engine(PhaseScheduler(config, KvPool(rows), DelayedCache(delay=1)), executor)


def run(engine: Engine, requests: Sequence[Request]) -> tuple[list[object], list[StepRecord]]:
    for request in requests:
        engine.submit(request)
    records = engine.run()
    return [engine.take_output(request.request_id) for request in requests], records


def agreement(found: Sequence[object], wanted: Sequence[object]) -> float:
    """Share of equal ids."""
    pairs = [(a, b) for x, y in zip(found, wanted, strict=True) for a, b in zip(x, y, strict=True)]
    return sum(a == b for a, b in pairs) / len(pairs)


@pytest.mark.parametrize("selection", ["head", "uniform", "dense"])
@pytest.mark.parametrize("model", [MHA, GQA, MQA], ids=lambda model: model.name)
def test_float32_gives_the_ids_of_a_cpu(model, selection):
    config = replace(CONFIG, sparsity=SparsityConfig(selection=selection))
    wanted, _ = run(engine_of(model, torch.float32, config, "cpu"), requests_of(model))
    for backend in ("sdpa", "sdpa-padded"):
        engine = engine_of(model, torch.float32, replace(config, attention_backend=backend))
        assert run(engine, requests_of(model))[0] == wanted


@pytest.mark.parametrize("model", [MHA, GQA], ids=lambda model: model.name)
def test_replayed_steps_give_the_ids_of_eager_ones(model):
    eager, _ = run(engine_of(model, torch.bfloat16, replace(CONFIG, cuda_graphs=False)), requests_of(model))
    engine = engine_of(model, torch.bfloat16, CONFIG)
    replayed, records = run(engine, requests_of(model))
    if engine.executor.graphs is None:
        pytest.skip(f"{engine.executor.kernels.attention.name} does not read the pool in place")
    assert any(record.outcome.graph for record in records)
    # All but the steps that build a cache, the second of each block.
    assert [record.outcome.graph for record in records] == [record.step % BLOCK != 1 for record in records]
    # Rows are padded to a graph's size, so a product may be summed by another kernel.
    assert agreement(replayed, eager) > 0.9


def test_every_backend_agrees_in_bfloat16():
    shape = GQA.config
    found = availability(torch.device("cuda"), torch.bfloat16, shape.head_dim, shape.n_heads, shape.n_kv_heads)
    wanted, _ = run(engine_of(GQA, torch.bfloat16, replace(CONFIG, attention_backend="sdpa")), requests_of(GQA))
    for name, why_not in found.items():
        if why_not is None:
            ids, _ = run(engine_of(GQA, torch.bfloat16, replace(CONFIG, attention_backend=name)), requests_of(GQA))
            assert agreement(ids, wanted) > 0.9, name


def test_fused_kernels_agree_with_torch_operators():
    if not kernels.available(torch.device("cuda")):
        pytest.skip("triton is not installed")
    wanted, _ = run(engine_of(GQA, torch.bfloat16, replace(CONFIG, fused_kernels=False)), requests_of(GQA))
    fused, _ = run(engine_of(GQA, torch.bfloat16, CONFIG), requests_of(GQA))
    assert agreement(fused, wanted) > 0.9


def test_no_kernel_is_passed_over():
    if not kernels.available(torch.device("cuda")):
        pytest.skip("triton is not installed")
    executor = engine_of(GQA, torch.bfloat16, CONFIG).executor
    assert isinstance(executor, TorchExecutor)
    paths = executor.paths()
    assert paths["fused_kernels"] is True
    assert paths["kernel_faults"] == {}
    assert "torch-varlen" not in paths["attention_unavailable"]


@pytest.mark.parametrize("graphs", [True, False])
def test_steps_do_not_wait_for_the_device(graphs):
    """But for those that end a request, whose ids are read."""
    run(engine_of(GQA, torch.bfloat16, replace(CONFIG, cuda_graphs=graphs)), requests_of(GQA))  # compiles
    engine = engine_of(GQA, torch.bfloat16, replace(CONFIG, cuda_graphs=graphs))
    for request in requests_of(GQA):
        engine.submit(request)
    for _ in range(23):
        with no_waiting():
            engine.step()
    assert engine.step() is not None
    assert not engine.has_work


def test_what_the_device_took_is_known_afterwards():
    engine = engine_of(GQA, torch.bfloat16, CONFIG, profile_every=3)
    assert isinstance(engine.executor.timer, CudaTimer)
    _, records = run(engine, requests_of(GQA))
    assert len(records) == 24
    for record in records:
        assert record.outcome.forward_s is not None
        assert record.outcome.forward_s > 0
        assert (record.outcome.parts is not None) == (record.step % 3 == 0)
        if record.outcome.parts is not None:
            assert record.outcome.parts.keys() == set(STEP_PARTS)
            assert min(record.outcome.parts.values()) >= 0
            assert record.outcome.parts["attention"] > 0


def test_static_batches_run_on_the_gpu():
    config = replace(CONFIG, sparsity=SparsityConfig(selection="uniform"), suppress_mask_token=False)
    ids = {}
    for device in ("cpu", "cuda"):
        requests = requests_of(GQA, 4)
        rows = 4 * max(rows_of(request, config.sparsity) for request in requests)
        model = network(GQA) if device == "cpu" else on_gpu(GQA, torch.float32)
        engine = Engine(
            StaticBatchScheduler(config, KvPool(rows), DelayedCache(delay=1), batch_size=4),
            padded_executor(model, config, rows, batch_size=4),
        )
        ids[device] = run(engine, requests)[0]
    assert ids["cuda"] == ids["cpu"]


def test_running_out_of_memory_costs_the_requests_of_a_step():
    engine = engine_of(GQA, torch.bfloat16, CONFIG)
    executor = engine.executor
    assert isinstance(executor, TorchExecutor)
    head = executor.head

    class Greedy:
        logit_rows = staticmethod(head.logit_rows)

        def __call__(self, *inputs: Any) -> Reduced:
            free, _ = torch.cuda.mem_get_info()
            hoard = torch.empty(2 * free, dtype=torch.uint8, device="cuda")
            found = head(*inputs)
            del hoard
            return found

    executor.head = Greedy()
    for request in requests_of(GQA):
        engine.submit(request)
    record = engine.step()
    assert record is not None
    assert len(record.done.failed) == 6
    assert all("out of memory" in reason for _, reason in record.done.failed)
    executor.head = head
    wanted, _ = run(engine_of(GQA, torch.bfloat16, CONFIG), requests_of(GQA))
    again, _ = run(engine, requests_of(GQA))
    assert again == wanted


def test_a_closed_executor_gives_its_memory_back():
    """Graphs and pool go at once; what is left goes with the last reference, without the collector."""
    run(engine_of(GQA, torch.bfloat16, CONFIG), requests_of(GQA))  # workspaces and tables are made once
    torch.cuda.synchronize()
    gc.collect()
    before = torch.cuda.memory_allocated()
    engine = engine_of(GQA, torch.bfloat16, CONFIG)
    run(engine, requests_of(GQA))
    pool = engine.executor.pool.k.nbytes + engine.executor.pool.v.nbytes
    held = torch.cuda.memory_allocated()
    gc.disable()
    try:
        engine.close()
        assert torch.cuda.memory_allocated() <= held - pool
        del engine
        assert torch.cuda.memory_allocated() == before
    finally:
        gc.enable()


def test_captures_share_one_stream():
    """cuBLAS keeps a workspace for every stream it has met: a second set of graphs takes no second one."""
    device = torch.device("cuda", torch.cuda.current_device())
    assert capture_stream(device) is capture_stream(device)
    engines = [engine_of(GQA, torch.bfloat16, CONFIG) for _ in range(2)]
    held = []
    for engine in engines:
        engine.close()
        held.append(torch.cuda.memory_allocated())
    engine_of(GQA, torch.bfloat16, CONFIG).close()
    assert torch.cuda.memory_allocated() <= held[0]


def test_an_executor_runs_on_the_device_of_its_model():
    """Whatever the current device is."""
    if torch.cuda.device_count() < 2:
        pytest.skip(f"needs 2 CUDA devices, torch sees {torch.cuda.device_count()}")
    wanted, records = run(engine_of(GQA, torch.bfloat16, CONFIG), requests_of(GQA))
    rows = sum(rows_of(request, CONFIG.sparsity) for request in requests_of(GQA))
    model = deepcopy(network(GQA)).to("cuda:1", torch.bfloat16)
    with torch.cuda.device(0):
        before = torch.cuda.memory_allocated(0)
        executor = packed_executor(model, CONFIG, rows, profile_every=3)
        executor.prepare(BLOCK)
        engine = Engine(PhaseScheduler(CONFIG, KvPool(rows), DelayedCache(delay=1)), executor)
        found, elsewhere = run(engine, requests_of(GQA))
        assert torch.cuda.memory_allocated(0) == before
    assert found == wanted
    assert sum(r.outcome.graph for r in elsewhere) >= sum(r.outcome.graph for r in records) - len(records) // 3 - 1
    assert all(r.outcome.forward_s for r in elsewhere)
