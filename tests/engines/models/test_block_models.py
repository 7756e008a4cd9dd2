"""LLaDA2, SDAR and Fast-dLLM v2 against a model written plainly, at small sizes and, layer by layer, at published widths."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.block_models import (
    FAMILIES,
    LLADA2_MINI,
    RAW,
    SDAR_8B,
    block_model,
    plain_logits,
    plain_norm,
    plain_rotary,
    plain_router,
    write_block,
)
from support.tables import data_beside

from engines.errors import UserError
from engines.models.block_config import BLOCK_SHAPES, BlockConfig, block_config
from engines.models.config import Rope
from engines.models.layers import RMSNorm
from engines.models.llada2 import ExpertLayers, ExpertRouter, LLaDA2Attention
from engines.models.loader import build_block, load_block
from repro.checks.blocks import masked_logits

REFUSED = data_beside(__file__, "refused_configs")


def some_ids(n, seed=0):
    return torch.randint(0, RAW["sdar"]["vocab_size"], (n,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_is_the_plain_one(family):
    model = block_model(family)
    for n, block in ((24, 8), (29, 4), (20, 32)):
        ids = some_ids(n, seed=n)
        torch.testing.assert_close(
            masked_logits(model, ids, block), plain_logits(model, ids, block), rtol=2e-4, atol=2e-4
        )


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_checkpoint_loads(family, dtype, tmp_path):
    """Routers stay in float32, whatever they are stored in and the model is in."""
    folder = write_block(tmp_path / family, family)
    model = load_block(str(folder), dtype=dtype)
    assert model.config == BlockConfig.from_dict(RAW[family]) == block_config(str(folder))
    for name, tensor in model.state_dict().items():
        is_router = name.endswith(("mlp.gate.weight", "expert_bias"))
        assert tensor.dtype == (torch.float32 if is_router else dtype), name
        assert torch.equal(tensor.float(), block_model(family).state_dict()[name].to(tensor.dtype).float()), name
    if dtype == torch.float32:
        ids = some_ids(16)
        assert torch.equal(masked_logits(model, ids, 8), masked_logits(block_model(family), ids, 8))


def test_random_weights_keep_routers_wide():
    model = load_block(BlockConfig.from_dict(RAW["llada2"]), weights="random", dtype=torch.bfloat16)
    assert {p.dtype for n, p in model.named_parameters() if n in model.float32_weights} == {torch.float32}
    assert masked_logits(model, some_ids(12), 4).isfinite().all()


def test_experts_of_rows_that_torch_cannot_group_are_refused_before_a_forward():
    config = BlockConfig.from_dict(RAW["llada2"] | {"moe_intermediate_size": 20})
    model = load_block(config, weights="random", dtype=torch.float32)
    assert masked_logits(model, some_ids(12), 4).isfinite().all()
    with pytest.raises(UserError, match=r"size=20 gives rows of 40 bytes in torch.bfloat16, .* a multiple of 8$"):
        load_block(config, weights="random", dtype=torch.bfloat16)


def test_a_router_s_bias_may_be_stored_narrow(tmp_path):
    """2.0 has it in bfloat16, 2.1 in float32."""
    folder = write_block(tmp_path / "narrow", "llada2")
    weights = load_file(folder / "model.safetensors")
    name = "model.layers.1.mlp.gate.expert_bias"
    weights[name] = weights[name].bfloat16()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    found = load_block(str(folder)).state_dict()[name]
    assert found.dtype == torch.float32
    assert torch.equal(found, weights[name].float())


@pytest.mark.parametrize("own", ["weight", "expert_bias"])
def test_a_router_that_is_not_finite_is_refused(own, tmp_path):
    """It would choose experts all the same."""
    folder = write_block(tmp_path / "torn", "llada2")
    weights = load_file(folder / "model.safetensors")
    name = f"model.layers.1.mlp.gate.{own}"
    weights[name].view(-1)[3] = torch.nan
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match=f"{name} in .*model.safetensors has values that are not finite"):
        load_block(str(folder))


def test_a_router_of_eight_bits_is_read(tmp_path):
    folder = write_block(tmp_path / "narrow", "llada2", dtype=torch.float8_e4m3fn)
    name = "model.layers.1.mlp.gate.weight"
    found, stored = load_block(str(folder)).state_dict()[name], load_file(folder / "model.safetensors")[name]
    assert torch.equal(found, stored.float())


def test_a_missing_expert_is_named(tmp_path):
    folder = write_block(tmp_path / "torn", "llada2")
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.mlp.experts.7.up_proj.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match=r"1 missing \(model.layers.1.mlp.experts.7.up_proj.weight\)"):
        load_block(str(folder))


PUBLISHED = {
    name: raw
    for name, raw in json.loads(Path(__file__).with_name("published_configs.json").read_text(encoding="utf-8")).items()
    if name in BLOCK_SHAPES
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configurations_are_read(name):
    """The ids of masks that only tokenizers tell are the families'."""
    assert BlockConfig.from_dict(PUBLISHED[name]) == BLOCK_SHAPES[name]


