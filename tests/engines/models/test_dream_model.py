"""The Dream module against a plain reference in float64."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from support.checkpoints import DREAM, dream_weights
from support.reference_decoder import logits
from torch import Tensor

from engines.attention.backends import varlen_attention
from engines.models.config import DREAM_7B, DreamConfig
from engines.models.decoder import DreamModel
from engines.models.layers import rotate_halves
from engines.models.loader import build_model
from engines.models.protocol import Attend
from engines.models.shape import DREAM_7B as DREAM_7B_SHAPE
from engines.models.shape import QWEN2_5_7B, ModelShape

MQA = replace(DREAM, n_kv_heads=1, n_layers=1, mlp_hidden_size=24)
FULL = replace(DREAM, n_kv_heads=4, d_model=48, rope_theta=1e4)
TIED = replace(DREAM, weight_tying=True, rms_norm_eps=1e-2)


def network(config: DreamConfig, weights: dict[str, Tensor]) -> DreamModel:
    model = DreamModel(config)
    own = {name: tensor for name, tensor in weights.items() if name != "lm_head.weight" or not config.weight_tying}
    model.load_state_dict(own)
    return model.requires_grad_(False).eval()


def attend_within(lengths: list[int]) -> Attend:
    """Every packed sequence attends to itself, all rows to all rows."""
    ends = np.cumsum(lengths).tolist()
    runs = list(zip([0, *ends[:-1]], ends, strict=True))

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = torch.empty_like(q)
        varlen_attention(out, q, k, v, runs, runs)
        return out

    return attend


@pytest.mark.parametrize("config", [DREAM, MQA, FULL, TIED], ids=["gqa", "mqa", "mha", "tied"])
@pytest.mark.parametrize("lengths", [[11], [5, 9], [1, 7, 3]], ids=str)
def test_module_computes_the_architecture(config, lengths):
    weights = dream_weights(config, seed=sum(lengths))
    random = np.random.RandomState(len(lengths))
    ids = random.randint(0, config.vocab_size, sum(lengths)).tolist()
    # The second and later sequences are windows that begin past position 0.
    positions = [i * 17 + p for i, length in enumerate(lengths) for p in range(length)]
    sequence = [i for i, length in enumerate(lengths) for _ in range(length)]
    model = network(config, weights)
    ours = model.logits(model(torch.tensor(ids), torch.tensor(positions), attend_within(lengths))).double().numpy()
    tensors = {name: tensor.double().numpy() for name, tensor in weights.items()}
    expected = logits(config.to_dict(), tensors, ids, positions, sequence)
    assert np.abs(ours - expected).max() < 2e-5 * np.abs(expected).max()
    assert np.abs(expected).max() > 1


def hidden(model: DreamModel, ids: list[int]) -> Tensor:
    return model(torch.tensor(ids), torch.arange(len(ids)), attend_within([len(ids)]))


def test_attention_looks_both_ways():
    model = network(DREAM, dream_weights(DREAM))
    before, after = hidden(model, [1, 2, 3, 4, 5, 6]), hidden(model, [1, 2, 3, 4, 5, 7])
    # A causal model would leave rows 0 to 4 as they were.
    assert ((before - after).abs().amax(dim=1) > 1e-3).all()
    front = hidden(model, [9, 2, 3, 4, 5, 6])
    assert ((before - front).abs().amax(dim=1) > 1e-3).all()


def test_distances_between_positions_count_and_absolute_ones_do_not():
    model = network(DREAM, dream_weights(DREAM))
    ids, attend = torch.tensor([1, 2, 3, 4]), attend_within([4])
    near = model(ids, torch.arange(4), attend)
    torch.testing.assert_close(model(ids, torch.arange(4) + 90, attend), near, atol=1e-4, rtol=1e-4)
    assert (model(ids, torch.arange(4) * 3, attend) - near).abs().max() > 1e-2


@pytest.mark.parametrize("projection", ["q", "k", "v"])
def test_every_bias_is_used(projection):
    weights = dream_weights(DREAM)
    with_bias = hidden(network(DREAM, weights), [1, 2, 3, 4, 5])
    name = f"model.layers.1.self_attn.{projection}_proj.bias"
    without = hidden(network(DREAM, weights | {name: torch.zeros_like(weights[name])}), [1, 2, 3, 4, 5])
    assert (with_bias - without).abs().max() > 1e-3


def test_dream_7b_has_the_published_number_of_parameters():
    model = build_model(DREAM_7B)
    assert all(parameter.is_meta for parameter in model.parameters())
    assert sum(parameter.numel() for parameter in model.parameters()) == 7_615_616_512
    assert len(model.state_dict()) == 28 * 12 + 3


def test_shapes_agree_with_the_module_and_the_catalogue():
    for config in (DREAM, MQA, FULL, TIED):
        counted = sum(parameter.numel() for parameter in build_model(config).parameters())
        assert ModelShape.from_config(config, name="tiny").weight_bytes == 2 * counted
    assert ModelShape.from_config(DREAM_7B, name="Dream-7B") == DREAM_7B_SHAPE
    # The body is Qwen2.5-7B's.
    assert replace(DREAM_7B_SHAPE, name=QWEN2_5_7B.name) == QWEN2_5_7B


def captured_queries(model: DreamModel, ids: Tensor, positions: Tensor) -> list[Tensor]:
    seen = []

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        seen.append(q)
        return q

    model(ids, positions, attend)
    return seen


def test_rotation_is_done_in_the_activation_dtype_from_float32_angles():
    model = network(DREAM, dream_weights(DREAM)).to(torch.bfloat16)
    ids, positions = torch.arange(40), torch.arange(60, 100)
    cos, sin = model.rotary(positions)
    assert cos.dtype == sin.dtype == torch.float32
    angles = np.outer(np.arange(60, 100), 1e6 ** (-np.arange(4) / 4))
    np.testing.assert_allclose(cos[:, 0].numpy(), np.cos(np.tile(angles, 2)), atol=1e-5)
    np.testing.assert_allclose(sin[:, 0].numpy(), np.sin(np.hstack((-angles, angles))), atol=1e-5)

    block = model.blocks[0]
    q = block.self_attn.q_proj(block.input_layernorm(model.model["embed_tokens"](ids))).view(40, 4, 8)
    # The upstream formula, each product and the sum rounded to bfloat16.
    table = [torch.cat((t, t), dim=-1).to(torch.bfloat16) for t in (cos[..., 4:], sin[..., 4:])]
    turned = torch.cat((-q[..., 4:], q[..., :4]), dim=-1)
    (ours, *_) = captured_queries(model, ids, positions)
    assert ours.dtype == torch.bfloat16
    assert torch.equal(ours, q * table[0] + turned * table[1])
    in_float32 = rotate_halves(q.float(), cos, sin).to(torch.bfloat16)
    assert not torch.equal(ours, in_float32)
    torch.testing.assert_close(ours, in_float32, atol=0.05, rtol=0.05)


def test_frequencies_survive_a_cast_of_the_module():
    model = network(DREAM, dream_weights(DREAM))
    positions = torch.tensor([0, 1, 77, 127])
    before = model.rotary(positions)[0]
    assert torch.equal(model.to(torch.bfloat16).rotary(positions)[0], before)
