"""The kernels of a layer, by the dimensions that tables list them under."""

from __future__ import annotations

from typing import NamedTuple

from engines.models.shape import ModelShape


class Product(NamedTuple):
    """A matrix product with weights [outputs, inputs]."""

    outputs: int
    inputs: int


class Heads(NamedTuple):
    heads: int
    kv_heads: int


class Experts(NamedTuple):
    """The experts of a layer on one rank: gate, up and down of each, rows routed and gathered again."""

    width: int
    hidden: int
    """Hidden rows of one expert on this rank."""
    chosen: int
    among: int


def layer_products(shape: ModelShape) -> tuple[Product, ...]:
    """What every row of a layer of ``shape``, a rank's share, passes: q, k and v are one product, gate and up another. Of a mixture the
    router and the expert that every row gets."""
    if shape.num_experts > 1:
        shared = () if shape.shared_hidden is None else _mlp(shape, shape.shared_hidden)
        return (*_attention(shape), Product(shape.num_experts, shape.d_model), *shared)
    return (*_attention(shape), *_mlp(shape, shape.mlp_hidden))


def dense_layer_products(shape: ModelShape) -> tuple[Product, ...]:
    """The same of a mixture's layers with one MLP in place of experts; empty where there are none."""
    return () if shape.dense_hidden is None else (*_attention(shape), *_mlp(shape, shape.dense_hidden))


def _attention(shape: ModelShape) -> tuple[Product, ...]:
    return Product(shape.q_width + 2 * shape.kv_width, shape.d_model), Product(shape.d_model, shape.q_width)


def _mlp(shape: ModelShape, hidden: int) -> tuple[Product, ...]:
    return Product(2 * hidden, shape.d_model), Product(shape.d_model, hidden)


def head_product(shape: ModelShape) -> Product:
    return Product(shape.vocab_rows, shape.d_model)


def heads_of(shape: ModelShape) -> Heads:
    return Heads(shape.n_heads, shape.n_kv_heads)


def experts_of(shape: ModelShape) -> Experts | None:
    """None of a dense model."""
    if shape.num_experts == 1:
        return None
    return Experts(shape.d_model, shape.mlp_hidden, shape.experts_per_token, shape.num_experts)
