"""What bfloat16 changes of a mixture of experts: few tokens, few choices, and nothing of the router."""

import pytest
import torch
from rounding import Row, equal_experts, equal_tokens, load_pair
from support.block_models import write_block

from engines.errors import UserError


def test_most_tokens_of_a_random_mixture_are_those_of_float32():
    exact, rounded = load_pair(None)
    kept = rounded.float32_weights
    assert kept
    for (name, wide), narrow in zip(exact.state_dict().items(), rounded.state_dict().values(), strict=True):
        assert wide.dtype == torch.float32
        assert narrow.dtype == (torch.float32 if name in kept else torch.bfloat16)
        assert torch.equal(wide, narrow.float())
    is_equal = equal_tokens(exact, rounded, 8, 0)
    assert is_equal.numel() > 50
    assert 0.9 < is_equal.float().mean() <= 1.0
    assert equal_tokens(exact, exact, 8, 0).all()


def test_a_checkpoint_is_loaded_in_both_and_its_routers_are_not_rounded(tmp_path):
    exact, rounded = load_pair(str(write_block(tmp_path / "llada2", "llada2")))
    for name in exact.float32_weights:
        assert torch.equal(exact.get_parameter(name), rounded.get_parameter(name))
    with pytest.raises(UserError, match="has no experts: give a LLaDA2 checkpoint"):
        load_pair(str(write_block(tmp_path / "sdar", "sdar")))


def test_a_router_at_published_width_chooses_mostly_the_same_experts_of_rounded_states():
    states, both = equal_experts(1000, 0)
    assert states.shape == both.shape == (1000,)
    assert 0.95 < states.float().mean() < 1.0
    assert 0.95 < both.float().mean() < 1.0
    row = Row.of("experts", states)
    assert row.low < row.share == int(states.sum()) / 1000 < row.high
