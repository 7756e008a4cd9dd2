"""The masked places of every block, padded to the rows a GEMM is given at least, and their random numbers.

Which candidates become tokens, by each rule, and what is read back.

Logits of candidates in chunks, of whole steps at once, and guided.
"""

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.step_cases import Resident, Step, step_of
from support.tiny_models import GQA, MHA, network
from torch import Tensor

from baselines.dllm.static.executor import MonolithicHead, every_row_s_logits, reduce_every_row
from engines.dllm.config import DecodeConfig, EngineConfig, Phase
from engines.dllm.denoise import Reduction
from engines.dllm.executor.output import CandidateChoice, Commit, Committed, PackedHead, forwarded_span, guided_logits
from engines.dllm.executor.rows import BlockRows, ItemTable, PackedRows
from engines.dllm.executor.step import Block, Candidates, Guidance, StepLayout
from engines.dllm.plan import PlanItem, Request
from engines.runtime.noise import row_keys


def chosen_of(step: Step) -> tuple[CandidateChoice, Block, Candidates]:
    table = ItemTable.of(step.items, step.state.slots(step.items))
    packed = PackedRows.of(table, None, width=step.state.width, least=8)
    places = BlockRows.of(table, packed.base, width=step.state.width, shifts_logits=False)
    padding = None if places.inside is None else ~torch.from_numpy(places.inside)
    position, row, flat, slot = step.staging.send(places.position, places.packed, places.flat, table.slot)
    block = Block(position, row, flat, padding, slot)
    choice = CandidateChoice(step.state, step.staging, vocab_size=GQA.vocab)
    layout = StepLayout(num_rows=packed.num_rows, rows=None, block=block, every=None)
    return choice, block, choice.of(step.items, layout, step.state.block_tokens(block))


residents = st.integers(1, 12).flatmap(
    lambda length: st.builds(
        Resident,
        phase=st.just(Phase.REUSE),
        prompt_len=st.integers(1, 9),
        block_length=st.just(length),
        committed=st.integers(0, length - 1),
    )
)


@given(st.lists(residents, min_size=1, max_size=4))
def test_they_are_the_masked_places(found):
    step = step_of(found)
    _, block, chosen = chosen_of(step)
    wanted = [
        (i, item.block_end - 1 - n) for i, item in enumerate(step.items) for n in reversed(range(item.masks_left))
    ]
    positions = block.positions.take(chosen.cell).tolist()
    assert list(zip(chosen.item.tolist(), positions, strict=True))[: chosen.size] == wanted
    assert chosen.size == len(wanted)
    assert len(chosen.row) == len(chosen.cell) == len(chosen.item) == max(8, len(wanted))
    assert torch.equal(chosen.row, block.packed.take(chosen.cell))


def test_random_numbers_are_those_of_the_request_its_step_and_the_position():
    found = [
        Resident(phase=Phase.REUSE, prompt_len=3),
        Resident(phase=Phase.REUSE, prompt_len=5, generation={"temperature": 0.7, "seed": 9, "top_k": 2}),
    ]
    step = step_of(found)
    choice, block, chosen = chosen_of(step)
    step.state.next_draws(step.items[1:])
    sampling = choice.sampling(step.items, chosen, block)
    assert sampling is not None
    assert sampling.temperature.tolist() == [0.0] * 4 + [0.7] * 4
    assert sampling.top_k is not None
    assert sampling.top_k.tolist() == [GQA.vocab] * 4 + [2] * 4
    assert sampling.alg_temp is None
    seed, draw, position = torch.tensor([9] * 4), torch.tensor([1] * 4), torch.arange(5, 9)
    assert torch.equal(sampling.keys[4:], row_keys(seed, draw, position))


def test_nothing_is_drawn_where_nobody_asked():
    step = step_of([Resident(phase=Phase.REUSE)])
    choice, block, chosen = chosen_of(step)
    assert choice.sampling(step.items, chosen, block) is None
    assert step.state.next_draws(step.items) == [0]


TOKEN = 3


def block_of(step: Step) -> Block:
    table = ItemTable.of(step.items, step.state.slots(step.items))
    packed = PackedRows.of(table, None, width=step.state.width, least=8)
    places = BlockRows.of(table, packed.base, width=step.state.width, shifts_logits=False)
    position, row, flat, slot = step.staging.send(places.position, places.packed, places.flat, table.slot)
    padding = None if places.inside is None else ~torch.from_numpy(places.inside)
    return Block(position, row, flat, padding, slot)


