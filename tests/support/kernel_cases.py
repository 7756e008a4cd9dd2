"""Kernels against their references on inputs drawn from a seed; for the interpreter's tests and a GPU's."""

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from engines.kernels.confidence import (
    Partial,
    combine,
    combine_reference,
    confidence,
    confidence_reference,
    partial,
    partial_reference,
)
from engines.kernels.pack import Building, pack, pack_reference, store
from engines.kernels.rowwise import rms_norm, rms_norm_reference, rotate, rotate_reference, swiglu, swiglu_reference
from engines.kernels.scores import Selection, scores, scores_reference
from engines.models.layers import inverse_frequencies, rotary_tables
from engines.runtime.device import store_by_index

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


class Sizes(NamedTuple):
    """Lengths of one building request, positions counted in its sequence."""

    prefix: int
    block: int
    window: int
    """The block and what of the sequence behind it is not retained either."""
    suffix: int
    kept: int

    @property
    def context(self) -> int:
        return self.prefix + self.suffix


class Drawn:
    """Random tensors on one device, the same on all."""

    def __init__(self, seed: int, device: str) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.device = device

    def normal(self, *shape: int, dtype: str, scale: float = 1.0) -> Tensor:
        return (torch.randn(shape, generator=self.generator) * scale).to(DTYPES[dtype]).to(self.device)

    def in_wider_rows(self, rows: int, *shape: int, dtype: str) -> Tensor:
        """[rows, *shape] whose rows lie apart, as those of a fused projection do."""
        wide = self.normal(rows, 3, *shape, dtype=dtype)
        return wide[:, 1]

    def permutation(self, count: int) -> Tensor:
        return torch.randperm(count, generator=self.generator)

    def building(self, requests: Sequence[Sizes]) -> tuple[Building, int, int]:
        """With packed rows and pool rows to hold them; some of both belong to nobody."""
        run_start, rows = [], 3
        for size in requests:
            run_start.append(rows)
            rows += size.prefix + size.window + size.suffix + 1
        kv_start, pool_rows = [0] * len(requests), 2
        for i in self.permutation(len(requests)).tolist():
            kv_start[i] = pool_rows
            pool_rows += requests[i].kept + 2
        table = torch.tensor(
            [
                run_start,
                [size.prefix for size in requests],
                [size.block for size in requests],
                [size.window for size in requests],
                [size.context for size in requests],
                [size.kept for size in requests],
                kv_start,
            ]
        )
        return Building.of(table.to(self.device)), rows, pool_rows


def check_pack(
    device: str, seed: int, requests: Sequence[Sizes], kv_heads: int, width: int, dtype: str, chosen_heads: int
) -> None:
    """``chosen_heads`` 0 is the dense mode."""
    draw = Drawn(seed, device)
    building, rows, pool_rows = draw.building(requests)
    k = draw.in_wider_rows(rows, kv_heads, width, dtype=dtype)
    v = draw.normal(rows, kv_heads, width, dtype=dtype)
    max_kept = max(size.kept for size in requests) + 1
    chosen = None
    if chosen_heads > 0:
        # What is past kept must not be read; longer rows than asked for, as of a sort.
        index = torch.full((len(requests), chosen_heads, max_kept + 5), 10**9)
        for i, size in enumerate(requests):
            for head in range(chosen_heads):
                index[i, head, : size.kept] = draw.permutation(size.context)[: size.kept]
        chosen = index.to(device)[..., :max_kept]
    found, wanted = (
        [torch.full((pool_rows, kv_heads, width), 7.0, dtype=k.dtype, device=device) for _ in "kv"] for _ in "fw"
    )
    pack(*found, k, v, building, chosen, max_kept)
    pack_reference(*wanted, k, v, building, chosen, max_kept)
    assert torch.equal(found[0], wanted[0])
    assert torch.equal(found[1], wanted[1])
    assert not torch.equal(found[0], found[1]) or all(size.kept == 0 for size in requests)


