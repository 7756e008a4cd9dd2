"""The product of a linear layer on a CPU: which is taken, and that its numbers are those of a row alone."""

from copy import deepcopy
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from support.tiny_models import GQA, any_network
from torch import Tensor, nn

from engines.ar.torch.attention import SdpaAttention
from engines.ar.torch.executor import PagedExecutor
from engines.ar.torch.rows import PackedWork
from engines.compiled import CompilerError, load_library
from engines.models import loader, product
from engines.models.block_config import SMALL_BLOCKS
from engines.models.config import Rope
from engines.models.decoder import CausalModel
from engines.models.layers import Linear, Products, products_by, reorder
from engines.models.llada import LLaDAModelLM
from engines.models.loader import load_block, load_causal, load_model
from engines.models.product import FEWEST_ROWS, Packed, Product, fewest_rows, product_of, quantize_weight
from engines.models.qwen2_config import CausalConfig
from engines.runtime.rows import MIN_ROWS

SHAPES = ((24, 40), (64, 64), (160, 553), (448, 160), (576, 96), (1536, 130))
"""Inputs and outputs; MKL adds partial sums from 385 inputs on."""


def drawn(inputs: int, outputs: int, dtype: torch.dtype = torch.float32, rows: int = 520) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(inputs)
    x = torch.randn((rows, inputs), generator=generator).to(dtype)
    return x, (torch.randn((outputs, inputs), generator=generator) / inputs**0.5).to(dtype)


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("inputs", "outputs"), SHAPES)
def test_a_row_is_the_same_whatever_stands_beside_it(inputs, outputs, dtype, threads):
    x, weight = drawn(inputs, outputs, dtype)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        if dtype == torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
            pytest.skip("this processor has no products of that dtype")
        own = Product(weight)
        whole = own(x)
        few = (2, MIN_ROWS - 1, MIN_ROWS, MIN_ROWS + 1, 31, 257)
        for rows in (*range(2, 2 * MIN_ROWS), 31, 32, 33, 64, 100, 128, 257, 512) if threads == 1 else few:
            assert torch.equal(own(x[:rows]), whole[:rows]), rows
            assert torch.equal(own(x[7 : 7 + rows]), whole[7 : 7 + rows]), rows
    finally:
        torch.set_num_threads(before)
    torch.testing.assert_close(
        whole.double(),
        x.double() @ weight.double().T,
        rtol=1e-2 if dtype.itemsize == 2 else 1e-5,
        atol=1e-5 if dtype.itemsize == 4 else 1e-2,
    )


@pytest.mark.parametrize(("inputs", "outputs"), SHAPES)
def test_rows_go_to_either_product_only_where_both_round_alike(monkeypatch, inputs, outputs):
    x, weight = drawn(inputs, outputs)
    if fewest_rows(inputs, outputs, torch.float32, torch.get_num_threads()) == 0:
        monkeypatch.setattr(F, "linear", None)  # not asked at any number of rows
        assert Product(weight)(x[:MIN_ROWS]).shape == (MIN_ROWS, outputs)
        return
    always, never = Product(weight), Product(weight)
    always._fewest, never._fewest = 0, len(x) + 1
    for rows in (8, 9, 11, 16, 40, 200, 520):
        assert torch.equal(always(x[:rows]), never(x[:rows])), rows


@pytest.mark.parametrize(("own_s", "fewest"), [(0.5, 8), (2.0, 512)])
def test_the_faster_product_is_taken(monkeypatch, own_s, fewest):
    def took(run: object, **_: object) -> list[float]:
        is_own = run.func is product._product  # type: ignore[attr-defined]
        return [own_s if is_own else 1.0, 9.0]

    monkeypatch.setattr(product, "repeat", took)
    found = fewest_rows.__wrapped__(64, 64, torch.float32, 1)
    assert found in (0, fewest), "0 where this machine's torch rounds otherwise"


def test_which_it_is_never_hangs_on_the_clock_where_they_round_differently(monkeypatch):
    linear = F.linear
    monkeypatch.setattr(product, "repeat", lambda run, **_: pytest.fail("was timed"))
    monkeypatch.setattr(F, "linear", lambda *own: torch.nextafter(linear(*own), torch.tensor(torch.inf)))
    assert fewest_rows.__wrapped__(64, 64, torch.float32, 1) == 0
    if torch.ops.mkldnn._is_mkldnn_bf16_supported():
        assert fewest_rows.__wrapped__(64, 64, torch.bfloat16, 1) == 0