def commit(
    step: Step,
    confidence: Sequence[float],
    config: EngineConfig | None = None,
    *,
    stop_ids: frozenset[int] = frozenset({GQA.config.eos_token_id}),
    **how: object,
) -> tuple[Committed, list[list[int]]]:
    """``confidence`` of the masked places in order; the positions that hold TOKEN afterwards, by request."""
    block = block_of(step)
    found = step.state.block_tokens(block)
    layout = StepLayout(num_rows=0, rows=None, block=block, every=None)
    chosen = CandidateChoice(step.state, step.staging, vocab_size=GQA.vocab).of(step.items, layout, found)
    assert chosen.size == len(confidence)
    padded = torch.tensor([*confidence, *confidence[:1] * (len(chosen.row) - chosen.size)])
    part = Commit(config or EngineConfig(), step.state, step.staging, stop_ids, **how)
    done = part(step.items, block, found, chosen, (torch.full_like(chosen.row, TOKEN), padded))
    tokens = [step.state.tokens[slot].tolist() for slot in step.state.slots(step.items)]
    return done, [
        [p for p in range(item.block_start, item.block_end) if row[p] == TOKEN]
        for item, row in zip(step.items, tokens, strict=True)
    ]


def test_the_most_confident_is_committed_and_ties_go_to_the_first():
    step = step_of(
        [Resident(phase=Phase.REUSE, prompt_len=10), Resident(phase=Phase.REUSE, prompt_len=20, committed=2)]
    )
    done, positions = commit(step, [0.1, 0.9, 0.9, 0.2, 0.3, 0.4])
    assert done == Committed([1, 1], {})
    assert positions == [[11], [23]]


@given(st.lists(st.floats(0, 1, width=32), min_size=7, max_size=7), st.integers(2, 4), st.integers(0, 2))
def test_a_quota_takes_the_best(confidence, first, second):
    """Blocks are ragged; what is committed already stays."""
    residents = [
        Resident(phase=Phase.REUSE, prompt_len=10, commit=first),
        Resident(phase=Phase.REUSE, prompt_len=20, block_length=5, committed=2, commit=second),
    ]
    step = step_of(residents)
    done, positions = commit(step, confidence)
    assert done.counts == [first, second]
    best = [
        sorted(range(4), key=lambda i: (-confidence[i], i)),
        sorted(range(3), key=lambda i: (-confidence[4 + i], i)),
    ]
    assert positions[0] == sorted(10 + i for i in best[0][:first])
    assert positions[1] == sorted(22 + i for i in best[1][:second])
    assert step.state.tokens[step.state.slots(step.items)[1], 20:22].tolist() == [20, 21]


def test_parallel_decoding_says_how_many_passed():
    residents = [
        Resident(phase=Phase.REUSE, prompt_len=10, generation={"threshold": 0.5}),
        Resident(phase=Phase.REUSE, prompt_len=20, generation={"threshold": 0.99}),
        Resident(phase=Phase.REUSE, prompt_len=30),
    ]
    done, positions = commit(step_of(residents), [0.6, 0.1, 0.7, 0.2] * 3)
    assert done.counts == [2, 1, 1]
    assert positions == [[10, 12], [22], [32]]


@pytest.mark.parametrize(
    ("first_step", "wanted"), [("ranked", [12]), ("first_and_ranked", [10]), ("first_position", [10])]
)
def test_the_first_step_of_a_block(first_step, wanted):
    step = step_of([Resident(phase=Phase.REUSE, prompt_len=10)])
    step.items[0] = step.items[0]._replace(step_in_block=0)
    config = EngineConfig(decode=DecodeConfig(first_step=first_step))
    done, positions = commit(step, [0.1, 0.2, 0.9, 0.3], config)
    assert (done.counts, positions) == ([1], [wanted])


def test_a_first_place_that_is_committed_is_no_first_step():
    step = step_of([Resident(phase=Phase.REUSE, prompt_len=10, committed=1)])
    step.items[0] = step.items[0]._replace(step_in_block=0)
    done, positions = commit(step, [0.2, 0.9, 0.3], EngineConfig(decode=DecodeConfig(first_step="first_and_ranked")))
    assert (done.counts, positions) == ([1], [[12]])


def test_a_library_ranks_what_is_forwarded():
    """All positions of a Refresh; of a Reuse its window, which begins with the block."""
    step = step_of([Resident(prompt_len=10), Resident(phase=Phase.REUSE, prompt_len=20)])
    spans = [forwarded_span(item, request) for item, request in zip(step.items, step.requests, strict=True)]
    assert spans == [(10, step.items[0].total_len), (0, step.items[1].window_len)]


