"""Kernels that read blocks in place are tried on an example before they serve, and graphs hand them the right metadata.

No kernel is installed on a CPU: what is tested is the way to it, with the reference in its place and with faulty ones.
"""

import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from support.causal import executor, generate, paged_executor, pooled, prompt, run, small_model, start
from torch import Tensor

from engines.ar.torch.attention import ReferenceKernel, Served, fault, kernels, probe
from engines.ar.torch.executor import grid
from engines.attention.flash import KernelSpans
from engines.policies.views import Bucket, Rung

REFERENCE = ReferenceKernel()


def bidirectional(q: Tensor, k: Tensor, v: Tensor, spans: KernelSpans) -> Tensor:
    """Every query as if it were the last of its sequence."""
    out = torch.zeros_like(q)
    for i in range(len(spans.used_k)):
        for row in range(int(spans.cu_q[i]), int(spans.cu_q[i + 1])):
            cut = torch.tensor([0, *([0] * i), 1], dtype=torch.int32)
            own = KernelSpans(cut, cut, spans.used_k[: i + 1], spans.table[: i + 1], 1, spans.max_k)
            out[row : row + 1] = REFERENCE(q[row : row + 1], k, v, own)
    return out


def top_left(q: Tensor, k: Tensor, v: Tensor, spans: KernelSpans) -> Tensor:
    """Queries at the start of their keys, as FlashAttention did before 2.1."""
    return REFERENCE(q, k, v, spans._replace(used_k=torch.minimum(spans.used_k, spans.cu_q.diff())))


def ignores_the_table(q: Tensor, k: Tensor, v: Tensor, spans: KernelSpans) -> Tensor:
    width = spans.table.shape[1]
    table = torch.arange(1, spans.table.numel() + 1, dtype=torch.int32).clamp(max=k.shape[0] - 1).view(-1, width)
    return REFERENCE(q, k, v, spans._replace(table=table))


def reads_whole_blocks(q: Tensor, k: Tensor, v: Tensor, spans: KernelSpans) -> Tensor:
    size = k.shape[1]
    whole = (spans.used_k + size - 1) // size * size
    return REFERENCE(q, k, v, spans._replace(used_k=whole))


def raises(q: Tensor, k: Tensor, v: Tensor, spans: KernelSpans) -> Tensor:
    raise RuntimeError("Paged KV cache block size must be divisible by 256\nand more")


@pytest.mark.parametrize("block_size", [16, 64, 256])
@pytest.mark.parametrize("group", [1, 4])
def test_the_reference_passes(block_size, group):
    assert fault(REFERENCE, torch.device("cpu"), torch.float32, 16, group, block_size) is None


@pytest.mark.parametrize("kernel", [bidirectional, top_left, ignores_the_table, reads_whole_blocks, raises])
def test_a_kernel_that_is_wrong_does_not_serve(kernel):
    found = fault(kernel, torch.device("cpu"), torch.float32, 16, 2, 16)
    assert found is not None
    assert "\n" not in found


def flash_attn_func(q: Tensor, k: Tensor, v: Tensor, *, block_table: Tensor, causal: bool, **rest: Any) -> Tensor:
    """What FlashAttention 2 reads: the keys of a sequence end where ``cu_seqlens_k`` says."""
    assert causal
    assert rest.keys().isdisjoint({"seqused_k", "window_size"})
    assert rest["softmax_scale"] == q.shape[-1] ** -0.5
    cu_k = rest["cu_seqlens_k"]
    bounds = rest["max_seqlen_q"], rest["max_seqlen_k"]
    return REFERENCE(q, k, v, KernelSpans(rest["cu_seqlens_q"], cu_k, cu_k.diff(), block_table, *bounds))


def varlen_attn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_q: Tensor,
    cu_k: Tensor | None,
    max_q: int,
    max_k: int,
    *,
    window_size: tuple[int, int],
    enable_gqa: bool,
    seqused_k: Tensor,
    block_table: Tensor,
) -> Tensor:
    if cu_k is not None:
        raise ValueError("cu_seq_k beside a block table")
    assert window_size == (-1, 0)
    assert enable_gqa == (q.shape[1] != k.shape[2])
    return REFERENCE(q, k, v, KernelSpans(cu_q, cu_q, seqused_k, block_table, max_q, max_k))


