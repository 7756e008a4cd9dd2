"""The CUDA path's kernels: their references against what the CPU path computes, the kernels against their
references in triton's interpreter, and their compilation for GPUs that are not here."""

import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from importlib import import_module
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import kernel_cases as cases
from support.forks import forks
from support.kernel_cases import DTYPES, Drawn, Sizes
from support.kernel_compiler import compile_everything, set_variables

import engines.kernels
from engines.dllm import denoise
from engines.dllm.denoise import FusedReduction, Reduction
from engines.kernels import available
from engines.kernels.confidence import Partial, combine_reference, confidence_reference, partial_reference
from engines.kernels.pack import Building, pack_reference
from engines.kernels.rowwise import rms_norm_reference, rotate_reference, swiglu_reference
from engines.kernels.scores import scores_reference
from engines.models.layers import RMSNorm, inverse_frequencies, rotary_tables, rotate_halves, rotate_in_float32

dtypes = st.sampled_from(sorted(DTYPES))
seeds = st.integers(0, 2**31)
Interpret = Callable[..., None]

RAGGED = (
    Sizes(prefix=20, block=4, window=8, suffix=9, kept=13),
    Sizes(prefix=0, block=3, window=3, suffix=0, kept=0),
    Sizes(prefix=5, block=8, window=8, suffix=90, kept=70),
    Sizes(prefix=1, block=1, window=1, suffix=0, kept=1),
)


@st.composite
def sizes(draw: st.DrawFn) -> Sizes:
    block = draw(st.integers(1, 20))
    prefix, suffix = draw(st.integers(0, 40)), draw(st.integers(0, 40))
    window = block + draw(st.integers(0, 5))
    return Sizes(prefix, block, window, suffix, kept=draw(st.integers(0, prefix + suffix)))


requests = st.lists(sizes(), min_size=1, max_size=4)


# ---- in other processes: triton looks at TRITON_INTERPRET when it is imported ----------------


def _process(**variables: str) -> ProcessPoolExecutor:
    if find_spec("triton") is None:
        pytest.skip("triton is not installed")
    return ProcessPoolExecutor(1, forks(), set_variables, (variables,))


@pytest.fixture(scope="module")
def interpret() -> Iterator[Interpret]:
    with _process(TRITON_INTERPRET="1") as pool:

        def call(check: Callable[..., None], *args: Any) -> None:
            pool.submit(check, "cpu", *args).result()

        yield call


@pytest.fixture(scope="module")
def compiler(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProcessPoolExecutor]:
    with _process(TRITON_INTERPRET="0", TRITON_CACHE_DIR=str(tmp_path_factory.mktemp("triton"))) as pool:
        yield pool


# ---- the kernels ----------------------------------------------------------------------------


@settings(max_examples=8)
@given(
    seed=seeds,
    requests=requests,
    kv_heads=st.integers(1, 3),
    width=st.sampled_from((2, 16, 24)),
    dtype=dtypes,
    mode=st.sampled_from(("dense", "uniform", "head")),
)
def test_pack(interpret, seed, requests, kv_heads, width, dtype, mode):
    chosen_heads = {"dense": 0, "uniform": 1, "head": kv_heads}[mode]
    interpret(cases.check_pack, seed, requests, kv_heads, width, dtype, chosen_heads)


def test_pack_of_more_rows_than_a_program_moves(interpret):
    interpret(cases.check_pack, 3, RAGGED, 2, 24, "bf16", 2)


def test_pack_past_32_bits(interpret):
    interpret(cases.check_pack_past_32_bits)


@settings(max_examples=8)
@given(
    seed=seeds,
    requests=requests,
    kv_heads=st.integers(1, 2),
    group=st.integers(1, 3),
    dtype=dtypes,
    selection=st.sampled_from(("head", "uniform")),
    kernel=st.sampled_from((1, 3, 7)),
)
def test_scores(interpret, seed, requests, kv_heads, group, dtype, selection, kernel):
    interpret(cases.check_scores, seed, requests, kv_heads * group, kv_heads, 24, dtype, selection, kernel)


@pytest.mark.parametrize(("selection", "kernel"), [("uniform", 3), ("head", 41), ("uniform", 41)])
def test_scores_across_tiles(interpret, selection, kernel):
    interpret(cases.check_scores, 4, RAGGED, 6, 2, 16, "fp32", selection, kernel)


@settings(max_examples=8)
@given(
    seed=seeds,
    rows=st.integers(1, 5),
    vocabulary=st.sampled_from((3, 100, 4096, 4097, 9001)),
    dtype=dtypes,
    suppressed=st.booleans(),
    shards=st.integers(1, 3),
)
def test_confidence(interpret, seed, rows, vocabulary, dtype, suppressed, shards):
    interpret(cases.check_confidence, seed, rows, vocabulary, dtype, suppressed, shards)


