"""Shapes against published counts, against the torch modules, and against counted FLOPs."""

from dataclasses import replace

import pytest
import torch
from support.refusals import refuses
from support.tables import data_beside
from support.tiny_models import MHA
from torch.utils.flop_counter import FlopCounterMode

from engines.errors import UserError
from engines.models.block_config import BLOCK_SHAPES
from engines.models.llada import LLaDAModelLM
from engines.models.loader import build_block, build_causal, build_model
from engines.models.qwen2_config import CAUSAL_SHAPES
from engines.models.shape import (
    BLOCK_DIFFUSION,
    CATALOGUE,
    DIFFUSION_GEMMA,
    DREAM_7B,
    LLADA2_FLASH,
    LLADA2_MINI,
    LLADA_8B,
    MIXTRAL_8X7B,
    SDAR_8B,
    SHAPES,
    ModelShape,
    model_shape,
)

PUBLISHED = data_beside(__file__, "published_sizes")


@pytest.mark.parametrize("shape", [*SHAPES, *BLOCK_DIFFUSION, DIFFUSION_GEMMA], ids=lambda shape: shape.name)
def test_parameter_counts_are_the_published_ones(shape):
    assert shape.weight_bytes == 2 * (PUBLISHED["shapes"] | PUBLISHED["block diffusion"])[shape.name]


@pytest.mark.parametrize(("name", "params"), PUBLISHED["causal"].items())
def test_parameter_counts_of_causal_checkpoints_are_those_of_their_modules_too(name, params):
    assert model_shape(name).weight_bytes == 2 * params
    module = build_causal(CAUSAL_SHAPES[name.lower()])
    assert sum(parameter.numel() for parameter in module.parameters()) == params


def test_every_catalogue_shape_has_a_published_count():
    assert [*PUBLISHED["shapes"]] == [shape.name for shape in SHAPES]
    others = PUBLISHED["causal"] | PUBLISHED["by listed kernels"]
    assert [shape.name for shape in CATALOGUE[len(SHAPES) :]] == [*others]
    assert {name: model_shape(name).weight_bytes for name in others} == {name: 2 * num for name, num in others.items()}
    assert len({shape.name for shape in CATALOGUE}) == len(CATALOGUE)


def test_block_diffusion_shapes_are_those_of_their_modules():
    shapes = *BLOCK_DIFFUSION, DIFFUSION_GEMMA
    assert [*PUBLISHED["block diffusion"]] == [shape.name for shape in shapes]
    for shape, config in zip(shapes, BLOCK_SHAPES.values(), strict=True):
        assert 2 * sum(parameter.numel() for parameter in build_block(config).parameters()) == shape.weight_bytes


def test_llada2_arithmetic():
    """Active parameters and K/V bytes as the checkpoints' makers and others count them."""
    for shape, active, kv_bytes in ((LLADA2_MINI, 1.11e9, 40_960), (LLADA2_FLASH, 5.51e9, 65_536)):
        assert (shape.linear_flops_per_token + shape.logits_flops_per_row) / 2 == pytest.approx(active, rel=5e-3)
        assert shape.kv_bytes_per_token == kv_bytes
        assert shape.streamed_weight_bytes_layers() + 2 * shape.streamed_weight_bytes_head == shape.weight_bytes
        touched = shape.streamed_weight_bytes_layers(32) / shape.streamed_weight_bytes_layers()
        assert touched == pytest.approx(0.64, abs=0.04)  # one block of 32, routed independently
        assert shape.on_rank(2).shared_hidden == shape.shared_hidden // 2
    assert SDAR_8B.kv_bytes_per_token == 147_456


@pytest.mark.parametrize("changes", [{"dense_layers": 1}, {"dense_hidden": 8}, {"dense_layers": 32, "dense_hidden": 8}])
def test_dense_layers_have_a_width_and_leave_one_with_experts(changes):
    with pytest.raises(UserError, match="give both or none, and leave a layer its experts"):
        replace(MIXTRAL_8X7B, **changes)


def test_llada_8b_arithmetic():
    s = LLADA_8B
    assert s.weight_bytes == 16_031_162_368
    assert s.linear_flops_per_token == 13_958_643_712
    assert s.attention_flops_per_pair == 524_288
    assert s.logits_flops_per_row == 1_035_993_088
    assert s.streamed_weight_bytes_layers() == 13_959_176_192
    assert s.streamed_weight_bytes_head == 1_035_993_088
    assert s.kv_bytes_per_token == 524_288
    assert [replace(s, dtype_bytes=b).logits_bytes_per_row for b in (4, 8)] == [505_856, 1_011_712]
    assert s.logits_bytes_per_row == 252_928
    assert s.logits_bytes_per_row * 16 * 2048 == 8_287_944_704
    assert s.activation_bytes_per_query_token == (8 + 32 + 72) * 1024