def test_packages_are_called_as_they_take_their_arguments(monkeypatch):
    """The public function of ``flash_attn``, and each way to call that of torch; whichever fails says so."""
    interface, varlen = ModuleType("flash_attn.flash_attn_interface"), ModuleType("torch.nn.attention.varlen")
    interface._flash_attn_varlen_forward = interface.flash_attn_varlen_func = flash_attn_func
    varlen.varlen_attn = varlen.varlen_attn_out = varlen_attn
    monkeypatch.setitem(sys.modules, "flash_attn", ModuleType("flash_attn"))
    monkeypatch.setitem(sys.modules, interface.__name__, interface)
    monkeypatch.setitem(sys.modules, varlen.__name__, varlen)
    found = [(name, fault(kernel, torch.device("cpu"), torch.float32, 16, 4, 16) is None) for name, kernel in kernels()]
    # Triton's own runs on no CPU.
    assert found == [("flash-attn", True), ("torch-varlen", True), ("torch-varlen", False), ("triton", False)]
    monkeypatch.setitem(sys.modules, interface.__name__, None)
    assert [name for name, _ in kernels()] == ["torch-varlen"] * 2 + ["triton"]


def test_a_cpu_has_none():
    assert not isinstance(probe(torch.device("cpu"), torch.float32, 16, 1), Served)


@pytest.fixture(scope="module")
def model() -> Any:
    return small_model()


@pytest.mark.parametrize("block_size", [16, 64])
def test_paged_steps_give_what_the_packed_ones_of_torch_give(model, block_size):
    plain, paged = executor(model), paged_executor(model, block_size)
    parts = [(30, 1), (90, 1), (16, 12), (0, 9), (0, 70)]
    results = []
    for worker in (plain, paged):
        slots = [start(worker, prompt(history + tokens, i)) for i, (history, tokens) in enumerate(parts)]
        for slot, (history, _) in zip(slots, parts, strict=True):
            if history:
                run(worker, (slot, 0, history, False))
        tokens = run(worker, *((slot, *part, True) for slot, part in zip(slots, parts, strict=True)))
        results.append((tokens, [pooled(worker, s, sum(p)) for s, p in zip(slots, parts, strict=True)]))
    assert results[0][0] == results[1][0]
    for mine, theirs in zip(results[0][1], results[1][1], strict=True):
        for a, b in zip(mine, theirs, strict=True):
            torch.testing.assert_close(a, b, atol=1e-5, rtol=0)


def test_captured_sizes_replay_to_what_eager_steps_give(model):
    """Each graph replays on step after step of its own size, full and part empty, over history and without."""
    captured = [*grid((4, 16), (1, 4)), Bucket(1, 8), Rung(64)]
    eager, graphed = executor(model), paged_executor(model)
    costs = graphed.capture(captured)
    assert set(costs) == set(captured)
    steps = [
        ([(0, 4), (0, 2), (0, 3)], Bucket(4, 4)),
        ([(4, 16), (2, 5), (3, 1), (0, 11)], Bucket(16, 4)),
        ([(20, 1), (7, 1), (4, 1), (11, 1)], Bucket(1, 8)),
        ([(21, 30), (8, 20), (5, 1)], Rung(64)),
        ([(51, 4)], Bucket(4, 1)),
    ]
    results = []
    for worker in (eager, graphed):
        slots = [start(worker, prompt(80, seed), room=90) for seed in range(4)]
        tokens = []
        for parts, mode in steps:
            tokens.append(
                run(worker, *((slot, *part, True) for slot, part in zip(slots, parts, strict=False)), mode=mode)
            )
            # The prompt again, where a sampled id was written over it.
            for seed, slot in enumerate(slots):
                worker.write(slot, 0, prompt(80, seed))
        results.append((tokens, [pooled(worker, slot, n) for slot, n in zip(slots, (55, 28, 6, 11), strict=True)]))
    assert results[0][0] == results[1][0]
    for mine, theirs in zip(results[0][1], results[1][1], strict=True):
        for a, b in zip(mine, theirs, strict=True):
            torch.testing.assert_close(a, b, atol=1e-5, rtol=0)


def test_decode_steps_take_the_narrowest_captured_width(model):
    worker = paged_executor(model)
    worker.capture([Bucket(1, 1), Bucket(1, 4), Bucket(4, 4)])
    from engines.ar.torch.rows import StepWork

    slots = [start(worker, prompt(9, seed)) for seed in range(5)]
    run(worker, *((slot, 0, 9, True) for slot in slots))

    def size(n: int) -> object:
        return worker.run(StepWork.of([(slot, 9, 1, True) for slot in slots[:n]])).size

    assert [size(n) for n in (1, 2, 4, 5)] == [Bucket(1, 1), Bucket(1, 4), Bucket(1, 4), None]
    # A bucket nobody captured is no bucket.
    assert worker.run(StepWork.of([(slots[0], 0, 9, True)]), Bucket(16, 1)).size is None


def test_closing_gives_everything_back(model):
    worker = paged_executor(model)
    worker.capture([Bucket(4, 4), Rung(32)])
    generate(worker, start(worker, prompt(12)), 12, 3)
    assert worker.pool.num_rows > 0
    assert worker.graphs is not None
    worker.close()
    worker.close()
    assert worker.pool.num_rows == 0
    assert worker.graphs.keys == ()
    with pytest.raises(AssertionError, match="closed executor"):
        run(worker, (0, 0, 1, True))
