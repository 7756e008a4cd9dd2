"""Logit decomposition (dLLM-Serve §4.3) holds in memory: logits take what max_num_logits allows, whatever the batch."""

import pytest
import torch
from support.engine_runs import rows_of
from support.memory_probe import LogitsProbe
from support.tiny_models import TinyModel, network, request_on

from baselines.dllm.static.executor import padded_executor
from baselines.dllm.static.scheduler import StaticBatchScheduler
from engines.dllm.config import DelayedCache, EngineConfig, GenerationConfig
from engines.dllm.denoise import Reduction, Sampling, reduce_in_chunks, reduce_in_parts
from engines.dllm.engine import Engine
from engines.dllm.executor.compose import packed_executor, peak_bytes
from engines.dllm.memory import REDUCTION_ROWS
from engines.dllm.plan import Request
from engines.dllm.scheduling import KvPool, PhaseScheduler
from engines.runtime.noise import row_keys

# A vocabulary so wide and a model so narrow that next to logits nothing weighs anything.
WIDE = TinyModel(name="wide", seed=9, layers=1, width=8, heads=1, kv_heads=1, mlp=8, vocab=4001)
ROW_BYTES = WIDE.vocab * 4
CAP = 16

BUFFERS = 2
"""Whole logits-shaped buffers a step holds at once: the chunk, and its softmax."""
SAMPLING_BUFFERS = 10
"""Those of a step that samples: noise and its counters are 64 bits wide."""
REST = 4
"""Rows' worth of everything else up to 32 requests: activations, keys, token ids."""


def requests(num: int, *, temperature: float = 0.0) -> list[Request]:
    generation = GenerationConfig(gen_length=8, block_length=8, steps=4, temperature=temperature)
    return [request_on(WIDE, i, 4, generation) for i in range(num)]


def serving(batch: list[Request], *, max_num_logits: int = CAP, suppress: bool = True) -> Engine:
    config = EngineConfig(
        max_num_seqs=len(batch), max_model_len=16, max_num_logits=max_num_logits, suppress_mask_token=suppress
    )
    kv_rows = sum(rows_of(request, config.sparsity) for request in batch)
    engine = Engine(
        PhaseScheduler(config, KvPool(kv_rows), DelayedCache()), packed_executor(network(WIDE), config, kv_rows)
    )
    for request in batch:
        engine.submit(request)
    return engine


def static(batch: list[Request]) -> Engine:
    config = EngineConfig(max_num_seqs=len(batch), max_model_len=16, max_num_logits=CAP, suppress_mask_token=False)
    kv_rows = len(batch) * rows_of(batch[0], config.sparsity)
    scheduler = StaticBatchScheduler(config, KvPool(kv_rows), DelayedCache(), batch_size=len(batch))
    engine = Engine(scheduler, padded_executor(network(WIDE), config, kv_rows, batch_size=len(batch)))
    for request in batch:
        engine.submit(request)
    return engine


def shaped_rows(engine: Engine) -> float:
    """Peak of logits-shaped tensors over all steps, in float32 rows."""
    with LogitsProbe(WIDE.vocab) as probe:
        engine.run()
    return probe.peak_bytes / ROW_BYTES


def allocated_rows(engine: Engine) -> float:
    network(WIDE).rotary(torch.arange(1))  # its table is made once, whoever comes first, and is no step's
    return peak_bytes(engine.run, torch.device("cpu")) / ROW_BYTES


@pytest.mark.parametrize("num_requests", [1, 2, 8, 32])
@pytest.mark.parametrize("suppress", [True, False])
def test_one_chunk_of_logits_is_alive(num_requests, suppress):
    engine = serving(requests(num_requests), suppress=suppress)
    assert shaped_rows(engine) == BUFFERS * min(CAP, 8 * num_requests)


@pytest.mark.parametrize("num_requests", [1, 4, 32])
def test_the_allocator_agrees(num_requests):
    rows = min(CAP, 8 * num_requests)
    found = allocated_rows(serving(requests(num_requests)))
    assert rows <= found < BUFFERS * rows + REST


