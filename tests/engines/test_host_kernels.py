"""The kernels for CPUs: what they give, that company changes no bit of it, and that torch serves where they cannot."""

import platform
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from support.causal import executor, generate, prompt, run, small_model, start
from support.tables import data_beside
from torch import Tensor

from engines.compiled import CompilerError, load_library
from engines.kernels import host, probe
from engines.kernels.rowwise import rms_norm_reference, rotate_reference, swiglu_reference

try:
    load_library(host.LIBRARY)
except CompilerError as error:
    pytest.skip(f"no kernels for this CPU: {error}", allow_module_level=True)

dtypes = pytest.mark.parametrize("dtype", list(host.DTYPES), ids=str)
ROUNDING = {torch.float32: 2e-6, torch.bfloat16: 2.0**-7}


@pytest.fixture
def afresh() -> Iterator[None]:
    """What was found out is forgotten, before and after."""
    for _ in range(2):
        probe.host_fault.cache_clear()
        load_library.cache_clear()
        host._kernel.cache_clear()
        if _ == 0:
            yield


def compiler(monkeypatch: pytest.MonkeyPatch, folder: Path) -> Path:
    """One that has made the kernels already: its own takes four seconds."""
    made = host.LIBRARY.cached_path(host.LIBRARY.command())
    if not made.is_file():
        pytest.skip("the kernels of this machine cannot be kept")
    tool = folder / "c++"
    tool.write_text(f'#!/bin/sh\nwhile [ "$1" != -o ]; do shift; done\nexec cp {made} "$2"\n')
    tool.chmod(0o755)
    monkeypatch.setenv("CXX", str(tool))
    return tool


