"""A linear layer's product on a CPU, by oneDNN over a copy of the weight in the order its kernels read.

torch's own product of float32 is MKL's, which leaves part of some processors unused, and reads weights as they lie. What holds
of oneDNN's here, and tests ask: a row's result is the same whatever rows stand beside it, from two rows on (alone, it is from
fewer inputs than a thousand or so), with any number of threads; and it is torch's, bit for bit, as far as MKL adds all
products of a row up in one go, which it does with up to 384 inputs. With more, MKL adds partial sums, and last bits differ.
"""

from functools import lru_cache, partial
from timeit import repeat

import torch
import torch.nn.functional as F
from torch import Tensor

from engines.runtime.rows import MIN_ROWS

ROWS = (8, 16, 32, 64, 128, 256)
FEWEST_ROWS = 4
"""A row's result is the same among so many; two would do, and are not the faster for it, nor is one."""
MOST_OUTPUTS = 1024
"""Products are compared and timed with no more."""
REPEATS = 6


def product_of(weight: Tensor, bias: Tensor | None = None) -> "Product | None":
    """None where torch's own has to do: on other devices, in other dtypes, and while it is trained."""
    if weight.device.type != "cpu" or weight.requires_grad or not torch.backends.mkldnn.is_available():
        return None
    is_half = weight.dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return Product(weight, bias) if weight.dtype == torch.float32 or is_half else None


class Product:
    """x W^T + b of x [N, inputs]. Few rows go to torch's product where it is faster, and the same bit for bit."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.weight, self.bias = weight, bias
        outputs, inputs = weight.shape
        self._fewest = fewest_rows(inputs, min(outputs, MOST_OUTPUTS), weight.dtype, torch.get_num_threads())
        self._reorder()

    def __call__(self, x: Tensor) -> Tensor:
        if MIN_ROWS <= x.shape[0] < self._fewest:
            return F.linear(x, self.weight, self.bias)
        if self._version is not None and self._version != self.weight._version:
            self._reorder()
        return _product(x, self._reordered, self.bias)

    def __reduce__(self) -> "tuple[type[Product], tuple[Tensor, Tensor | None]]":
        """A copy reorders its own weight: a reordered one cannot be copied."""
        return Product, (self.weight, self.bias)

    def _reorder(self) -> None:
        """Again where the weight was written to since; one made in inference mode cannot say."""
        self._version = None if self.weight.is_inference() else self.weight._version
        self._reordered = _reordered(self.weight)


@lru_cache(maxsize=256)
@torch.inference_mode()
def fewest_rows(inputs: int, outputs: int, dtype: torch.dtype, num_threads: int) -> int:
    """Rows from which oneDNN's product takes no longer than torch's; 0 where they round differently, so that which it is
    never hangs on the clock."""
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn((n, inputs), generator=generator).to(dtype) for n in (ROWS[-1], outputs))
    reordered = _reordered(weight)
    whole = _product(x, reordered, None)
    if not all(torch.equal(F.linear(x[:n], weight), whole[:n]) for n in (*range(MIN_ROWS, 18), *ROWS)):
        return 0
    for n in ROWS:
        products = partial(F.linear, x[:n], weight), partial(_product, x[:n], reordered, None)
        plain, own = (min(repeat(product, number=1, repeat=REPEATS)) for product in products)
        if own <= plain:
            return n
    return 2 * ROWS[-1]


def _reordered(weight: Tensor) -> Tensor:
    with torch.no_grad():
        return torch.ops.mkldnn._reorder_linear_weight(weight.detach())


def _product(x: Tensor, reordered: Tensor, bias: Tensor | None) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(x, reordered, bias, "none", [], "")
