"""The product of a linear layer on a CPU, by oneDNN, with a copy of the weight in the order that its kernels read.

torch's own product of float32 is MKL's, which leaves part of some processors unused, and reads weights in their usual order. Tests
check two properties of oneDNN's. First, a row's result depends neither on the other rows nor on the number of threads, given two
rows or more. A row alone has this result with fewer than about a thousand inputs. Second, the result equals torch's bit for bit
with up to 384 inputs, which MKL adds up in one go. With more inputs MKL adds partial sums, and last bits differ.

With AMX, a row of oneDNN's product depends on the number of rows, so oneDNN runs without it (``repro.runs.environment``). On a
processor with AVX2, float32 products use our own kernels (``Packed``). Products of bfloat16 use them too if there is AMX, or if
oneDNN has no such product, as without AVX-512. Each output is one float32 sum from the first input to the last. With up to 448
inputs it equals oneDNN's float32, bit for bit.

``Quantized`` weights are int8, with one float32 scale per output. The same kernels widen them while reading, sum in float32 and
multiply each sum by its scale.
"""

from ctypes import CDLL, c_bool, c_long
from functools import cache, lru_cache, partial
from pathlib import Path
from timeit import repeat
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from engines.compiled import CompilerError, Library, Pointer, load_library
from engines.runtime.rows import MIN_ROWS

ROWS = (8, 16, 32, 64, 128, 256)
FEWEST_ROWS = 4
"""With at least so many rows, a row's result does not depend on the others. Two would do, but they are no faster, nor is one."""
MOST_OUTPUTS = 1024
"""Most outputs with which ``fewest_rows`` compares and times products."""
REPEATS = 6


def product_of(
    weight: Tensor, bias: Tensor | None = None, scales: Tensor | None = None, dtype: torch.dtype | None = None
) -> "Product | None":
    """Return a weight's product; None if only torch's own will do: on other devices, in other dtypes, and in training. ``scales`` and
    ``dtype``, the rows' dtype, belong to a weight that ``quantize_weight`` made."""
    if scales is not None:
        return Quantized(weight, bias, scales, dtype or torch.float32)
    if weight.device.type != "cpu" or weight.requires_grad or not torch.backends.mkldnn.is_available():
        return None
    if packs(weight.dtype):
        return Packed(weight, bias)
    return Product(weight, bias) if weight.dtype == torch.float32 or _is_onednns(weight.dtype) else None


def packs(dtype: torch.dtype) -> bool:
    """Whether products with weights of a dtype are ``Packed``."""
    return dtype in _ROUNDING and packed_fault(dtype) is None and (in_tiles(dtype) or not _is_onednns(dtype))


def _is_onednns(dtype: torch.dtype) -> bool:
    return dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported()


class Product:
    """Computes x W^T + b for x [N, inputs]. Few rows go to torch's product if that is faster, and equal bit for bit."""

    scales: Tensor | None = None

    def __init__(self, weight: Tensor, bias: Tensor | None = None, dtype: torch.dtype | None = None) -> None:
        self.weight, self.bias, self.dtype = weight, bias, dtype or weight.dtype
        self._fewest = self._fewest_rows()
        self._reorder()

    def __call__(self, x: Tensor) -> Tensor:
        if MIN_ROWS <= x.shape[0] < self._fewest:
            return F.linear(x, self.weight, self.bias)
        return self._product(x)

    @property
    def is_current(self) -> bool:
        """Whether the weight is unchanged since it was copied. A weight made in inference mode counts as unchanged: it cannot tell."""
        return self._version is None or self._version == self.weight._version

    def __reduce__(self) -> "tuple[type[Product], tuple[Tensor, Tensor | None]]":
        """Make a copy of this product reorder its weight anew, because a reordered weight cannot be copied."""
        return type(self), (self.weight, self.bias)

    def _reorder(self) -> None:
        self._version = None if self.weight.is_inference() else self.weight._version
        self._reordered = self._copy()

    def release(self) -> None:
        """Keep only what the product reads. This one may read its weight, and keeps it."""

    @property
    def copy(self) -> Tensor:
        """The weight as it is now, in the order that the product reads."""
        if not self.is_current:
            self._reorder()
        return self._reordered

    def _fewest_rows(self) -> int:
        outputs, inputs = self.weight.shape
        return fewest_rows(inputs, min(outputs, MOST_OUTPUTS), self.weight.dtype, torch.get_num_threads())

    def _copy(self) -> Tensor:
        return _reorder_weight(self.weight)

    def _product(self, x: Tensor) -> Tensor:
        return _product(x, self.copy, self.bias)


class Packed(Product):
    """A product by our own kernels, with any number of rows."""

    __reduce__ = object.__reduce__  # type: ignore[assignment]

    def release(self) -> None:
        """Keep only the packed copy, and the shape and dtype of the weight."""
        self._reordered, self._version = self.copy, None
        self.weight = self.weight.detach().to("meta")

    def _fewest_rows(self) -> int:
        return 0

    def _copy(self) -> Tensor:
        return pack_weight(self.weight.detach(), in_tiles(self.dtype))

    def _product(self, x: Tensor) -> Tensor:
        return multiply(x, self.copy, self.bias, self.weight.shape[0], self.scales)


class Quantized(Packed):
    """A product of rows of ``dtype`` with an int8 weight, whose outputs have ``scales`` [outputs]."""

    def __init__(self, weight: Tensor, bias: Tensor | None, scales: Tensor, dtype: torch.dtype) -> None:
        self.scales = scales
        super().__init__(weight, bias, dtype)


