"""Kernels that read blocks in place are tried on an example before they serve, and graphs hand them the right metadata.

No kernel is installed on a CPU: what is tested is the way to it, with the reference in its place and with faulty ones.

No block is lost, none belongs to two sequences, and what does not fit changes nothing.

Sampled tokens follow softmax(logits / temperature) cut at top-p, and depend on seed and position alone.
"""

import sys
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from support.causal import executor, generate, paged_executor, pooled, prompt, run, small_model, start
from support.refusals import refuses
from torch import Tensor

from engines.ar.sampling import SamplingParams
from engines.ar.torch import sampling
from engines.ar.torch.attention import DeviceKernel, fault, kernels, probe, reference_kernel
from engines.ar.torch.executor import grid
from engines.ar.torch.sampling import Draws, TokenScores, draw_keys, next_tokens, nucleus
from engines.ar.torch.worker import SessionMemory
from engines.attention.flash import KernelSpans
from engines.errors import UserError
from engines.policies.views import Bucket, Rung
from engines.runtime import noise
from engines.runtime.rows import NOBODY, BlockTables, OutOfBlocksError

REFERENCE = reference_kernel


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
    assert found == [("flash-attn", True), ("torch-varlen", True), ("torch-varlen", False)]
    monkeypatch.setitem(sys.modules, interface.__name__, None)
    assert [name for name, _ in kernels()] == ["torch-varlen"] * 2


def test_a_cpu_has_none():
    assert not isinstance(probe(torch.device("cpu"), torch.float32, 16, 1), DeviceKernel)


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
    from engines.ar.torch.rows import PackedWork

    slots = [start(worker, prompt(9, seed)) for seed in range(5)]
    run(worker, *((slot, 0, 9, True) for slot in slots))

    def size(n: int) -> object:
        return worker.run(PackedWork.of([(slot, 9, 1, True) for slot in slots[:n]])).size

    assert [size(n) for n in (1, 2, 4, 5)] == [Bucket(1, 1), Bucket(1, 4), Bucket(1, 4), None]
    # A bucket nobody captured is no bucket.
    assert worker.run(PackedWork.of([(slots[0], 0, 9, True)]), Bucket(16, 1)).size is None


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


class Tables(RuleBasedStateMachine):
    """Random growth, trimming and closing against a list of lengths."""

    @initialize(block_size=st.sampled_from((1, 3, 16)), num_blocks=st.integers(1, 30))
    def begin(self, block_size: int, num_blocks: int) -> None:
        self.tables = BlockTables(num_slots=6, num_blocks=num_blocks, block_size=block_size, max_len=64, spare=1)
        self.lengths: dict[int, int] = {}

    @precondition(lambda self: len(self.lengths) < 6)
    @rule()
    def open(self) -> None:
        slot = self.tables.open()
        assert slot not in self.lengths
        self.lengths[slot] = 0

    @precondition(lambda self: bool(self.lengths))
    @rule(data=st.data())
    def grow(self, data: st.DataObject) -> None:
        slots = data.draw(st.lists(st.sampled_from(sorted(self.lengths)), min_size=1, unique=True))
        lengths = np.array([data.draw(st.integers(1, 64)) for _ in slots])
        before, free = self.tables.table.copy(), self.tables.num_free
        missing = self.tables.missing(np.array(slots), lengths)
        try:
            self.tables.grow(np.array(slots), lengths)
        except OutOfBlocksError:
            assert missing > free
            assert np.array_equal(self.tables.table, before)
            assert self.tables.num_free == free
        else:
            assert missing <= free
            for slot, length in zip(slots, lengths.tolist(), strict=True):
                self.lengths[slot] = max(self.lengths[slot], length)

    @precondition(lambda self: bool(self.lengths))
    @rule(data=st.data())
    def trim(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from(sorted(self.lengths)))
        tokens = data.draw(st.integers(0, 64))
        kept = self.tables.table[slot, : self.tables.blocks_for(min(tokens, self.lengths[slot]))].copy()
        self.tables.trim(slot, tokens)
        self.lengths[slot] = min(self.lengths[slot], self.tables.blocks_for(tokens) * self.tables.block_size)
        assert np.array_equal(self.tables.table[slot, : len(kept)], kept), "a prefix moved"

    @precondition(lambda self: bool(self.lengths))
    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from(sorted(self.lengths)))
        self.tables.close(slot)
        del self.lengths[slot]

    @invariant()
    def blocks_are_conserved(self) -> None:
        if not hasattr(self, "tables"):
            return
        tables = self.tables
        held = tables.table[tables.table != NOBODY]
        assert len(set(held.tolist())) == len(held), "a block belongs to two sequences"
        assert len(held) + tables.num_free == tables.num_blocks
        assert int(tables.block_counts.sum()) == len(held)
        assert not tables.table[tables.padding_slot].any()
        assert not tables.table[:, -1].any(), "a spare column was taken"
        for slot, length in self.lengths.items():
            assert tables.block_counts[slot] == tables.blocks_for(length)
            assert (tables.table[slot, : tables.block_counts[slot]] != NOBODY).all()