@pytest.mark.parametrize("name", PUBLISHED)
@pytest.mark.parametrize("nothing", REFUSED["block, not refused"])
def test_fields_that_say_nothing_change_nothing(name, nothing):
    assert BlockConfig.from_dict({**PUBLISHED[name], **nothing}) == BLOCK_SHAPES[name]


@pytest.mark.parametrize("name", PUBLISHED)
def test_positions_are_read_where_transformers_5_has_them(name):
    raw = dict(PUBLISHED[name])
    moved = {key: raw.pop(key) for key in ("rope_theta", "partial_rotary_factor") if key in raw}
    read = BlockConfig.from_dict(raw | {"rope_parameters": {"rope_type": "default", **moved}})
    assert read == BLOCK_SHAPES[name]
    # Where theta stands in both places that of rope_parameters counts, as in every other model.
    twice = BlockConfig.from_dict(PUBLISHED[name] | {"rope_parameters": {"rope_theta": 5e4}})
    assert twice == replace(BLOCK_SHAPES[name], rope=Rope(theta=5e4))


@pytest.mark.parametrize(("family", "changes", "says"), REFUSED["block"])
def test_what_is_not_computed_is_refused(family, changes, says):
    with pytest.raises(UserError, match=says.replace("(", r"\(")):
        BlockConfig.from_dict(RAW[family] | changes)


