"""Attention backends on a CUDA device; nothing here needs hypothesis."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from support.attention_cases import CASES, FILL, Case, difference
from support.on_card import no_waiting

from engines.attention.backends import SpanMetadata, Spans, VarlenAttention
from engines.attention.flash import FlashVarlen
from engines.attention.registry import BACKENDS, attention_backend, availability

pytestmark = pytest.mark.gpu

TOLERANCE = {torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 3e-2}
CUDA = torch.device("cuda")


def backend_of(name: str, dtype: torch.dtype, case: Case) -> VarlenAttention:
    """Skips what cannot serve, with the reason."""
    heads = case.kv_heads, case.kv_heads * case.group
    reason = availability(CUDA, dtype, case.head_dim, heads[1], heads[0])[name]
    if reason is not None:
        pytest.skip(reason)
    return attention_backend(name, CUDA, dtype, case.head_dim, heads[1], heads[0])


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
@pytest.mark.parametrize("name", BACKENDS)
def test_backends_give_the_definition(name, case, dtype):
    with torch.inference_mode():
        assert case.error(backend_of(name, dtype, case), CUDA, dtype) <= TOLERANCE[dtype]


@pytest.mark.parametrize("group", [1, 4])
def test_this_torch_reads_runs_in_place(group):
    """Every supported torch has a varlen kernel that needs no copy of the keys."""
    if torch.cuda.get_device_capability(CUDA) < (8, 0):
        pytest.skip("FlashAttention needs compute capability 8.0")
    backend = attention_backend("torch-varlen", CUDA, torch.bfloat16, 128, 4 * group, 4)
    assert isinstance(backend, FlashVarlen)


def test_auto_takes_a_flash_kernel_for_16_bits():
    if torch.cuda.get_device_capability(CUDA) < (8, 0):
        pytest.skip("FlashAttention needs compute capability 8.0")
    for dtype in (torch.bfloat16, torch.float16):
        assert attention_backend(None, CUDA, dtype, 128, 32, 32).name in ("flash-attn", "torch-varlen")
    assert attention_backend(None, CUDA, torch.float32, 128, 32, 32).name == "sdpa-padded"


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("group", [1, 4])
@pytest.mark.parametrize("name", [name for name in BACKENDS if name != "sdpa"])
def test_a_captured_graph_replays_other_metadata(name, group, dtype):
    """Captured on one batch, replayed on others of other sizes, lengths and runs: equal to the eager call."""
    size, rows, num_keys, head_dim, kv_heads = 6, 48, 400, 64, 2
    case = Case(q_len=(), k_runs=(), head_dim=head_dim, kv_heads=kv_heads, group=group)
    backend = backend_of(name, dtype, case)
    assert not backend.needs_host_runs
    random = torch.Generator(device="cuda").manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, head_dim, generator=random, device=CUDA).to(dtype)

    q, k, v = draw(rows, kv_heads * group), draw(num_keys, kv_heads), draw(num_keys, kv_heads)
    out = torch.full_like(q, FILL)
    buffer = torch.zeros(3 * size + 2, dtype=torch.int32, device=CUDA)
    cu_q, k_start, k_len = buffer.split([size + 1, size + 1, size])
    spans = Spans(cu_q=cu_q, k_start=k_start, k_len=k_len, max_q=16, max_k=150)

    def load(q_len: list[int], runs: list[tuple[int, int]]) -> None:
        starts, lengths = (np.array([run[i] for run in runs], dtype=np.int64) for i in range(2))
        host = SpanMetadata.of_lengths(np.array(q_len, dtype=np.int64), starts, lengths, size=size)
        buffer.copy_(torch.from_numpy(np.concatenate(host)))

    with torch.inference_mode():
        load([8, 8, 8, 8, 8, 8], [(60 * i, 40) for i in range(6)])
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                backend(q, k, v, spans, out)
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            backend(q, k, v, spans, out)

        for q_len, runs in (
            ([8, 8, 8, 8, 8, 8], [(60 * i, 40) for i in range(6)]),
            ([16, 3, 11], [(250, 150), (9, 1), (100, 77)]),
            ([1], [(399, 1)]),
            ([], []),
            ([16, 16, 16], [(0, 150), (0, 100), (50, 150)]),
        ):
            load(q_len, runs)
            out.fill_(FILL)
            graph.replay()
            replayed = out.clone()
            out.fill_(FILL)
            backend(q, k, v, spans, out)
            assert torch.equal(replayed, out), (q_len, runs)
            expected = replace(case, q_len=q_len, k_runs=runs).expected(q, k, v)
            assert difference(replayed, expected) <= TOLERANCE[dtype], (q_len, runs)


def test_device_backends_do_not_wait_for_the_device():
    """A call that needs the host to read a device tensor raises in this mode."""
    case = CASES["grouped"]
    for dtype in (torch.bfloat16, torch.float32):
        found = availability(CUDA, dtype, case.head_dim, case.kv_heads * case.group, case.kv_heads)
        for name in [name for name, reason in found.items() if reason is None and name != "sdpa"]:
            backend = backend_of(name, dtype, case)
            q, k, v = case.tensors(CUDA, dtype)
            spans = replace(case.spans(CUDA), q_runs=None, k_runs=None)
            out = torch.zeros_like(q)
            backend(q, k, v, spans, out)
            torch.cuda.synchronize()
            with no_waiting():
                backend(q, k, v, spans, out)
