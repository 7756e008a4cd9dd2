"""What replaying a captured forward does to a step's metadata, without a GPU: the forward runs as it is on a graph's
padded buffers. And running steps through another attention backend."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.engine_runs import rows_of
from support.graph_recorders import EagerRecorder
from support.tiny_models import GQA, MHA, TinyModel, network, request_on

from engines.dllm.config import DelayedCache, EngineConfig, GenerationConfig, SparsityConfig
from engines.dllm.engine import Engine
from engines.dllm.executor.compose import packed_executor
from engines.dllm.executor.graphs import MAX_ROWS, ROWS, graph_key, reuse_keys
from engines.dllm.executor.torch import TorchExecutor
from engines.dllm.plan import Request, StepRecord
from engines.dllm.scheduling import KvPool, PhaseScheduler
from engines.runtime.step_timer import STEP_PARTS

CONFIG = EngineConfig(
    max_num_batched_tokens=400, max_num_logits=64, max_num_seqs=6, max_model_len=100, attention_backend="sdpa-padded"
)


def replaying(model: TinyModel, config: EngineConfig, kv_rows: int) -> TorchExecutor:
    """As on CUDA, but a graph is its forward."""
    return packed_executor(network(model), config, kv_rows, recorder=EagerRecorder())


def requests_of(model: TinyModel, sizes: Sequence[tuple[int, int]], block: int) -> list[Request]:
    return [
        request_on(model, i, prompt, GenerationConfig(gen_length=gen, block_length=block, steps=gen))
        for i, (prompt, gen) in enumerate(sizes)
    ]


def serve(executor: TorchExecutor, requests: Sequence[Request]) -> tuple[list[object], list[StepRecord]]:
    rows = executor.pool.num_rows - (executor.graphs is not None)
    engine = Engine(PhaseScheduler(executor.config, KvPool(rows), DelayedCache(delay=1)), executor)
    for request in requests:
        engine.submit(request)
    records = engine.run()
    return [engine.take_output(request.request_id) for request in requests], records


def pool_rows(requests: Sequence[Request], config: EngineConfig) -> int:
    return sum(rows_of(request, config.sparsity) for request in requests)


@settings(max_examples=9)
@given(
    st.sampled_from((GQA, MHA)),
    st.lists(st.tuples(st.integers(1, 60), st.integers(1, 24)), min_size=1, max_size=6),
    st.integers(1, 9),
    st.sampled_from(("head", "uniform", "dense")),
)
def test_graphs_and_padded_attention_give_the_ids_of_plain_steps(model, sizes, block, selection):
    config = replace(CONFIG, sparsity=SparsityConfig(selection=selection))
    requests = requests_of(model, sizes, block)
    rows = pool_rows(requests, config)
    plain, records = serve(packed_executor(network(model), replace(config, attention_backend="sdpa"), rows), requests)
    padded, _ = serve(packed_executor(network(model), config, rows), requests)
    executor = replaying(model, config, rows)
    capture_all(executor)
    replayed, replayed_records = serve(executor, requests)
    assert padded == plain
    assert replayed == plain
    for before, after in zip(records, replayed_records, strict=True):
        assert not before.outcome.graph
        builds = after.plan.num_refresh > 0 and after.outcome.query_rows > 0 and not after.outcome.graph
        assert after.outcome.graph or builds or after.outcome.query_rows > MAX_ROWS
    assert any(record.outcome.graph for record in replayed_records)


def capture_all(executor: TorchExecutor) -> None:
    graphs = executor.graphs
    assert graphs is not None
    with torch.inference_mode():
        for rows in ROWS:
            for sequences in range(1, 7):
                for has_refresh in (False, True):
                    graphs.capture(graph_key(rows, sequences, min(rows, 100), has_refresh=has_refresh))


def test_prepared_sizes_cover_every_step_that_builds_no_cache():
    requests = requests_of(GQA, [(20, 16), (33, 13), (9, 16)], 8)  # the last block of one is shorter
    executor = replaying(GQA, CONFIG, pool_rows(requests, CONFIG))
    executor.prepare(8)
    _, records = serve(executor, requests)
    builds = [record.step % 8 == 1 for record in records]
    assert [record.outcome.graph for record in records] == [not build for build in builds]
    assert (
        sum(record.outcome.graph and record.plan.num_refresh > 0 for record in records) == 2
    )  # one full forward a block


@given(st.integers(1, MAX_ROWS), st.integers(1, 256), st.integers(1, 256))
def test_a_graph_holds_its_steps(rows, sequences, longest):
    key = graph_key(rows, sequences, longest, has_refresh=False)
    assert rows <= key.rows <= max(8, 1.5 * rows)
    assert sequences <= key.sequences < 2 * sequences
    assert longest <= key.max_q < longest + 128


def test_reuse_keys_end_where_steps_run_eagerly():
    keys = set(reuse_keys(256, 32))
    assert {key.rows for key in keys} == {size for size in ROWS if size % 32 == 0}
    assert all(key.rows <= MAX_ROWS for key in keys)


def test_profiled_steps_are_divided_into_parts():
    requests = requests_of(GQA, [(20, 16), (33, 16)], 8)
    config = replace(CONFIG, attention_backend="sdpa")
    executor = packed_executor(network(GQA), config, pool_rows(requests, config), profile_every=2)
    _, records = serve(executor, requests)
    assert [record.outcome.parts is not None for record in records] == [i % 2 == 0 for i in range(len(records))]
    for record in records[::2]:
        assert record.outcome.parts is not None
        assert set(record.outcome.parts) == set(STEP_PARTS)
        assert min(record.outcome.parts.values()) >= 0
        assert sum(record.outcome.parts.values()) == pytest.approx(record.duration_s)
        assert min(record.outcome.parts[part] for part in ("attention", "gemm", "logits", "commit", "idle")) > 0
        assert record.outcome.forward_s == pytest.approx(
            sum(record.outcome.parts[part] for part in ("attention", "gemm", "logits", "selection"))
        )
    # The second step of each block builds the cache.
    every = packed_executor(network(GQA), config, pool_rows(requests, config), profile_every=1)
    _, records = serve(every, requests)
    packs = [record.outcome.parts is not None and record.outcome.parts["selection"] > 0 for record in records]
    assert packs == [i % 8 == 1 for i in range(len(records))]