def test_what_is_not_computed_is_refused_of_a_folder_too(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": ["sdar"]}')
    with pytest.raises(UserError, match=r"has model_type=\['sdar'\]: give a checkpoint of type"):
        load_block(str(tmp_path))


# ---- at published widths -------------------------------------------------------------------------------------------------


def drawn(*shape, seed=0, scale=1.0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale


@torch.inference_mode()
def test_the_router_at_published_width():
    config = LLADA2_MINI.experts
    router = ExpertRouter(2048, config)
    router.weight.copy_(drawn(256, 2048, seed=1, scale=0.03))
    router.expert_bias.copy_(drawn(256, seed=2, scale=0.3))
    h = drawn(40, 2048, seed=3)
    chosen, weights = router(h)
    for row, mine in enumerate(plain_router(h, router.weight, router.expert_bias, config)):
        assert set(chosen[row].tolist()) == set(mine)
        for expert, weight in zip(chosen[row].tolist(), weights[row].tolist(), strict=True):
            assert weight == pytest.approx(mine[expert], rel=1e-4)
    # In 16 bits rows are routed in float32 all the same, by weights that nothing rounded.
    held = {name: tensor.clone() for name, tensor in router.state_dict().items()}
    for rounded in (router.bfloat16(), router.half(), router.to("cpu", torch.bfloat16), router.double()):
        for name, tensor in rounded.state_dict().items():
            assert tensor.dtype == torch.float32
            assert torch.equal(tensor, held[name])
    assert all(torch.equal(mine, own) for mine, own in zip(router(h), (chosen, weights), strict=True))


@torch.inference_mode()
def test_groups_limit_the_choice_and_the_bias_says_nothing_of_weights():
    """T10: two experts of moderate score in a group outweigh the single best of another."""
    config = replace(LLADA2_MINI.experts, num_experts=8, num_groups=4, groups_per_token=1, experts_per_token=2)
    router = ExpertRouter(8, config)
    router.weight.copy_(torch.eye(8))
    router.expert_bias.zero_()
    h = torch.tensor([[3.0, -9.0, 1.0, 1.1, -9.0, -9.0, -9.0, 2.0]])
    chosen, weights = router(h)
    assert set(chosen[0].tolist()) == {2, 3}  # the two largest are 0 and 7
    assert set(torch.sigmoid(h).topk(2).indices[0].tolist()) == {0, 7}
    assert weights.sum().item() == pytest.approx(2.5)
    router.expert_bias[4:6] = 5.0
    chosen, weights = router(h)
    assert set(chosen[0].tolist()) == {4, 5}
    assert weights[0].tolist() == pytest.approx([1.25, 1.25])


@torch.inference_mode()
def test_rotary_and_norms_at_published_widths():
    for config in (LLADA2_MINI, SDAR_8B):
        position = torch.tensor([0, 1, 31, 32, 500, 4000])
        network = build_block(replace(config, n_layers=1)) if config.experts is None else None
        q = drawn(6, config.n_heads, config.head_dim, seed=1)
        k = drawn(6, config.n_kv_heads, config.head_dim, seed=2)
        if network is None:
            small = replace(config.experts, num_experts=8, num_groups=2, groups_per_token=2, experts_per_token=2)
            network = build_block(replace(config, n_layers=1, experts=replace(small, dense_layers=0)))
            attention = LLaDA2Attention(config)
            norms = attention.query_layernorm, attention.key_layernorm
        else:
            with torch.device("cpu"):
                attention = type(network.blocks[0].self_attn)(config)
            norms = attention.q_norm, attention.k_norm
        for i, norm in enumerate(norms):
            norm.weight.copy_(1 + drawn(config.head_dim, seed=3 + i, scale=0.2))
        cos, sin = network.rotary(position)
        if config.experts is None:
            found = attention.rotate(norms[0](q), norms[1](k), cos, sin)
        else:
            found = attention.rotate(q, k, cos, sin)
        for mine, x, norm in zip(found, (q, k), norms, strict=True):
            normed = plain_norm(x, norm.weight, config.rms_norm_eps)
            plain = plain_rotary(normed, position, config.rotary_dim, config.rope.theta)
            torch.testing.assert_close(mine, plain, rtol=1e-3, atol=2e-3)  # angles of thousands, in float32
            torch.testing.assert_close(mine[:3], plain[:3], rtol=1e-4, atol=1e-5)
    norm = RMSNorm(2048, 1e-6)
    x = drawn(5, 2048)
    torch.testing.assert_close(norm(x), plain_norm(x, norm.weight, 1e-6))


@torch.inference_mode()
def test_experts_of_published_widths_do_not_know_the_batch():
    """Bit for bit, whatever shares an expert's product: one row of a block, alone or among hundreds."""
    config = replace(LLADA2_MINI.experts, num_experts=8, num_groups=2, groups_per_token=2, experts_per_token=2)
    experts, router = ExpertLayers(2048, config), ExpertRouter(2048, config)
    for i, parameter in enumerate((*experts.parameters(), *router.parameters())):
        parameter.copy_(drawn(*parameter.shape, seed=i, scale=0.05))
    h = drawn(300, 2048, seed=99)
    whole = experts(h, *router(h))
    for rows in (slice(0, 1), slice(3, 7), slice(10, 42), slice(100, 290)):
        assert torch.equal(experts(h[rows], *router(h[rows])), whole[rows])
    shuffled = torch.randperm(300, generator=torch.Generator().manual_seed(1))
    assert torch.equal(experts(h[shuffled], *router(h[shuffled])), whole[shuffled])
