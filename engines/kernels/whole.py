"""Runs all layers of a decode step in one call, for models whose products are packed (``engines.models.product.Packed``).

Between two layers' kernels, Python would take as long as a single request's attention. The kernels are the same, and so are the numbers.
"""

from collections.abc import Sequence
from ctypes import c_float, c_long
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from engines.compiled import CompilerError, Library, Pointer, load_library
from engines.kernels import host
from engines.models.decoder import DecoderLayer, DecoderModel
from engines.models.product import Packed, Quantized
from engines.runtime.device import PoolTensors

LIBRARY = Library(
    "layers",
    (Path(__file__).with_name("layers.cpp"),),
    ("-O3", "-march=native", "-pthread"),
    headers=(*host.LIBRARY.sources[:1], *host.LIBRARY.headers, Path(__file__).parents[1] / "models" / "packed.cpp"),
)


class WholeLayers:
    """The layers of a model over a pool; ``of`` returns None for a model that cannot run this way."""

    def __init__(self, run: Any, model: DecoderModel[Any], layers: Sequence[DecoderLayer], pool: PoolTensors) -> None:
        config = model.config
        self._run, self._layers, self._pool = run, layers, pool
        self._sizes = config.n_heads, config.n_kv_heads, config.head_dim, config.d_model, config.mlp_hidden_size
        self._eps = float(config.rms_norm_eps)
        self._products: list[Packed] = [product for layer in layers for product in _products(layer)]
        self._pointers = self._pointer_table()

    @classmethod
    def of(cls, model: object, pool: PoolTensors) -> "WholeLayers | None":
        if not isinstance(model, DecoderModel) or model.rotates_in_float32 or model.tensor_parallel is not None:
            return None
        layers = [block for block in model.blocks if type(block) is DecoderLayer]
        kinds = {type(product) for layer in layers for product in _products(layer)}
        is_packed = kinds in ({Packed}, {Quantized}) and len(layers) == len(model.blocks)
        run = _kernel(model.dtype, Quantized in kinds) if is_packed else None
        return None if run is None else cls(run, model, layers, pool)

    def __call__(
        self, x: Tensor, cos: Tensor, sin: Tensor, rows: Tensor, place: tuple[Tensor, Tensor, Tensor, int]
    ) -> tuple[Tensor, Tensor]:
        """Return the residual stream [N, d], in place of x, and the delta to add to it; ``rows`` and ``place`` are as in ``host.attend``."""
        if not all(product.is_current for product in self._products):
            self._pointers = self._pointer_table()
        slots, lengths, table, block_size = place
        delta = torch.empty_like(x)
        sizes = len(self._layers), len(x), len(slots), table.shape[1], block_size, *self._sizes
        tensors = x, delta, cos, sin, rows, slots, lengths, table
        self._run(self._pointers.ctypes.data, *tensors, *sizes, self._eps, torch.get_num_threads())
        return x, delta

    def _pointer_table(self) -> np.ndarray:
        """Return pointers, int64 [layers, 18], in the order of ``Layer`` in ``layers.cpp``."""
        return np.array(
            [
                [0 if tensor is None else tensor.data_ptr() for tensor in (*_tensors(layer), *self._pool.rows(index))]
                for index, layer in enumerate(self._layers)
            ],
            dtype=np.int64,
        )


def _products(layer: DecoderLayer) -> tuple[Any, ...]:
    attention, mlp = layer.self_attn, layer.mlp
    return attention.qkv.product, attention.o_proj.product, mlp.gate_and_up.product, mlp.down_proj.product


def _tensors(layer: DecoderLayer) -> tuple[Tensor | None, ...]:
    attention = layer.self_attn
    qkv, out, gate_up, down = ((product.copy, product.scales, product.bias) for product in _products(layer))
    norms = (None if norm is None else norm.weight for norm in (attention.q_norm, attention.k_norm))
    return layer.input_layernorm.weight, *qkv, *norms, *out, layer.post_attention_layernorm.weight, *gate_up, *down


@cache
def _kernel(dtype: torch.dtype, is_quantized: bool) -> Any:
    try:
        function = load_library(LIBRARY)[f"decode_layers_{host.DTYPES[dtype]}{'_int8' if is_quantized else ''}"]
    except CompilerError:
        return None
    tensors: list[Any] = [Pointer] * 8
    function.argtypes, function.restype = (c_long, *tensors, *[c_long] * 10, c_float, c_long), None
    return function