TestTables = Tables.TestCase
TestTables.settings = settings(max_examples=30, stateful_step_count=40)


@given(st.sampled_from((1, 4, 16)), st.lists(st.integers(1, 40), min_size=1, max_size=5))
def test_rows_of_different_tokens_are_different(block_size, lengths):
    tables = BlockTables(num_slots=5, num_blocks=200, block_size=block_size, max_len=40, spare=2)
    slots = np.array([tables.open() for _ in lengths])
    tables.grow(slots, np.array(lengths))
    rows = [tables.rows(np.full(n, slot), np.arange(n)) for slot, n in zip(slots.tolist(), lengths, strict=True)]
    every = np.concatenate(rows)
    assert len(set(every.tolist())) == sum(lengths)
    assert every.min() >= block_size, "a token lies in nobody's block"
    assert every.max() < (tables.num_blocks + 1) * block_size
    past = tables.rows(np.full(9, slots[0]), np.arange(lengths[0] + block_size, lengths[0] + block_size + 9))
    assert past.max() < block_size, "padding past a sequence's blocks goes to nobody"


def test_what_cannot_be_is_said_in_one_sentence():
    tables = BlockTables(num_slots=1, num_blocks=2, block_size=16, max_len=64)
    slot = np.array([tables.open()])
    with pytest.raises(UserError, match="all 1 slots are taken"):
        tables.open()
    with pytest.raises(OutOfBlocksError, match="3 more blocks of 16 tokens are needed and 2 of 2 are free"):
        tables.grow(slot, np.array([33]))
    with pytest.raises(OutOfBlocksError, match="65 tokens exceeds max_len=64"):
        tables.grow(slot, np.array([65]))
    with refuses("block_size=0"):
        BlockTables(num_slots=1, num_blocks=1, block_size=0, max_len=4)
    tables.close(int(slot[0]))
    with pytest.raises(AssertionError, match="is closed"):
        tables.close(int(slot[0]))


def test_idle_prefixes_go_least_recent_first_and_from_their_tails():
    """Worked by hand: 10 blocks of 4 tokens; sessions of 3 + 3 blocks idle, then one needs 6 of the 4 that are free."""
    tables = BlockTables(num_slots=4, num_blocks=10, block_size=4, max_len=64)
    memory = SessionMemory(tables)
    slots = [tables.open() for _ in range(3)]
    for order, slot in enumerate(slots[:2]):
        memory.admit(slot, 12)
        memory.park(order, slot, 11)
    assert (tables.num_free, memory.room) == (4, 40)
    memory.admit(slots[2], 24)
    assert (memory.cached(0), memory.cached(1)) == (4, 11)
    assert memory.evicted == 2
    assert memory.resume(0) == 4
    with pytest.raises(OutOfBlocksError, match=r"it must keep to Situation\.room"):
        memory.admit(slots[0], 28)
    # Its own prefix is held by now, so session 1's went for it in vain.
    assert memory.cached(1) == 0


@pytest.mark.parametrize(("temperature", "top_p"), [(1.0, 1.0), (0.5, 1.0), (1.0, 0.8), (2.0, 0.6)])
def test_frequencies(temperature, top_p):
    logits = torch.tensor([2.0, 1.0, 0.5, 0.0, -1.0])
    n = 40_000
    keys, every = draw_keys(torch.zeros(n, dtype=torch.int64), torch.arange(n)), torch.ones(n, dtype=torch.float64)
    found = next_tokens(logits.expand(n, 5), Draws(every * temperature, every * top_p, keys, top_p == 1))
    share = torch.softmax(logits.double() / temperature, 0)
    before = share.cumsum(0) - share
    share = torch.where(before < top_p, share, 0.0)
    share /= share.sum()
    counts = torch.bincount(found, minlength=5) / n
    # Five standard deviations of a share.
    assert ((counts - share).abs() <= 5 * (share * (1 - share) / n).sqrt() + 1e-12).all()
    assert counts[share == 0].sum() == 0


@given(st.lists(st.floats(-50, 50), min_size=2, max_size=12), st.floats(0.01, 1.0), st.floats(0.0, 5.0))
def test_a_nucleus_is_the_fewest_likely_tokens_that_hold_top_p(values, top_p, heat):
    logits = torch.tensor([values])
    kept = nucleus(logits, torch.tensor([heat], dtype=torch.float64), torch.tensor([top_p], dtype=torch.float64))[0]
    assert kept[logits.argmax()]
    if heat == 0:
        assert (logits[0][kept] == logits.max()).all()
        return
    share = torch.softmax(logits.double()[0] / max(heat, 1e-300), 0)
    assert share[kept].sum() >= top_p - 1e-9
    assert share[kept].min() >= share[~kept].max() - 1e-12 if (~kept).any() else True
    least = share[kept].min()
    assert share[kept].sum() - least < top_p + 1e-9