def test_streamed_and_gathered_weights_are_all_the_weights():
    for shape in CATALOGUE:
        embedding = 0 if shape.tied else shape.vocab_rows * shape.d_model * shape.dtype_bytes
        assert shape.streamed_weight_bytes_layers() + shape.streamed_weight_bytes_head + embedding == shape.weight_bytes


def test_grouped_query_attention_shrinks_kv_not_flops():
    assert DREAM_7B.kv_bytes_per_token == 56 * 1024
    assert DREAM_7B.attention_flops_per_pair == 4 * 3584 * 28


def test_experts_touched_grow_with_rows():
    s = MIXTRAL_8X7B
    one_expert = s.n_layers * 3 * s.d_model * s.mlp_hidden * s.dtype_bytes
    everything = s.streamed_weight_bytes_layers()
    # One row is routed to exactly 2 of 8; a large batch touches them all.
    assert s.streamed_weight_bytes_layers(1) == everything - 6 * one_expert
    assert s.streamed_weight_bytes_layers(1) < s.streamed_weight_bytes_layers(4) < everything
    assert s.streamed_weight_bytes_layers(1000) == everything
    assert LLADA_8B.streamed_weight_bytes_layers(1) == LLADA_8B.streamed_weight_bytes_layers()
    dense = replace(s, num_experts=1, experts_per_token=1)
    router = 2 * s.n_layers * s.d_model * s.num_experts
    assert (
        s.linear_flops_per_token - router - dense.linear_flops_per_token
        == s.n_layers * 2 * 3 * s.d_model * s.mlp_hidden
    )


SMALL_CONFIGS = [
    MHA.config,
    replace(MHA.config, n_kv_heads=2),
    replace(MHA.config, n_kv_heads=1, n_layers=5),
    replace(MHA.config, weight_tying=True, mlp_hidden_size=130),
]


@pytest.mark.parametrize("config", SMALL_CONFIGS)
def test_num_params_is_the_modules_own(config):
    counted = sum(parameter.numel() for parameter in build_model(config).parameters())
    assert ModelShape.from_config(config, name="small").weight_bytes == 2 * counted


@pytest.mark.parametrize("config", SMALL_CONFIGS)
def test_flops_are_those_torch_counts(config):
    rows, cached, logit_rows = 7, 5, 3
    group = config.n_heads // config.n_kv_heads

    def attend(layer, q, k, v):
        k, v = (torch.cat((x.new_zeros(cached, *x.shape[1:]), x)).repeat_interleave(group, dim=1) for x in (k, v))
        q, k, v = (x.transpose(0, 1) for x in (q, k, v))
        return (torch.bmm(torch.bmm(q, k.transpose(1, 2)).softmax(-1), v)).transpose(0, 1)

    model = LLaDAModelLM(config)
    shape = ModelShape.from_config(config, name="small", dtype_bytes=4)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        hidden = model(torch.zeros(rows, dtype=torch.long), torch.arange(rows), attend)
    assert counter.get_total_flops() == rows * shape.linear_flops_per_token + shape.attention_flops_per_pair * rows * (
        rows + cached
    )
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        logits = model.logits(hidden[:logit_rows])
    assert counter.get_total_flops() == logit_rows * shape.logits_flops_per_row
    assert logits.numel() * logits.element_size() == logit_rows * shape.logits_bytes_per_row


def test_lookup_and_bad_dimensions():
    assert model_shape("llada-8b") is LLADA_8B
    with pytest.raises(UserError, match=r"model='gpt-5'.*LLaDA-8B, Dream-7B"):
        model_shape("gpt-5")
    with refuses("n_layers=0"):
        replace(LLADA_8B, n_layers=0)
    with refuses("n_kv_heads=5"):
        replace(LLADA_8B, n_kv_heads=5)
    with refuses("experts_per_token=9"):
        replace(MIXTRAL_8X7B, experts_per_token=9)


def test_runs_are_stored_under_what_a_shape_says_of_itself():
    """Runs of shapes that are no mixture keep their keys, whatever mixtures have to say; those say all of it."""
    assert repr(LLADA_8B) == (
        "ModelShape(name='LLaDA-8B', d_model=4096, n_layers=32, n_heads=32, n_kv_heads=32, head_dim=128, mlp_hidden=12288, "
        "vocab_rows=126464, tied=False, qkv_bias=False, qk_norm=False, num_experts=1, experts_per_token=1, dtype_bytes=2)"
    )
    said = "shared_hidden=512, router_bias=True, dense_layers=1, dense_hidden=5120, dtype_bytes=2)"
    assert repr(LLADA2_MINI).endswith(said)
    assert repr(replace(LLADA2_MINI, shared_hidden=None)) != repr(LLADA2_MINI)