def test_a_bias_is_added_and_a_weight_that_is_written_to_is_read_anew():
    x, weight = drawn(32, 48, rows=300)
    bias = torch.linspace(-1, 1, 48)
    own = Product(weight, bias)
    torch.testing.assert_close(own(x), x @ weight.T + bias)
    with torch.no_grad():
        weight.mul_(2)
    torch.testing.assert_close(own(x), x @ weight.T + bias)
    torch.testing.assert_close(own(x[:0]), x.new_empty((0, 48)))


def test_what_is_trained_or_of_another_dtype_is_left_to_torch():
    weight = torch.randn(4, 4)
    assert product_of(weight) is not None
    assert product_of(weight.half()) is None
    assert product_of(weight.to("meta")) is None
    assert product_of(nn.Parameter(weight)) is None


@pytest.fixture
def are_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    """bfloat16 too, whatever oneDNN has, whose rows would hang on their company."""
    try:
        load_library(product.LIBRARY)
    except CompilerError as error:
        pytest.skip(str(error))
    if product._library().panel() == 0:
        pytest.skip("the processor has no AVX2")
    for dtype in (torch.float32, torch.bfloat16):
        assert product.packed_fault(dtype) is None
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: False)
    monkeypatch.setattr(product, "_product", lambda *_: pytest.fail("asked"))


def put(monkeypatch: pytest.MonkeyPatch, **own: object) -> None:
    """A library with parts of one's own."""
    real = product._library()
    names = (
        "has_tiles",
        "panel",
        *(f"multiply_{dtype}{of}" for dtype in ("float32", "bfloat16") for of in ("", "_int8")),
    )
    monkeypatch.setattr(
        product, "_library", lambda: SimpleNamespace(**{name: getattr(real, name) for name in names} | own)
    )


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize(
    ("dtype", "order"), [(torch.float32, "panels"), (torch.bfloat16, "panels"), (torch.bfloat16, "tiles")]
)
@pytest.mark.parametrize("is_int8", [False, True], ids=["", "int8"])
@pytest.mark.parametrize(("inputs", "outputs"), [(24, 40), (64, 64), (160, 553), (31, 1), (4100, 33)])
def test_packed_a_row_is_the_same_in_any_company_and_alone(
    monkeypatch, are_packed, inputs, outputs, dtype, order, threads, is_int8
):
    """Without AMX the sums of tiles are made one by one."""
    of = "_int8" if is_int8 else ""
    kernel = getattr(product._library(), f"multiply_{order}_bfloat16{of}")
    put(monkeypatch, has_tiles=lambda: order == "tiles", **{f"multiply_bfloat16{of}": kernel})
    x, weight = drawn(inputs, outputs, dtype, rows=75)
    bias = torch.linspace(-1, 1, outputs).to(dtype)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        own = product_of(weight, bias)
        if is_int8:
            codes, scales = quantize_weight(weight)
            own, weight = product_of(codes, bias, scales, dtype), codes.double() * scales.double()[:, None]
        assert isinstance(own, Packed)
        whole = own(x)
        for rows in (*range(1, 18), 31, 32, 33, 64):
            assert torch.equal(own(x[7 : 7 + rows]), whole[7 : 7 + rows]), rows
    finally:
        torch.set_num_threads(before)
    exact = x.double() @ weight.double().T + bias.double()
    torch.testing.assert_close(deepcopy(own)(x), whole, rtol=0, atol=0)
    torch.testing.assert_close(whole.double(), exact, rtol=2**-8 if dtype.itemsize == 2 else 1e-5, atol=1e-5)
    # Rows that lie apart, none, and a row of no number beside them.
    wide = torch.cat((x, torch.full_like(x, torch.nan)), dim=1)[:, :inputs]
    assert torch.equal(own(wide), whole)
    assert own(x[:0]).shape == (0, outputs)
    x[3] = torch.nan
    assert torch.equal(own(x)[4:], whole[4:])