def test_confidence_of_nan(interpret):
    interpret(cases.check_confidence_of_nan)


@settings(max_examples=7)
@given(seed=seeds, rows=st.integers(1, 5), width=st.sampled_from((1, 8, 200, 1024)), dtype=dtypes, adds=st.booleans())
def test_rms_norm(interpret, seed, rows, width, dtype, adds):
    interpret(cases.check_rms_norm, seed, rows, width, dtype, adds)


@settings(max_examples=8)
@given(
    seed=seeds,
    rows=st.integers(1, 5),
    kv_heads=st.sampled_from((1, 2, 17)),
    group=st.integers(1, 3),
    width=st.sampled_from((2, 16, 24)),
    dtype=dtypes,
    full=st.booleans(),
)
def test_rotary(interpret, seed, rows, kv_heads, group, width, dtype, full):
    interpret(cases.check_rotary, seed, rows, kv_heads * group, kv_heads, width, dtype, full)


@settings(max_examples=7)
@given(seed=seeds, rows=st.integers(1, 4), width=st.sampled_from((1, 100, 2048, 3000)), dtype=dtypes)
def test_swiglu(interpret, seed, rows, width, dtype):
    interpret(cases.check_swiglu, seed, rows, width, dtype)


@settings(max_examples=7)
@given(
    seed=seeds, rows=st.integers(0, 5), heads=st.integers(1, 3), width=st.sampled_from((1, 24, 128, 1500)), dtype=dtypes
)
def test_store(interpret, seed, rows, heads, width, dtype):
    interpret(cases.check_store, seed, rows, heads, width, dtype)


@pytest.mark.parametrize(("capability", "dtype"), [(80, "fp16"), (90, "bf16")])
def test_kernels_compile_for_gpus(compiler, capability, dtype):
    compiled = compiler.submit(compile_everything, capability, dtype).result()
    movers = {
        *("pack_rows", "mean_queries", "pooled_scores", "reduce_tiles", "normalize_rows", "rotate_rows"),
        *("gate_rows", "store_rows"),
    }
    assert set(compiled) == movers | {"merge_parts"}
    for name in movers:
        assert "ld.global.v4.b32" in compiled[name], f"{name} reads 16 bytes at a time"
    for name in ("pack_rows", "normalize_rows", "rotate_rows", "gate_rows", "store_rows"):
        assert "st.global.v4.b32" in compiled[name], f"{name} writes 16 bytes at a time"
    assert "fma.rn" not in compiled["rotate_rows"], "products are rounded before they are added"


# ---- their references -----------------------------------------------------------------------


def test_a_packing_by_hand():
    building = Building.of(torch.tensor([[0, 4], [1, 2], [1, 1], [2, 1], [2, 3], [2, 1], [5, 1]]))
    k = torch.arange(16.0).view(8, 2, 1)
    pools = [torch.full((8, 2, 1), -1.0) for _ in "kv"]
    # Request 0 holds rows 0..3, its window 1 and 2; request 1 rows 4..7, its window 6.
    chosen = torch.tensor([[[1, 0], [0, 1]], [[2, 99], [0, 99]]])
    pack_reference(*pools, k, k + 100, building, chosen, 2)
    wanted = torch.full((8, 2), -1.0)
    wanted[5], wanted[6], wanted[1] = torch.tensor([6.0, 1]), torch.tensor([0.0, 7]), torch.tensor([14.0, 9])
    assert torch.equal(pools[0].squeeze(2), wanted)
    assert torch.equal(pools[1].squeeze(2), torch.where(wanted < 0, wanted, wanted + 100))
    dense = [torch.full((8, 2, 1), -1.0) for _ in "kv"]
    pack_reference(*dense, k, k, building, None, 2)
    assert dense[0][5:7].flatten().tolist() == [0, 1, 6, 7]
    assert dense[0][1].flatten().tolist() == [8, 9]


@pytest.mark.parametrize("selection", ["head", "uniform"])
def test_scores_by_hand(selection):
    draw = Drawn(5, "cpu")
    building, rows, _ = draw.building(RAGGED)
    q, k = draw.normal(rows, 4, 8, dtype="fp32"), draw.normal(rows, 2, 8, dtype="fp32")
    found = scores_reference(q, k, building, selection, 3, 8, 95)
    for i, size in enumerate(RAGGED):
        run = int(building.run_start[i])
        block = q[run + size.prefix : run + size.prefix + size.block]
        after = run + size.prefix + size.window
        context = torch.cat((k[run : run + size.prefix], k[after : after + size.suffix]))
        dots = torch.einsum("bhgd,chd->hgc", block.view(-1, 2, 2, 8), context) / size.block
        raw = dots.amax(dim=1) if selection == "head" else dots.mean(dim=(0, 1)).unsqueeze(0)
        padded = torch.nn.functional.pad(raw, (1, 1), value=-torch.inf)
        pooled = torch.stack((padded[:, :-2], padded[:, 1:-1], padded[:, 2:])).amax(dim=0)
        torch.testing.assert_close(found[i, :, : size.context], pooled, rtol=1e-4, atol=1e-5)
        assert (found[i, :, size.context :] == -torch.inf).all()