cuts = st.tuples(
    st.sampled_from([0, 0.5, 1, 2]), st.sampled_from([0.3, 0.9, 1]), st.integers(0, 9), st.sampled_from([0, 0.2])
)


@given(st.lists(cuts, min_size=1, max_size=4), st.integers(0, 2**32 - 1), st.sampled_from([1, 8]))
def test_the_likeliest_tokens_alone_give_the_nucleus_of_all(each, seed, spread):
    """Equally likely tokens and impossible ones among them, also at the end of the candidates."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randint(-9, 9, (len(each), 40), generator=generator).float() / spread
    logits[logits == logits.min()] = -torch.inf
    temperature, top_p, top_k, min_p = (torch.tensor(column, dtype=torch.float64) for column in zip(*each, strict=True))
    cut = temperature, top_p, top_k.long(), min_p
    expected = nucleus(logits, *cut)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampling, "NUM_CANDIDATES", 6)
        assert torch.equal(nucleus(logits, *cut), expected)
        kept, is_sure = sampling._nucleus_of_likeliest(logits, *cut)
    assert torch.equal(kept[is_sure], expected[is_sure])


@pytest.mark.parametrize("cut", [{"top_p": 0.9}, {"top_k": 5}, {"top_p": 0.9, "top_k": 9, "min_p": 0.01}, {}])
def test_few_candidates_hold_a_nucleus(cut, monkeypatch):
    monkeypatch.setattr(sampling, "NUM_CANDIDATES", 6)
    columns = (torch.tensor([cut.get(name, other)]) for name, other in (("top_p", 1.0), ("top_k", 0), ("min_p", 0.0)))
    one = torch.ones(1, dtype=torch.float64)
    assert sampling._nucleus_of_likeliest(torch.arange(40.0)[None], one, *columns)[1].all()


@pytest.mark.parametrize("num", [1, 7, 64])
def test_a_host_draws_the_same_in_parts(num, monkeypatch):
    generator = torch.Generator().manual_seed(num)
    logits = torch.randn(9, 50, generator=generator)
    temperature, keys = torch.rand(9, dtype=torch.float64, generator=generator), torch.arange(9)
    allowed = torch.rand(9, 50, generator=generator) < 0.1
    allowed[4] = False
    expected = [noise.gumbel_argmax(logits, temperature, keys, mask) for mask in (None, allowed)]
    monkeypatch.setattr(noise, "_CACHED_DRAWS", num)
    for mask, tokens in zip((None, allowed), expected, strict=True):
        assert torch.equal(noise.gumbel_argmax(logits, temperature, keys, mask), tokens)


def test_a_sequence_samples_the_same_alone_and_in_company():
    hot = SamplingParams(temperature=1.5, top_p=0.9, seed=7)
    alone = executor()
    slot = alone.open(hot)
    alone.write(slot, 0, prompt(20))
    alone.tables.grow(np.array([slot]), np.array([40]))
    expected = generate(alone, slot, 20, 10)

    together = executor()
    greedy = start(together, prompt(33, 1))
    other = together.open(SamplingParams(temperature=0.7, seed=8))
    mine = together.open(hot)
    for place, ids in ((other, prompt(5, 2)), (mine, prompt(20))):
        together.write(place, 0, ids)
        together.tables.grow(np.array([place]), np.array([60]))
    found = [run(together, (greedy, 0, 33, True), (other, 0, 5, True), (mine, 0, 20, True))[2]]
    for step in range(9):
        found.append(run(together, (mine, 20 + step, 1, True), (other, 5 + step, 1, True))[0])
    assert found == expected
    reference = executor()
    assert generate(reference, start(reference, prompt(33, 1)), 33, 1) == together.read(greedy, 33, 34)
    assert len(set(expected)) > 4


def test_other_seeds_give_other_answers():
    answers = set()
    for seed in range(4):
        worker = executor()
        slot = worker.open(SamplingParams(temperature=2.0, seed=seed))
        worker.write(slot, 0, prompt(8))
        worker.tables.grow(np.array([slot]), np.array([32]))
        answers.add(tuple(generate(worker, slot, 8, 8)))
    assert len(answers) == 4


def test_equally_likely_tokens_are_told_by_their_ids():
    found = TokenScores(torch.tensor([[1.0, 3.0, 3.0, 2.0, 3.0], [0.0] * 5])).of(torch.tensor([2, 4]))
    assert found.top_ids.tolist() == [[1, 2, 4, 3, 0], [0, 1, 2, 3, 4]]
    assert found.rank.tolist() == [3, 5]
