"""Which candidates become tokens where places or ties decide, and the rows of logits that heads make."""

from collections.abc import Sequence

import pytest
import torch
from support.step_cases import Resident, Step, step_of
from support.tiny_models import GQA, MHA, network
from torch import Tensor

from baselines.dllm.static.executor import MonolithicHead, reduce_every_row
from engines.dllm.config import DecodeConfig, EngineConfig, Phase
from engines.dllm.denoise import Reduction
from engines.dllm.executor.output import CandidateChoice, Commit, Committed, PackedHead, forwarded_span, guided_logits
from engines.dllm.executor.step import BlockPlaces, BlockRows, Guidance, ItemTable, PackedRows, StepLayout
from engines.dllm.plan import PlanItem, Request

TOKEN = 3


def commit(
    step: Step, confidence: Sequence[float], config: EngineConfig | None = None, **how: object
) -> tuple[Committed, list[list[int]]]:
    """``confidence`` of the masked places in order; the positions that hold TOKEN afterwards, by request."""
    slots = step.state.slots(step.items)
    table = ItemTable.of(step.items, slots)
    packed = PackedRows.of(table, None, width=step.state.width, least=8)
    places = BlockRows.of(table, packed.base, width=step.state.width, shifts_logits=False)
    position, row, flat, slot = step.staging.send(places.position, places.packed, places.flat, table.slot)
    block = BlockPlaces(position, row, flat, None, slot)
    found = step.state.block_tokens(block)
    layout = StepLayout(num_rows=0, rows=None, block=block, every=None)
    chosen = CandidateChoice(step.state, step.staging, vocab_size=GQA.vocab).of(step.items, layout, found)
    assert chosen.size == len(confidence)
    padded = torch.tensor([*confidence, *confidence[:1] * (len(chosen.row) - chosen.size)])
    part = Commit(config or EngineConfig(), step.state, step.staging, {GQA.config.eos_token_id}, **how)
    done = part(step.items, block, found, chosen, (torch.full_like(chosen.row, TOKEN), padded))
    tokens = [step.state.tokens[slot].tolist() for slot in slots]
    return done, [
        [p for p in range(item.block_start, item.block_end) if own[p] == TOKEN]
        for item, own in zip(step.items, tokens, strict=True)
    ]


def test_the_most_confident_is_committed_and_ties_go_to_the_first():
    step = step_of(
        [Resident(phase=Phase.REUSE, prompt_len=10), Resident(phase=Phase.REUSE, prompt_len=20, committed=2)]
    )
    done, positions = commit(step, [0.1, 0.9, 0.9, 0.2, 0.3, 0.4])
    assert done == Committed([1, 1], {})
    assert positions == [[11], [23]]


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


REDUCTION = Reduction(suppress_id=MHA.mask_id)
MONOLITHIC = EngineConfig(logit_rows="monolithic")


def hidden_of(seed: int, rows: int) -> Tensor:
    return torch.randn(rows, MHA.width, generator=torch.Generator().manual_seed(seed))


def test_rows_are_counted_as_they_are_made():
    model = network(MHA)
    assert PackedHead(model, MONOLITHIC, REDUCTION).logit_rows(20, 7) == 20
    assert PackedHead(model, EngineConfig(), REDUCTION).logit_rows(20, 7) == 7
    assert (
        MonolithicHead(lambda hidden, guidance: model.logits(hidden), reduce_every_row(REDUCTION)).logit_rows(20, 7)
        == 20
    )


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