def check_pack_past_32_bits(device: str) -> None:
    """The last rows of a pool of more than 2^31 elements."""
    draw = Drawn(0, device)
    kv_heads, width = 32, 128
    pool_rows = 2**31 // (kv_heads * width) + 40
    building, rows, _ = draw.building([Sizes(prefix=8, block=2, window=4, suffix=8, kept=12)])
    building.kv_start.fill_(pool_rows - 13)
    k, v = (draw.normal(rows, kv_heads, width, dtype="fp16") for _ in "kv")
    pools = [torch.empty((pool_rows, kv_heads, width), dtype=k.dtype, device=device) for _ in "kv"]
    chosen = draw.permutation(16)[:12].view(1, 1, 12).to(device)
    wanted = [torch.empty((20, kv_heads, width), dtype=k.dtype, device=device) for _ in "kv"]
    pack(pools[0], pools[1], k, v, building, chosen, 12)
    pack_reference(wanted[0], wanted[1], k, v, building._replace(kv_start=building.kv_start * 0), chosen, 12)
    for pool, rows_wanted in zip(pools, wanted, strict=True):
        assert torch.equal(pool[-13:-1], rows_wanted[:12])


def check_scores(
    device: str,
    seed: int,
    requests: Sequence[Sizes],
    heads: int,
    kv_heads: int,
    width: int,
    dtype: str,
    selection: Selection,
    kernel: int,
) -> None:
    draw = Drawn(seed, device)
    building, rows, _ = draw.building(requests)
    q = draw.in_wider_rows(rows, heads, width, dtype=dtype)
    k = draw.normal(rows, kv_heads, width, dtype=dtype)
    longest = max(size.block for size in requests), max(size.context for size in requests) + 2
    found = scores(q, k, building, selection, kernel, *longest)
    wanted = scores_reference(q, k, building, selection, kernel, *longest)
    assert found.shape == wanted.shape == (len(requests), 1 if selection == "uniform" else kv_heads, longest[1])
    for i, size in enumerate(requests):
        if size.context > 0:
            torch.testing.assert_close(found[i, :, : size.context], wanted[i, :, : size.context], rtol=1e-4, atol=1e-5)
        assert (found[i, :, size.context :] == -torch.inf).all()
        alone = Building(*(t[i : i + 1] for t in building))
        assert torch.equal(scores(q, k, alone, selection, kernel, *longest)[0], found[i]), "company changes nothing"


def awkward_logits(draw: Drawn, rows: int, vocabulary: int, dtype: str, suppress_id: int) -> Tensor:
    """Row 0 ties everywhere, row 1 is best at ``suppress_id``, row 2 has infinities, row 3 is huge."""
    logits = draw.in_wider_rows(rows, vocabulary, dtype=dtype)
    logits *= 4
    logits[0] = 1.5
    if rows > 1:
        logits[1, suppress_id] = 60
    if rows > 2:
        logits[2, 1::2] = -torch.inf
    if rows > 3:
        logits[3] += 1000
    return logits


