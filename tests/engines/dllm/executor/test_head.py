"""Logits of candidates in chunks, of whole steps at once, and guided."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.tiny_models import MHA, network
from torch import Tensor

from baselines.dllm.static.head import MonolithicHead, every_row_s_logits, reduce_every_row
from engines.dllm.config import EngineConfig
from engines.dllm.denoise import Reduction
from engines.dllm.executor.output import PackedHead, guided_logits
from engines.dllm.executor.step import Candidates, Guidance

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