@pytest.mark.parametrize(("inputs", "outputs"), [shape for shape in SHAPES if shape[0] <= 448])
def test_packed_products_of_float32_are_onednns_bit_for_bit_up_to_448_inputs(are_packed, monkeypatch, inputs, outputs):
    monkeypatch.undo()
    x, weight = drawn(inputs, outputs)
    assert torch.equal(Packed(weight)(x), product._product(x, product._reorder_weight(weight), None))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_packed_weight_is_read_anew_where_it_is_written_to_and_copied(are_packed, dtype):
    x, weight = drawn(40, 33, dtype, rows=9)
    own = Packed(weight)
    once = own(x)
    weight.mul_(2)
    assert torch.equal(own(x), 2 * once)
    assert torch.equal(deepcopy(own)(x), 2 * once)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("has_tiles", "panel", "by"), [(True, 64, "amx"), (False, 64, "avx512"), (False, 16, "avx2")])
def test_a_run_tells_what_multiplies(monkeypatch, are_packed, dtype, has_tiles, panel, by):
    model = load_causal(TIED, weights="random", dtype=dtype)
    put(monkeypatch, has_tiles=lambda: has_tiles, panel=lambda: panel)
    if dtype == torch.float32 and has_tiles:
        by = "avx512"
    assert products_by(model) == ("torch" if dtype == torch.float16 else by)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("panel", "sign", "said"), [(None, 1, None), (0, 1, "no AVX2"), (None, -1, "its products are wrong")]
)
def test_products_are_packed_for_processors_that_have_what_it_takes(monkeypatch, are_packed, panel, sign, said, dtype):
    right = product.multiply
    monkeypatch.setattr(product, "multiply", lambda *own: sign * right(*own))
    if panel is not None:
        put(monkeypatch, has_tiles=lambda: False, panel=lambda: panel)
    fault = product.packed_fault.__wrapped__(dtype)
    assert fault is None if said is None else said in fault


def test_products_of_bfloat16_that_onednn_has_are_its_own_without_amx(monkeypatch, are_packed):
    put(monkeypatch, has_tiles=lambda: False)
    weight = torch.randn(4, 4).bfloat16()
    assert isinstance(product_of(weight), Packed)
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: True)
    monkeypatch.setattr(product, "Product", lambda *own: own)
    assert product_of(weight) == (weight, None)


def linears(model: nn.Module) -> list[Linear]:
    return [module for module in model.modules() if isinstance(module, nn.Linear)]


def test_every_product_of_a_loaded_model_is_one():
    model = any_network(GQA)
    assert isinstance(model, LLaDAModelLM)
    assert all(isinstance(layer, Linear) for layer in linears(model))
    reorder(model, joins=False)
    assert all(layer.product is not None for layer in linears(model))
    x, head = torch.randn(9, GQA.config.d_model), deepcopy(model.head.weight)
    torch.testing.assert_close(model.logits(x), x @ head.T)


TIED = CausalConfig(
    family="qwen2",
    d_model=32,
    n_layers=2,
    n_heads=4,
    n_kv_heads=2,
    head_dim=8,
    mlp_hidden_size=64,
    vocab_size=96,
    max_sequence_length=64,
    rope=Rope(theta=10000.0),
    rms_norm_eps=1e-6,
    weight_tying=True,
    qkv_bias=True,
)


def test_a_causal_model_joins_the_products_of_one_input_and_a_tied_head_is_one():
    model = load_causal(TIED, weights="random")
    assert isinstance(model, CausalModel)
    layer = model.blocks[0]
    assert layer.self_attn.qkv.product is not None
    assert layer.self_attn.q_proj.product is None
    assert layer.self_attn.o_proj.product is not None
    assert model._tied_head is not None
    x = torch.randn(9, 32)
    torch.testing.assert_close(model.logits(x), x @ model.embedding.weight.T)
    for part, layers in (
        (layer.self_attn.qkv, layer.self_attn.qkv.layers),
        (layer.mlp.gate_and_up, layer.mlp.gate_and_up.layers),
    ):
        for y, each in zip(part(x), layers, strict=True):
            torch.testing.assert_close(y, F.linear(x, each.weight, each.bias))


def test_of_a_model_with_other_products_more_rows_are_computed():
    model = load_causal(TIED, weights="random", dtype=torch.float16)
    assert model.min_rows == MIN_ROWS
    model = load_causal(replace(TIED, weight_tying=False), weights="random")
    model.lm_head.weight.requires_grad_(True)
    model.reorder(joins=True)
    assert model.min_rows == MIN_ROWS