@given(seed=seeds, suppressed=st.booleans(), shards=st.integers(1, 4))
def test_the_reference_confidence_is_the_reduction_s(seed, suppressed, shards):
    logits = cases.awkward_logits(Drawn(seed, "cpu"), 6, 40, "fp32", 20)
    suppress_id = 20 if suppressed else None
    token, found = confidence_reference(logits, suppress_id)
    wanted = Reduction(suppress_id=suppress_id)(logits.clone(), None)
    assert torch.equal(token, wanted[0])
    assert torch.equal(found, wanted[1])
    edges = [40 * i // shards for i in range(shards + 1)]
    pieces = [partial_reference(logits[:, a:b], suppress_id, a) for a, b in pairwise(edges)]
    combined = combine_reference(Partial(*map(torch.stack, zip(*pieces, strict=True))))
    assert torch.equal(combined[0], token)
    torch.testing.assert_close(combined[1], found, rtol=3e-4, atol=1e-30)


@pytest.mark.parametrize("dtype", sorted(DTYPES))
def test_the_reference_layers_are_the_models(dtype):
    draw = Drawn(6, "cpu")
    x, delta, weight = draw.normal(5, 32, dtype=dtype), draw.normal(5, 32, dtype=dtype), draw.normal(32, dtype=dtype)
    norm = RMSNorm(32, 1e-5).to(DTYPES[dtype]).requires_grad_(False)
    norm.weight.copy_(weight)
    torch.testing.assert_close(rms_norm_reference(x, weight, 1e-5), norm(x), rtol=1e-6, atol=1e-6)
    total = x + delta
    torch.testing.assert_close(rms_norm_reference(x, weight, 1e-5, delta), norm(total), rtol=1e-6, atol=1e-6)
    assert torch.equal(x, total)

    q, k = draw.normal(5, 4, 8, dtype=dtype), draw.normal(5, 2, 8, dtype=dtype)
    cos, sin = rotary_tables(torch.outer(torch.arange(5.0), inverse_frequencies(8, 100.0)))
    for full in (True, False):
        found = q.clone(), k.clone()
        rotate_reference(*found, cos, sin, full_precision=full)
        narrow = cos.to(q.dtype), sin.to(q.dtype)
        for a, b in zip(found, (q, k), strict=True):
            assert torch.equal(a, rotate_in_float32(b, cos, sin) if full else rotate_halves(b, *narrow))
    assert torch.equal(swiglu_reference(x, delta), torch.nn.functional.silu(x) * delta)


# ---- the package ----------------------------------------------------------------------------


def test_importing_the_wrappers_does_not_import_triton():
    """Anew in this process, where torch is loaded."""
    names = [
        f"engines.kernels.{path.stem}"
        for path in Path(*engines.kernels.__path__).glob("[!_]*.py")
        if path.stem != "jit"
    ]
    loaded = {name for name in sys.modules if name.startswith(("engines.kernels", "triton"))}
    assert {"engines.kernels.pack", "engines.kernels.scores"} <= loaded & set(names)
    with mock.patch.dict(sys.modules), mock.patch.object(engines, "kernels"):
        for name in loaded:
            del sys.modules[name]
        for name in names:
            import_module(name)
        assert "triton" not in sys.modules


def test_available(monkeypatch):
    installed = find_spec("triton") is not None
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert not available(torch.device("cpu"))
    assert available(torch.device("cuda")) == installed
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert available(torch.device("cpu")) == installed


@pytest.mark.parametrize("dtype", sorted(DTYPES))
@pytest.mark.parametrize("suppress_id", [None, 7])
def test_the_fused_reduction_is_the_plain_one(monkeypatch, dtype, suppress_id):
    """A kernel sums in float32; a 16-bit model's confidences are rounded all the same, or ties would break otherwise."""
    monkeypatch.setattr(denoise.kernel, "confidence", confidence_reference)
    logits = Drawn(5, "cpu").normal(200, 61, dtype=dtype) * 6
    plain = Reduction(suppress_id=suppress_id)
    token, found = FusedReduction(suppress_id=suppress_id)(logits.clone(), None)
    wanted = plain(logits.clone(), None)
    assert torch.equal(token, wanted[0])
    assert found.dtype == torch.float32
    assert torch.equal(found, found.to(DTYPES[dtype]).float())
    # Sums in another order may round to the next number.
    torch.testing.assert_close(found, wanted[1], rtol=torch.finfo(DTYPES[dtype]).eps, atol=0)
