"""Layers that share launches: products of one input as one, sums inside the norm that follows them."""

from copy import deepcopy

import numpy as np
import pytest
import torch
from support.tiny_models import DREAM, GQA, MHA, any_network
from torch import Tensor, nn

from engines.attention.backends import Sdpa, Spans
from engines.kernels.rowwise import rms_norm_reference, rotate_reference, swiglu_reference
from engines.models.layers import FusedOps, Linear, Products, RMSNorm, fuse
from engines.models.protocol import DiffusionModel

REFERENCES = FusedOps(rms_norm=rms_norm_reference, rotate=rotate_reference, swiglu=swiglu_reference, joins=True)


@pytest.mark.parametrize("biased", [False, True])
def test_joined_products_are_the_layers_products(biased):
    torch.manual_seed(0)
    layers = [nn.Linear(12, width) if biased else Linear(12, width) for width in (8, 4, 4)]
    products, x = Products(*layers), torch.randn(5, 12)
    apart = list(products(x))
    before = [layer.weight.detach().clone() for layer in layers]
    products.join()
    together = list(products(x))
    for a, b in zip(apart, together, strict=True):
        torch.testing.assert_close(a, b)
    assert all(torch.equal(layer.weight, weight) for layer, weight in zip(layers, before, strict=True))
    assert len({layer.weight.untyped_storage().data_ptr() for layer in layers}) == 1, "the weights are kept once"
    place = layers[0].weight.data_ptr()
    products.divide()
    assert all(torch.equal(a, b) for a, b in zip(products(x), apart, strict=True))
    products.join()
    assert layers[0].weight.data_ptr() == place, "joined weights are not copied again"
    with torch.no_grad():
        layers[1].weight.mul_(2)
    torch.testing.assert_close(list(products(x))[1], layers[1](x))


def test_a_norm_adds_what_it_is_given():
    torch.manual_seed(0)
    norm, x, delta = RMSNorm(16, 1e-5), torch.randn(3, 16), torch.randn(3, 16)
    with torch.inference_mode():
        total, y = norm.add_and_norm(x.clone(), delta)
        assert torch.equal(total, x + delta)
        assert torch.equal(y, norm(x + delta))
        norm.fused = REFERENCES
        held = x.clone()
        fused_total, fused = norm.add_and_norm(held, delta)
        assert fused_total.data_ptr() == held.data_ptr()
        assert torch.equal(fused_total, total)
        torch.testing.assert_close(fused, y)
        assert norm.add_and_norm(held, None)[0] is held


def hidden_of(model: DiffusionModel, ids: Tensor) -> Tensor:
    spans = Spans.of_lengths(np.array([len(ids)]), device="cpu")
    with torch.inference_mode():
        return model(ids, torch.arange(len(ids)), lambda layer, q, k, v: Sdpa()(q, k, v, spans))


@pytest.mark.parametrize("model", [GQA, MHA, DREAM], ids=lambda model: model.name)
def test_a_fused_model_gives_the_numbers_of_its_layers(model):
    plain, fused = deepcopy(any_network(model)), deepcopy(any_network(model))
    assert isinstance(plain, nn.Module)
    assert isinstance(fused, nn.Module)
    fuse(plain, FusedOps())  # whatever an executor had it use
    fuse(fused, REFERENCES)
    assert dict(fused.state_dict()).keys() == dict(plain.state_dict()).keys()
    ids = torch.randint(0, model.config.vocab_size, (23,), generator=torch.Generator().manual_seed(1))
    expected, found = hidden_of(plain, ids), hidden_of(fused, ids)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    fuse(fused, FusedOps())
    assert torch.equal(hidden_of(fused, ids), expected), "what was joined can be taken apart"