def test_weights_are_copied_only_where_there_is_room(monkeypatch):
    num_bytes = sum(p.numel() for p in load_causal(TIED, weights="random").parameters()) * 4
    monkeypatch.setattr(loader, "machine_memory_bytes", lambda: 4 * num_bytes)
    found = load_causal(TIED, weights="random")
    assert (found._tied_head is not None, found.min_rows) == (True, FEWEST_ROWS)
    monkeypatch.setattr(loader, "machine_memory_bytes", lambda: 4 * num_bytes - 1)
    found = load_causal(TIED, weights="random")
    assert (found._tied_head, found.min_rows) == (None, MIN_ROWS)
    monkeypatch.setattr(loader, "machine_memory_bytes", lambda: None)
    assert load_causal(TIED, weights="random")._tied_head is None
    # Copies that take a weight's place need none.
    assert load_causal(TIED, weights="random", keeps_weights=False)._tied_head is not None


def multipliers(model: nn.Module) -> dict[str, Any]:
    """What is asked for products -> by name."""
    parts = {
        f"{name}.{key}": part
        for name, module in model.named_modules()
        for key, part in vars(module).items()
        if isinstance(part, Products)
    }
    joined = {id(layer) for part in parts.values() if part.product is not None for layer in part.layers}
    return parts | {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, Linear) and id(module) not in joined
    }


LOADS = {
    "causal": partial(load_causal, TIED),
    "untied": partial(load_causal, replace(TIED, weight_tying=False)),
    "masked": partial(load_model, "tiny"),
    **{name: partial(load_block, config) for name, config in SMALL_BLOCKS.items()},
}