def test_a_published_ranking_spans_what_its_code_ranks():
    """Equals are taken in the library's order, which depends on where they lie in what it is given."""
    asked: list[tuple[int, int]] = []

    def span(item: PlanItem, request: Request) -> tuple[int, int]:
        asked.append((item.request_id, request.request_id))
        return 7, 40

    step = step_of([Resident(phase=Phase.REUSE, prompt_len=10, commit=2)])
    done, positions = commit(step, [0.5] * 4, EngineConfig(tie_policy="parity"), ranked_span=span)
    ranked = torch.full((40,), -torch.inf)
    ranked[7:11] = 0.5
    assert done.counts == [2]
    assert positions == [sorted((torch.topk(ranked, 2).indices + 3).tolist())]
    assert asked == [(0, 0)]


def test_stops_are_read_of_blocks_that_are_complete():
    stopping = {"stop_at_eos": True}
    residents = [
        Resident(phase=Phase.REUSE, prompt_len=10, committed=3, generation=stopping),
        Resident(phase=Phase.REUSE, prompt_len=20, committed=2, generation=stopping),
        Resident(phase=Phase.REUSE, prompt_len=30, committed=3),
    ]
    step = step_of(residents)
    done, _ = commit(step, [0.5] * 4, stop_ids=frozenset({11, 12, 20, 30, 31}))
    assert done == Committed([1, 1, 1], {0: 11})
    assert step.state.release(0) == (10, 11, 12, TOKEN, *[GQA.config.eos_token_id] * 4)


def test_a_chance_of_one_commits_every_mask_and_of_none_no_mask():
    config = EngineConfig(decode=DecodeConfig(quota="origin"))
    for chance, wanted in ((1.0, [11, 12, 13]), (0.0, [])):
        step = step_of([Resident(phase=Phase.REUSE, prompt_len=10, committed=1)])
        step.items[0] = step.items[0]._replace(commit_probability=chance)
        done, positions = commit(step, [0.1, 0.2, 0.3], config)
        assert (done.counts, positions) == ([len(wanted)], [wanted])


REDUCTION = Reduction(suppress_id=MHA.mask_id)
MONOLITHIC = EngineConfig(logit_rows="monolithic")


class CountingModel:
    """Notes how many rows of logits are made at a time."""

    def __init__(self) -> None:
        self.config, self.made = network(MHA).config, []

    def logits(self, hidden: Tensor) -> Tensor:
        self.made.append(len(hidden))
        return network(MHA).logits(hidden)


def hidden_of(seed: int, rows: int) -> Tensor:
    return torch.randn(rows, MHA.width, generator=torch.Generator().manual_seed(seed))


def candidates_of(rows: list[int], *, is_every_row: bool = False) -> Candidates:
    index = torch.tensor(rows)
    return Candidates(len(rows), index, index, np.zeros(len(rows), dtype=np.int64), is_every_row)


@given(st.integers(0, 99), st.lists(st.integers(0, 19), min_size=8, max_size=30), st.integers(1, 12))
def test_every_head_gives_the_same_tokens(seed, rows, chunk):
    model, hidden, candidates = CountingModel(), hidden_of(seed, 20), candidates_of(rows)
    whole = PackedHead(model, MONOLITHIC, REDUCTION)(hidden, None, candidates, None)
    assert model.made == [20]
    model.made.clear()
    config = EngineConfig(max_num_logits=chunk)
    chunked = PackedHead(model, config, REDUCTION)(hidden, None, candidates, None)
    assert sum(model.made) == len(rows)
    assert max(model.made) <= chunk
    published = MonolithicHead(every_row_s_logits(network(MHA)), reduce_every_row(REDUCTION))(
        hidden, None, candidates, None
    )
    for found in (chunked, published):
        assert torch.equal(found[0], whole[0])
        torch.testing.assert_close(found[1], whole[1], rtol=1e-5, atol=1e-7)


def test_rows_are_counted_as_they_are_made():
    model = network(MHA)
    assert PackedHead(model, MONOLITHIC, REDUCTION).logit_rows(20, 7) == 20
    assert PackedHead(model, EngineConfig(), REDUCTION).logit_rows(20, 7) == 7
    assert MonolithicHead(every_row_s_logits(model), reduce_every_row(REDUCTION)).logit_rows(20, 7) == 20


@pytest.mark.parametrize("rows", [slice(None), torch.tensor([3, 0, 5])])
def test_guidance_leaves_rows_that_did_not_ask(rows):
    hidden, blind = hidden_of(0, 8), hidden_of(1, 8)
    scale = torch.tensor([0.0, 1.5] * 4)
    found = guided_logits(network(MHA), hidden, Guidance(blind, scale), rows)
    with_prompt, without = network(MHA).logits(hidden)[rows], network(MHA).logits(blind)[rows]
    own = scale[rows].unsqueeze(1)
    torch.testing.assert_close(found, without + (own + 1) * (with_prompt - without), rtol=1e-4, atol=1e-4)
    asked = scale[rows] > 0
    assert torch.equal(found[~asked], network(MHA).logits(hidden[rows])[~asked]), "to the last bit"
