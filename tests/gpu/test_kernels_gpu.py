"""Kernels against their references on a CUDA device, at sizes the interpreter is too slow for."""

from collections.abc import Callable
from importlib.util import find_spec

import pytest
import torch
from support import kernel_cases as cases
from support.kernel_cases import DTYPES, Drawn, Sizes

from engines.kernels.confidence import confidence
from engines.kernels.pack import pack
from engines.kernels.rowwise import rms_norm, rotate, swiglu
from engines.kernels.scores import scores
from engines.models.layers import inverse_frequencies, rotary_tables

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")]

RAGGED = (
    Sizes(prefix=700, block=32, window=32, suffix=480, kept=590),
    Sizes(prefix=0, block=32, window=64, suffix=0, kept=0),
    Sizes(prefix=1500, block=17, window=32, suffix=3, kept=1503),
    Sizes(prefix=1, block=1, window=1, suffix=0, kept=1),
    Sizes(prefix=64, block=32, window=96, suffix=65, kept=33),
)
HEADS = {"llada": (32, 32), "dream": (28, 4), "mqa": (8, 1)}

by_dtype = pytest.mark.parametrize("dtype", sorted(DTYPES))
by_heads = pytest.mark.parametrize(("heads", "kv_heads"), HEADS.values(), ids=HEADS)


@by_dtype
@by_heads
@pytest.mark.parametrize("mode", ["dense", "uniform", "head"])
def test_pack(dtype, heads, kv_heads, mode):
    chosen_heads = {"dense": 0, "uniform": 1, "head": kv_heads}[mode]
    cases.check_pack("cuda", 1, RAGGED, kv_heads, 128, dtype, chosen_heads)
    cases.check_pack("cuda", 2, RAGGED[::-1], kv_heads, 80, dtype, chosen_heads)


def test_pack_past_32_bits():
    free, _ = torch.cuda.mem_get_info()
    if free < 12 * 2**30:
        pytest.skip(f"needs 12 GiB of free device memory, {free / 2**30:.0f} GiB are free")
    cases.check_pack_past_32_bits("cuda")


@by_dtype
@by_heads
@pytest.mark.parametrize("selection", ["head", "uniform"])
@pytest.mark.parametrize("kernel", [1, 3, 41])
def test_scores(dtype, heads, kv_heads, selection, kernel):
    cases.check_scores("cuda", 3, RAGGED, heads, kv_heads, 128, dtype, selection, kernel)


@by_dtype
@pytest.mark.parametrize("suppressed", [False, True])
@pytest.mark.parametrize(("rows", "vocabulary"), [(1, 126464), (8, 126464), (65, 152064), (5, 4097)])
def test_confidence(dtype, suppressed, rows, vocabulary):
    cases.check_confidence("cuda", 5, rows, vocabulary, dtype, suppressed, shards=4)


def test_confidence_of_nan():
    cases.check_confidence_of_nan("cuda")


@by_dtype
@pytest.mark.parametrize("adds", [False, True])
@pytest.mark.parametrize("width", [200, 3584, 4096])
def test_rms_norm(dtype, adds, width):
    cases.check_rms_norm("cuda", 6, 300, width, dtype, adds)


@by_dtype
@by_heads
@pytest.mark.parametrize("full", [False, True], ids=["narrow", "full"])
def test_rotary(dtype, heads, kv_heads, full):
    cases.check_rotary("cuda", 7, 300, heads, kv_heads, 128, dtype, full)


@by_dtype
def test_swiglu(dtype):
    cases.check_swiglu("cuda", 8, 300, 12288, dtype)


def test_everything_can_be_captured_and_replayed_on_new_values():
    """Metadata change too: a replay follows them, though shapes and pointers stay."""
    draw = Drawn(9, "cuda")
    building, rows, pool_rows = draw.building(RAGGED)
    q, k = draw.normal(rows, 32, 128, dtype="bf16"), draw.normal(rows, 32, 128, dtype="bf16")
    pools = [torch.zeros(pool_rows, 32, 128, dtype=torch.bfloat16, device="cuda") for _ in "kv"]
    angles = torch.outer(torch.arange(2048.0), inverse_frequencies(128, 5e5))
    cos, sin = (table.cuda()[torch.arange(rows, device="cuda") % 2048] for table in rotary_tables(angles))
    x, delta, weight = (draw.normal(*s, dtype="bf16") for s in ((rows, 4096), (rows, 4096), (4096,)))
    logits = draw.normal(40, 126464, dtype="bf16")

    def step() -> list[torch.Tensor]:
        a, b, y = q.clone(), k.clone(), x.clone()
        rotate(a, b, cos, sin, full_precision=True)
        score = scores(a, b, building, "head", 3, 32, 1510)
        pack(*pools, b, b, building, score.sort(dim=-1, descending=True, stable=True).indices[..., :1503], 1503)
        normed = rms_norm(y, weight, 1e-5, delta)
        return [*pools, score, a, b, y, normed, swiglu(normed, y), *confidence(logits, 126336)]

    check_replay(step, lambda: (building.kept.sub_(1).clamp_(min=0), q.mul_(1.5), x.neg_(), logits.neg_()))


def check_replay(step: Callable[[], list[torch.Tensor]], change: Callable[[], object]) -> None:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = step()
    for _ in range(2):
        change()
        graph.replay()
        replayed = [out.clone() for out in outputs]
        for found, wanted in zip(replayed, step(), strict=True):
            assert torch.equal(found, wanted)


def test_launches_go_to_the_tensors_device():
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    x, weight = torch.ones(4, 64, device="cuda:1"), torch.ones(64, device="cuda:1")
    assert torch.equal(rms_norm(x, weight, 0.0), x)