@pytest.mark.parametrize(
    ("name", "quantization"),
    [(name, "none") for name in LOADS]
    + [(name, "int8") for name in LOADS if name not in SMALL_BLOCKS or SMALL_BLOCKS[name].experts is None],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_that_keep_packed_weights_alone_are_the_same(name, dtype, quantization):
    how: dict[str, Any] = {"weights": "random", "dtype": dtype, "quantization": quantization}
    kept, released = (LOADS[name](**how, keeps_weights=keeps) for keeps in (True, False))
    again = deepcopy(released)
    found, copied = multipliers(released), multipliers(again)
    assert found.keys() == copied.keys() == multipliers(kept).keys()
    for at, expected in multipliers(kept).items():
        layer = expected.layers[0] if isinstance(expected, Products) else expected
        x = torch.randn((5, layer.in_features)).to(dtype)
        ys = [part(x) if isinstance(part, Products) else [part(x)] for part in (expected, found[at], copied[at])]
        for y, *others in zip(*ys, strict=True):
            assert all(torch.equal(y, other) for other in others), at
    for part in (*found.values(), *copied.values()):
        product, joined = part.product, getattr(part, "_joined", None)
        assert product is None or product.weight.is_meta, "no second copy lies behind a product"
        assert joined is None or joined[0].is_meta
    for model in (released, again):
        assert {layer.weight.is_meta for layer in linears(model) if isinstance(layer, Linear)} == {True}
        assert not model.embedding.weight.is_meta
    x = torch.randn((5, kept.config.d_model)).to(dtype)
    assert torch.equal(kept.logits(x), released.logits(x))
    assert torch.equal(kept.logits(x), again.logits(x))


def test_weights_that_were_not_kept_cannot_be_moved_or_divided():
    model = load_causal(TIED, weights="random", keeps_weights=False)
    qkv = model.blocks[0].self_attn.qkv
    qkv.join()
    with pytest.raises(AssertionError, match="need their weights"):
        qkv.divide()
    with pytest.raises(AssertionError, match="only the product"):
        load_model("tiny", weights="random", keeps_weights=False).to(torch.bfloat16)


@pytest.mark.parametrize("config", [TIED, replace(TIED, weight_tying=False)], ids=["tied", "own head"])
def test_a_model_in_another_dtype_multiplies_by_its_own_weights(config):
    model, x = load_causal(config, weights="random"), torch.randn(9, 32)
    before = model.logits(x)
    copy = deepcopy(model)
    assert torch.equal(copy.logits(x), before)
    copy.double()
    assert copy.min_rows == MIN_ROWS
    torch.testing.assert_close(copy.logits(x.double()), before.double(), rtol=1e-4, atol=1e-5)
    assert torch.equal(model.logits(x), before)


def test_an_int8_weight_is_the_nearest_whose_largest_is_127():
    weight = torch.tensor([[0.5, -1.0, 0.003], [0.0, 0.0, 0.0], [2.0, 1.0, -0.4]])
    codes, scales = quantize_weight(weight)
    assert codes.tolist() == [[64, -127, 0], [0, 0, 0], [127, 64, -25]]
    torch.testing.assert_close(scales, torch.tensor([1 / 127, 1.0, 2 / 127]))
    assert (codes * scales[:, None] - weight).abs().max() <= scales.max() / 2


@pytest.mark.parametrize("config", [TIED, replace(TIED, weight_tying=False)], ids=["tied", "own head"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_quantized_model_is_the_one_with_those_weights(are_packed, config, dtype):
    plain = load_causal(config, weights="random", dtype=dtype)
    model = load_causal(config, weights="random", dtype=dtype, quantization="int8")
    assert model.min_rows == FEWEST_ROWS
    assert products_by(model) == products_by(plain)
    assert model.dtype == dtype
    assert torch.equal(model.embedding.weight, plain.embedding.weight)
    tolerance = {"rtol": 2**-6, "atol": 2**-6} if dtype == torch.bfloat16 else {}

    def near(weight: Tensor) -> Tensor:
        codes, scales = quantize_weight(weight)
        return (codes * scales[:, None]).to(dtype)

    for own, other in zip(linears(model), linears(plain), strict=True):
        assert own.weight.dtype == torch.int8
        assert torch.equal((own.weight * own.scales[:, None]).to(dtype), near(other.weight))
        assert not torch.equal(near(other.weight), other.weight)
    x, wide = torch.randn(9, 32).to(dtype), torch.randn(9, 64).to(dtype)
    layer, same = model.blocks[0], plain.blocks[0]
    for part, others in ((layer.self_attn.qkv, same.self_attn.qkv), (layer.mlp.gate_and_up, same.mlp.gate_and_up)):
        for y, other in zip(part(x), others.layers, strict=True):
            torch.testing.assert_close(y, F.linear(x, near(other.weight), other.bias), **tolerance)
    expected = F.linear(wide, near(same.mlp.down_proj.weight))
    torch.testing.assert_close(layer.mlp.down_proj(wide), expected, **tolerance)
    head = plain.embedding.weight if config.weight_tying else plain.lm_head.weight
    torch.testing.assert_close(model.logits(x), F.linear(x, near(head)), **tolerance)
    elsewhere = deepcopy(model).double()  # no kernel of ours is for it
    torch.testing.assert_close(elsewhere.blocks[0].mlp.down_proj(wide.double()).to(dtype), expected, **tolerance)


@pytest.mark.parametrize("quantization", ["none", "int8"])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_all_layers_in_one_call_are_those_one_by_one(are_packed, monkeypatch, family, quantization):
    """Sequences that decode together, and a weight that is written to between two steps."""
    network = load_causal(
        replace(TIED, family=family, qkv_bias=family == "qwen2"),
        weights="random",
        dtype=torch.bfloat16,
        quantization=quantization,
    )
    for name, weight in network.named_parameters():
        if name.endswith(("bias", "norm.weight")):
            weight.data.uniform_(0.5, 1.5)
    told = []
    for is_whole in (True, False):
        worker = PagedExecutor(network, num_slots=3, max_len=64, num_tokens=192)
        assert isinstance(worker.attention, SdpaAttention)
        assert worker.attention.whole is not None
        if not is_whole:
            worker.attention.whole = None
        slots = [worker.open() for _ in range(3)]
        worker.tables.grow(np.array(slots), np.full(3, 40))
        for slot in slots:
            worker.write(slot, 0, [7 * slot + i for i in range(9 + slot)])
            worker.run(PackedWork.of([(slot, 0, 9 + slot, True)]))
        weight = network.blocks[0].mlp.down_proj.weight
        for factor in (1, 2) if quantization == "none" else (1, -1):
            weight.mul_(factor)
            worker.run(PackedWork.of([(slot, 8 + factor + slot, 1, True) for slot in slots]))
        weight.mul_(0.5 if quantization == "none" else -1)
        told.append((worker.pool.k.clone(), [worker.read(slot, 0, 16) for slot in slots]))
    assert torch.equal(told[0][0], told[1][0])
    assert told[0][1] == told[1][1]