def check_confidence(
    device: str, seed: int, rows: int, vocabulary: int, dtype: str, suppressed: bool, shards: int
) -> None:
    draw = Drawn(seed, device)
    middle = vocabulary // 2
    logits = awkward_logits(draw, rows, vocabulary, dtype, middle)
    suppress_id = middle if suppressed else None
    before = logits.clone()
    token, found = confidence(logits, suppress_id)
    assert torch.equal(logits, before), "logits are only read"
    wanted_token, rough = confidence_reference(logits, suppress_id)
    assert torch.equal(token, wanted_token)
    wanted = logits.double().softmax(dim=1).gather(1, token.unsqueeze(1)).squeeze(1).float()
    torch.testing.assert_close(found, wanted, rtol=2e-5, atol=1e-30)
    # The reference rounds the normaliser, which is 1000 where the logits are.
    torch.testing.assert_close(rough, wanted, rtol=3e-4, atol=1e-30)
    if suppressed and rows > 1:
        assert (token != middle).all()
        assert found[1] < 1e-9, "the suppressed token stays in the normaliser"
    for row in range(rows):
        alone = confidence(logits[row : row + 1], suppress_id)
        assert torch.equal(alone[0], token[row : row + 1])
        assert torch.equal(alone[1], found[row : row + 1]), "company changes nothing"

    edges = [vocabulary * i // shards for i in range(shards + 1)]
    pieces = []
    for first, end in pairwise(edges):
        piece = partial(logits[:, first:end], suppress_id, first)
        for a, b in zip(piece, partial_reference(logits[:, first:end], suppress_id, first), strict=True):
            torch.testing.assert_close(a, b, rtol=2e-5, atol=1e-30)
        pieces.append(piece)
    # Shards may come in any order: a tie still goes to the lower id.
    stacked = Partial(*(torch.stack(column) for column in zip(*pieces[::-1], strict=True)))
    for combined in (combine(stacked), combine_reference(stacked)):
        assert torch.equal(combined[0], wanted_token)
        torch.testing.assert_close(combined[1], wanted, rtol=2e-5, atol=1e-30)


def check_confidence_of_nan(device: str) -> None:
    logits = torch.zeros(3, 5000, device=device)
    logits[0, 4500], logits[1], logits[2] = torch.nan, torch.nan, -torch.inf
    token, found = confidence(logits, 7)
    assert found.isnan().all()
    assert ((token >= 0) & (token < 5000)).all()
    assert confidence_reference(logits, 7)[1].isnan().all()


def check_rms_norm(device: str, seed: int, rows: int, width: int, dtype: str, adds: bool) -> None:
    draw = Drawn(seed, device)
    x = draw.in_wider_rows(rows, width, dtype=dtype)
    weight = draw.normal(width, dtype=dtype)
    delta = draw.normal(rows, width, dtype=dtype) if adds else None
    total = x.clone()
    # The strided rows themselves, so that what lies between them is seen to stay.
    buffer = x._base
    assert buffer is not None
    between = buffer[:, ::2].clone()
    wanted = rms_norm_reference(total, weight, 1e-5, delta)
    found = rms_norm(x, weight, 1e-5, delta)
    same(x, total)
    assert torch.equal(buffer[:, ::2], between)
    close(found, wanted)


def check_rotary(
    device: str, seed: int, rows: int, heads: int, kv_heads: int, width: int, dtype: str, full_precision: bool
) -> None:
    draw = Drawn(seed, device)
    q = draw.in_wider_rows(rows, heads, width, dtype=dtype)
    k = draw.normal(rows, kv_heads, width, dtype=dtype)
    angles = torch.outer(torch.arange(50, dtype=torch.float32), inverse_frequencies(width, 500.0))
    cos, sin = (t.to(device) for t in rotary_tables(angles))
    positions = torch.randint(50, (rows,), generator=draw.generator).to(device)
    gathered = (cos[positions], sin[positions])
    if not full_precision:
        gathered = gathered[0].to(q.dtype), gathered[1].to(q.dtype)
    wanted = [q.clone(), k.clone()]
    buffer = q._base
    assert buffer is not None
    between = buffer[:, ::2].clone()
    rotate_reference(*wanted, *gathered, full_precision=full_precision)
    rotate(q, k, *gathered, full_precision=full_precision)
    same(q, wanted[0])
    same(k, wanted[1])
    assert torch.equal(buffer[:, ::2], between)


def check_swiglu(device: str, seed: int, rows: int, width: int, dtype: str) -> None:
    draw = Drawn(seed, device)
    both = draw.normal(rows, 2 * width, dtype=dtype, scale=6)
    gate, up = both[:, :width], both[:, width:]
    gate[0, 0] = 100
    gate[-1, -1] = -100
    close(swiglu(gate, up), swiglu_reference(gate, up))


def check_store(device: str, seed: int, rows: int, heads: int, width: int, dtype: str) -> None:
    draw = Drawn(seed, device)
    both = draw.normal(rows, 2, heads, width, dtype=dtype)
    k, v = both.unbind(1)
    places = torch.randperm(3 * rows + 1, generator=torch.Generator().manual_seed(seed))[:rows].to(device)
    pools = draw.normal(2, 3 * rows + 1, heads, width, dtype=dtype)
    wanted = pools.clone()
    store(*pools, places, k, v)
    store_by_index(*wanted, places, k, v)
    assert torch.equal(pools, wanted)


def cuts_off(x: Tensor) -> bool:
    """Triton's interpreter cuts a float32 off where it is to round it to bfloat16."""
    return x.dtype == torch.bfloat16 and not x.is_cuda


def same(found: Tensor, wanted: Tensor) -> None:
    """Bit for bit, where the kernel can round."""
    if cuts_off(found):
        torch.testing.assert_close(found, wanted, rtol=2**-6, atol=2**-6)
    else:
        assert torch.equal(found, wanted)


def close(found: Tensor, wanted: Tensor) -> None:
    """float32 sums and exponentials differ in their last bits; 16-bit results then hardly ever."""
    if found.dtype == torch.float32:
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)
        return
    torch.testing.assert_close(found, wanted, rtol=4 * torch.finfo(found.dtype).eps, atol=1e-6)
    if not cuts_off(found):
        assert (found != wanted).float().mean() < 0.02