def draw(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@dtypes
def test_all_serve_here(dtype):
    assert probe.host_fault(dtype) is None


@pytest.mark.skipif(platform.machine() != "x86_64", reason="its instructions are looked for")
def test_a_processor_without_avx512_compares_no_number_alone(tmp_path):
    """As g++ does with lanes that are more than a register holds."""
    made = tmp_path / "spans.s"
    compiler, standard, *_ = host.LIBRARY.command()
    options = (standard, "-O1", "-march=x86-64-v3", "-w", "-S", "-o", made)
    subprocess.run([compiler, *options, host.LIBRARY.sources[1]], check=True, capture_output=True)
    text = made.read_text()
    assert "vmaxps" in text
    assert re.findall(r"v(?:cmp\w*|max|min)ss", text) == []


@dtypes
@pytest.mark.parametrize("width", [1, 15, 16, 100, 576])
def test_norm_and_activation_of_any_width_are_their_references_and_a_row_s_own(dtype, width):
    x, delta, weight = (draw(5, width, dtype=dtype, seed=seed) for seed in range(3))
    # Rows of a joined product lie apart.
    both = draw(5, 2 * width, dtype=dtype, seed=3) * 30
    gate, up = both.split(width, dim=-1)
    sum_of, expected_sum = x.clone(), x.clone()
    y = host.rms_norm(sum_of, weight[0], 1e-5, delta)
    expected = rms_norm_reference(expected_sum, weight[0], 1e-5, delta)
    close = {"atol": ROUNDING[dtype], "rtol": ROUNDING[dtype]}
    torch.testing.assert_close(y, expected, **close)
    assert torch.equal(sum_of, expected_sum)
    gated = host.swiglu(gate, up)
    torch.testing.assert_close(gated, swiglu_reference(gate, up), **close)
    for i in range(5):
        assert torch.equal(host.rms_norm(x[i : i + 1].clone(), weight[0], 1e-5, delta[i : i + 1]), y[i : i + 1])
        assert torch.equal(host.swiglu(gate[i : i + 1], up[i : i + 1]), gated[i : i + 1])


@dtypes
def test_an_activation_of_huge_values_is_torch_s(dtype):
    gate = torch.tensor([[-200.0, -88.0, -20.0, 0.0, 20.0, 88.0, 200.0, torch.nan]]).to(dtype)
    torch.testing.assert_close(
        host.swiglu(gate, torch.ones_like(gate)), torch.nn.functional.silu(gate), atol=1e-30, rtol=1e-2, equal_nan=True
    )


@dtypes
@pytest.mark.parametrize("width", [8, 64, 80])
def test_rotation_is_its_reference(dtype, width):
    joined = draw(3, 6 * width, dtype=dtype)
    q, k, _ = (part.view(3, -1, width) for part in joined.split([3 * width, 2 * width, width], dim=-1))
    angles = torch.rand(3, 1, width // 2, generator=torch.Generator().manual_seed(1)) * 6
    cos = torch.cat((angles.cos(), angles.cos()), dim=-1).to(dtype)
    sin = torch.cat((-angles.sin(), angles.sin()), dim=-1).to(dtype)
    expected = q.clone(), k.clone()
    rotate_reference(*expected, cos, sin, full_precision=False)
    host.rotate(q, k, cos, sin, full_precision=False)
    for mine, theirs in zip((q, k), expected, strict=True):
        torch.testing.assert_close(mine, theirs, atol=ROUNDING[dtype], rtol=0)


def paged(lengths: tuple[int, ...], heads: int, kv_heads: int, width: int, size: int, dtype: torch.dtype) -> list:
    """Arguments of ``decode``; what no sequence holds is not a number."""
    count = -(-max(lengths) // size)
    random = torch.Generator().manual_seed(0)
    table = (torch.randperm(len(lengths) * count, generator=random) + 1).view(len(lengths), count).to(torch.int32)
    pools = torch.full((2, (len(lengths) * count + 1) * size, kv_heads, width), torch.nan, dtype=dtype)
    for slot, length in enumerate(lengths):
        place = torch.arange(length)
        rows = table[slot, place // size].long() * size + place % size
        pools[:, rows] = draw(2, length, kv_heads, width, dtype=dtype, seed=slot)
    q = draw(len(lengths), heads, width, dtype=dtype, seed=99) * 3
    return [q, *pools.unbind(), torch.arange(len(lengths)), torch.tensor(lengths), table, size]


SHAPES = data_beside(__file__, "host_kernels")["shapes"]


@dtypes
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_decode_is_its_reference_and_company_changes_no_bit(dtype, shape):
    lengths = (1, 15, 16, 17, 130, 64)
    at = paged(lengths, *shape, dtype)
    found = host.decode(*at)
    torch.testing.assert_close(found, host.decode_reference(*at), atol=ROUNDING[dtype], rtol=ROUNDING[dtype])
    q, k, v, slots, ends, table, size = at
    for i in range(len(lengths)):
        assert torch.equal(host.decode(q[i : i + 1], k, v, slots[i : i + 1], ends[i : i + 1], table, size)[0], found[i])
    # Rows behind the sequences.
    assert torch.equal(host.decode(q, k, v, slots[:2], ends[:2], table, size)[2:], torch.zeros_like(q[2:]))


@dtypes
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_attention_of_a_joined_product_rotates_stores_and_decodes(dtype, shape):
    heads, kv_heads, width, _ = shape
    _, k, v, slots, ends, table, size = paged((1, 16, 130), *shape, dtype)
    last = ends - 1
    rows = torch.cat((table[slots, last // size].long() * size + last % size, torch.tensor([0, 0])))
    qkv = draw(5, (heads + 2 * kv_heads) * width, dtype=dtype)
    angles = torch.rand(5, 1, width // 2, generator=torch.Generator().manual_seed(1)) * 6
    cos = torch.cat((angles.cos(), angles.cos()), dim=-1).to(dtype)
    sin = torch.cat((-angles.sin(), angles.sin()), dim=-1).to(dtype)
    mine, theirs = ((k.clone(), v.clone()) for _ in range(2))
    expected = host.attend_reference(qkv.clone(), cos, sin, *theirs, rows, (slots, ends, table, size))
    found = host.attend(qkv, cos, sin, *mine, rows, (slots, ends, table, size))
    close = {"atol": 2 * ROUNDING[dtype], "rtol": 2 * ROUNDING[dtype]}
    torch.testing.assert_close(found, expected, **close)
    real = rows[:3]
    for a, b in zip(mine, theirs, strict=True):
        torch.testing.assert_close(a[real], b[real], **close)
        untouched = torch.ones(len(a), dtype=torch.bool)
        untouched[rows] = False
        torch.testing.assert_close(a[untouched], b[untouched], atol=0, rtol=0, equal_nan=True)


WIDTHS = [(8, 8, 20), (8, 8, 64), (6, 2, 16), (4, 1, 32), (3, 3, 80), (14, 2, 128), (2, 2, 7), (1, 1, 256)]
LENGTHS = ((1, 1), (3, 17), (16, 16), (33, 600), (600, 5), (17, 129), (0, 9), (64, 64))
"""Queries and keys of a sequence."""


def in_runs(heads: int, kv_heads: int, width: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, host.Runs]:
    """Queries one behind the other, keys in runs of the opposite order; what no run holds is not a number."""
    rows, keys = (torch.tensor(each, dtype=torch.int32) for each in zip(*LENGTHS, strict=True))
    ends, starts = rows.cumsum(0, dtype=torch.int32), (keys + 3).flip(0).cumsum(0, dtype=torch.int32).flip(0) - keys
    q = draw(int(rows.sum()), 3 * heads, width, dtype=dtype, seed=1)[:, :heads] * 3  # Rows lie apart.
    pools = torch.full((2, int(starts.max() + 600), kv_heads, width), torch.nan, dtype=dtype)
    for i, (first, length) in enumerate(zip(starts.tolist(), keys.tolist(), strict=True)):
        pools[:, first : first + length] = draw(2, length, kv_heads, width, dtype=dtype, seed=i + 2)
    return q, *pools.unbind(), host.Runs(ends - rows, ends, starts, keys)


@dtypes
@pytest.mark.parametrize("shape", WIDTHS, ids=str)
def test_attention_of_runs_is_its_reference_and_company_changes_no_bit(dtype, shape):
    q, k, v, runs = in_runs(*shape, dtype)
    found = host.attend_runs(q, k, v, runs, torch.empty(q.shape, dtype=dtype))
    expected = host.attend_runs_reference(q, k, v, runs, torch.empty(q.shape, dtype=dtype))
    # Scores up to 40: their last bits are worth 4e-6, of which a row has several.
    close = {"atol": max(2 * ROUNDING[dtype], 2e-5), "rtol": ROUNDING[dtype]}
    torch.testing.assert_close(found, expected, **close)
    for i, (rows, _) in enumerate(LENGTHS):
        for count in {rows, min(rows, 5)}:
            own = slice(int(runs.q_start[i]), int(runs.q_start[i]) + count)
            first = torch.tensor([0], dtype=torch.int32)
            alone = host.Runs(first, first + count, runs.k_start[i : i + 1], runs.k_len[i : i + 1])
            assert torch.equal(host.attend_runs(q[own], k, v, alone, torch.empty_like(found[own])), found[own])


@dtypes
def test_keys_that_are_not_seen_change_no_bit(dtype):
    q, k, v, runs = in_runs(4, 2, 20, dtype)
    seen = torch.tensor([1, 9, 16, 257, 5, 128, 0, 1], dtype=torch.int32)
    found, expected = (
        host.attend_runs(q, k, v, each, torch.zeros(q.shape, dtype=dtype))
        for each in (runs._replace(seen=seen), runs._replace(k_len=seen))
    )
    assert torch.equal(found, expected)


def test_long_sequences_copy_some_heads_at_a_time():
    """Of 3 heads two fill what is copied at once."""
    length, width = 4200, 224
    q, k, v = draw(9, 3, width, dtype=torch.float32), *(draw(length, 3, width, dtype=torch.float32) for _ in range(2))
    runs = host.Runs(*(torch.tensor([each], dtype=torch.int32) for each in (0, 9, 0, length)))
    found = host.attend_runs(q, k, v, runs, torch.empty(q.shape))
    expected = host.attend_runs_reference(q, k, v, runs, torch.empty(q.shape))
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)
    for head in range(3):
        own = (each[:, head : head + 1].contiguous() for each in (q, k, v))
        assert torch.equal(host.attend_runs(*own, runs, torch.empty(9, 1, width)), found[:, head : head + 1])


def test_scores_far_apart_are_torch_s():
    q, k, v, runs = in_runs(4, 2, 20, torch.float32)
    found = host.attend_runs(q * 40, k, v, runs, torch.empty(q.shape))
    expected = host.attend_runs_reference(q * 40, k, v, runs, torch.empty(q.shape))
    torch.testing.assert_close(found, expected, atol=2e-4, rtol=1e-4)


def test_runs_of_a_wrong_dtype_are_refused():
    q, k, v, runs = in_runs(4, 2, 20, torch.float32)
    with pytest.raises(ValueError, match="int32 runs"):
        host.attend_runs(q, k, v, runs._replace(k_len=runs.k_len.long()), torch.empty(q.shape))


def test_threads_change_no_bit():
    at = paged((4000, 3000, 17), 8, 2, 64, 16, torch.float32)
    x, weight = draw(3000, 512, dtype=torch.float32), draw(512, dtype=torch.float32)
    q, k, v, runs = in_runs(8, 8, 64, torch.float32)
    threads, found = torch.get_num_threads(), []
    try:
        for count in (1, 3):
            torch.set_num_threads(count)
            runs_of = host.attend_runs(q, k, v, runs, torch.empty(q.shape))
            found.append((host.decode(*at), host.rms_norm(x, weight, 1e-5), host.swiglu(x, x), runs_of))
    finally:
        torch.set_num_threads(threads)
    for one, several in zip(*found, strict=True):
        assert torch.equal(one, several)


def test_a_decode_is_bit_for_bit_the_same_beside_a_prefill_and_a_chunk():
    worker = executor(small_model())
    ids, tokens = prompt(50, seed=3), []
    for company in ([], [(0, 30)], [(20, 5), (33, 1)], [(60, 2), (0, 1), (47, 1)]):
        slot = start(worker, ids)
        generate(worker, slot, 50, 2)
        others = []
        for seed, (history, count) in enumerate(company):
            other = start(worker, prompt(history + count, seed))
            if history:
                run(worker, (other, 0, history, False))
            others.append((other, history, count, True))
        run(worker, *others, (slot, 51, 1, True))
        rows = torch.from_numpy(
            worker.tables.rows(*(torch.tensor([x, y]).numpy() for x, y in ((slot, slot), (50, 51))))
        )
        tokens.append(worker.pool.v.flatten(1, 2)[:, rows].clone())
        for each in (slot, *(other[0] for other in others)):
            worker.close_slot(each)
    for found in tokens[1:]:
        assert torch.equal(found, tokens[0])


def test_without_a_compiler_torch_serves_the_same_tokens(monkeypatch, afresh):
    def answer() -> tuple[list[int], str | None]:
        worker = executor(small_model())
        slot = start(worker, prompt(20))
        return generate(worker, slot, 20, 12), worker.paths()["host_kernels_unavailable"]

    monkeypatch.setenv("CXX", "/nonexistent/compiler")
    expected, why = answer()
    assert why is not None
    assert "/nonexistent/compiler" in why
    monkeypatch.delenv("CXX")
    probe.host_fault.cache_clear()
    assert answer() == (expected, None)


def test_a_wrong_kernel_does_not_serve(monkeypatch, afresh):
    for name in ("decode", "runs"):
        run, right, reference = probe._HOST_CASES[name]
        with monkeypatch.context() as patch:
            wrong = run, lambda q, *rest, right=right: right(q * -1.0, *rest), reference
            patch.setitem(probe._HOST_CASES, name, wrong)
            probe.host_fault.cache_clear()
            found = probe.host_fault(torch.float32)
        assert found is not None
        assert found.startswith(f"{name}: it is off by")


def test_what_was_made_is_kept_and_made_again_where_it_is_broken(monkeypatch, afresh, tmp_path):
    """A second compiler of the same name that can make nothing is not asked."""
    tool = compiler(monkeypatch, tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    kept = host.LIBRARY.cached_path(host.LIBRARY.command())
    kept.parent.mkdir(parents=True, mode=0o700)
    kept.write_text("not a library")
    load_library(host.LIBRARY)
    assert [each.name for each in kept.parent.iterdir()] == [kept.name]
    assert kept.read_bytes()[:4] == b"\x7fELF"
    tool.write_text("#!/bin/sh\nexit 1\n")
    load_library.cache_clear()
    assert load_library(host.LIBRARY) is not None


def test_where_nothing_can_be_kept_it_is_made_for_the_process(monkeypatch, afresh, tmp_path):
    (tmp_path / "file").write_text("")
    compiler(monkeypatch, tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert load_library(host.LIBRARY) is not None