def quantize_weight(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return the int8 [outputs, inputs] nearest to a weight, and the float32 scales [outputs] that multiply the outputs. They are
    symmetric: the largest value of a row becomes 127."""
    wide = weight.detach().float()
    largest = wide.abs().amax(dim=1)
    scales = torch.where(largest > 0, largest / 127, torch.ones_like(largest))
    return (wide / scales[:, None]).round_().clamp_(-127, 127).to(torch.int8), scales


@lru_cache(maxsize=256)
@torch.inference_mode()
def fewest_rows(inputs: int, outputs: int, dtype: torch.dtype, num_threads: int) -> int:
    """Return the fewest rows with which oneDNN's product takes no longer than torch's. Return 0 if they round differently, so
    that results never depend on timings."""
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn((n, inputs), generator=generator).to(dtype) for n in (ROWS[-1], outputs))
    reordered = _reorder_weight(weight)
    whole = _product(x, reordered, None)
    if not all(torch.equal(F.linear(x[:n], weight), whole[:n]) for n in (*range(MIN_ROWS, 18), *ROWS)):
        return 0
    for n in ROWS:
        products = partial(F.linear, x[:n], weight), partial(_product, x[:n], reordered, None)
        torch_s, onednn_s = (min(repeat(product, number=1, repeat=REPEATS)) for product in products)
        if onednn_s <= torch_s:
            return n
    return 2 * ROWS[-1]


def _reorder_weight(weight: Tensor) -> Tensor:
    with torch.no_grad():
        return torch.ops.mkldnn._reorder_linear_weight(weight.detach())


def _product(x: Tensor, reordered: Tensor, bias: Tensor | None) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(x, reordered, bias, "none", [], "")


# -- packed ------------------------------------------------------------------------------------------------

SIDE = 16
"""Rows of a tile, and pairs of numbers in a row."""
_ROUNDING = {torch.bfloat16: 2.0**-6, torch.float32: 2.0**-20}
"""Largest difference from torch's product that rounding explains, for values of order 1."""

LIBRARY = Library(
    "packed",
    (Path(__file__).with_name("packed.cpp"),),
    ("-O3", "-march=native", "-pthread"),
    headers=(Path(__file__).parents[1] / "kernels" / "lanes.hpp",),
)


def pack_weight(weight: Tensor, by_tiles: bool) -> Tensor:
    """Return a weight [outputs, inputs] in the order that our kernels read, padded with zeros.

    Panels are [panels, inputs, P], with P outputs in each. Tiles for AMX are [blocks, steps, 2, 16, 16, 2]. A block has 32
    outputs and a step 32 inputs. A step has two tiles of 16 outputs, whose rows are pairs of inputs.
    """
    (outputs, inputs), width, panel = weight.shape, 2 * SIDE, _library().panel()
    if not by_tiles:
        return F.pad(weight, (0, 0, 0, -outputs % panel)).view(-1, panel, inputs).transpose(1, 2).contiguous()
    padded = F.pad(weight, (0, -inputs % width, 0, -outputs % width))
    return padded.view(-1, 2, SIDE, padded.shape[1] // width, SIDE, 2).permute(0, 3, 1, 4, 2, 5).contiguous()


def in_tiles(dtype: torch.dtype) -> bool:
    return dtype == torch.bfloat16 and _library().has_tiles()


def instructions_of(dtype: torch.dtype) -> str:
    """The processor's instructions that multiply ``packed`` weights of a dtype."""
    return "amx" if in_tiles(dtype) else "avx512" if _library().panel() == 64 else "avx2"


def multiply(x: Tensor, weight: Tensor, bias: Tensor | None, outputs: int, scales: Tensor | None = None) -> Tensor:
    """Return x W^T + b [N, outputs] for x [N, inputs] and ``packed`` W, all of one dtype; W of int8 has ``scales``."""
    if x.stride(1) != 1:
        x = x.contiguous()
    rows, inputs = x.shape
    out = x.new_empty((rows, outputs))
    name = "multiply_float32" if x.itemsize == 4 else "multiply_bfloat16"
    kernel = getattr(_library(), name if scales is None else f"{name}_int8")
    kernel(x, weight, scales, bias, out, rows, inputs, outputs, x.stride(0), torch.get_num_threads())
    return out


@cache
def packed_fault(dtype: torch.dtype) -> str | None:
    """Return why our kernels cannot multiply in bfloat16 or float32, or with int8 weights; None if they can. We also try an example,
    whose rows, inputs and outputs fill no tile."""
    try:
        if not in_tiles(dtype) and _library().panel() == 0:
            return "the processor has no AVX2"
    except CompilerError as error:
        return str(error)
    generator = torch.Generator().manual_seed(0)
    x, weight, bias = (torch.randn(shape, generator=generator).to(dtype) for shape in ((37, 300), (45, 300), (45,)))
    weight /= 16
    codes, scales = quantize_weight(weight)
    restored = (codes * scales[:, None]).to(dtype)
    for stored, used, by, allowed in (
        (weight, weight, None, _ROUNDING[dtype]),
        (codes, restored, scales, 4 * _ROUNDING[dtype]),
    ):
        result = multiply(x, pack_weight(stored, in_tiles(dtype)), bias, len(stored), by)
        expected = F.linear(x, used, bias)
        if not torch.allclose(result.float(), expected.float(), rtol=allowed, atol=allowed):
            return "its products are wrong"
    return None


@cache
def _library() -> CDLL:
    library = load_library(LIBRARY)
    library.has_tiles.restype, library.panel.restype = c_bool, c_long
    tensors: list[Any] = [Pointer] * 5
    for dtype in ("float32", "bfloat16", "panels_bfloat16", "tiles_bfloat16"):
        for kernel in (getattr(library, f"multiply_{dtype}{weights}") for weights in ("", "_int8")):
            kernel.argtypes, kernel.restype = (*tensors, *[c_long] * 5), None
    return library