@pytest.mark.parametrize("max_num_logits", [8, 20, 64])
def test_the_bound_follows_the_option(max_num_logits):
    engine = serving(requests(16), max_num_logits=max_num_logits)
    assert shaped_rows(engine) == BUFFERS * max_num_logits
    assert allocated_rows(serving(requests(16), max_num_logits=max_num_logits)) < BUFFERS * max_num_logits + REST


def test_sampling_is_bounded_too():
    found = [allocated_rows(serving(requests(num, temperature=1.0))) for num in (2, 8, 32)]
    assert max(found) < SAMPLING_BUFFERS * CAP
    assert max(found) - min(found) < REST
    assert max(shaped_rows(serving(requests(num, temperature=1.0))) for num in (2, 32)) < SAMPLING_BUFFERS * CAP


def test_a_static_batch_grows_with_the_batch():
    """Monolithic: every row of the padded batch, 12 a request. What reduces them is bounded."""
    for num_requests in (1, 2, 8, 32):
        assert shaped_rows(static(requests(num_requests))) == 12 * num_requests + min(12 * num_requests, REDUCTION_ROWS)
    for num_requests in (4, 32, 64):
        rows = 12 * num_requests
        found = allocated_rows(static(requests(num_requests)))
        assert (
            rows + min(rows, REDUCTION_ROWS / 2)
            <= found
            < rows + min(rows, REDUCTION_ROWS) + REST * num_requests / 32 + 1
        )


@pytest.mark.parametrize(
    ("confidence", "dtype"),
    [("max_prob", "native"), ("max_prob", "float64"), ("margin", "native"), ("neg_entropy", "native")],
)
@pytest.mark.parametrize("rows", [1, REDUCTION_ROWS, REDUCTION_ROWS + 1, 3 * REDUCTION_ROWS - 2])
@pytest.mark.parametrize("is_sampled", [False, True])
def test_reducing_in_parts_changes_no_bit(confidence, dtype, rows, is_sampled):
    logits = torch.randn(rows, WIDE.vocab, generator=torch.Generator().manual_seed(rows))
    reduction = Reduction(confidence=confidence, dtype=dtype, suppress_id=3)
    sampling = None
    if is_sampled:
        index = torch.arange(rows)
        sampling = Sampling(
            temperature=(index % 3) * 0.5, keys=row_keys(index, 0 * index, index), random_remasking=index % 5 == 0
        )
    whole = reduction(logits.clone(), sampling)
    parts = reduce_in_parts(reduction, logits, sampling)
    assert all(torch.equal(a, b) for a, b in zip(whole, parts, strict=True))


def test_float64_copies_are_bounded_where_logits_are_not():
    """Beside 1024 rows of logits in one chunk, a copy and its exponentials of REDUCTION_ROWS, twice as wide."""
    hidden, num, model = torch.zeros(1024, WIDE.width), 1024, network(WIDE)

    def reduce() -> None:
        reduce_in_chunks(model.logits, hidden, num, Reduction(dtype="float64"), None)

    assert num + REDUCTION_ROWS < peak_bytes(reduce, hidden.device) / ROW_BYTES < num + 4 * REDUCTION_ROWS + REST


def test_the_bound_is_half_in_half_precision():
    model = network(WIDE)
    half = type(model)(model.config)
    half.load_state_dict(model.state_dict())
    half = half.to(torch.bfloat16).requires_grad_(False).eval()
    config = EngineConfig(max_num_seqs=8, max_model_len=16, max_num_logits=CAP)
    kv_rows = 8 * rows_of(requests(1)[0], config.sparsity)
    engine = Engine(PhaseScheduler(config, KvPool(kv_rows), DelayedCache()), packed_executor(half, config, kv_rows))
    for request in requests(8):
        engine.submit(request)
    assert shaped_rows(engine) == BUFFERS * CAP / 2
