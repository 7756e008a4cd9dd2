"""Layers the architectures share."""

from collections.abc import Callable, Iterator, Sequence
from typing import ClassVar, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engines.models.product import Packed, Product, instructions_of, product_of, quantize_weight
from engines.models.protocol import Attend


class FusedOps(NamedTuple):
    """Kernels that replace several operators each (``fuse``); None keeps torch's operators."""

    rms_norm: Callable[..., Tensor] | None = None
    """(x [N, d], weight [d], eps, delta [N, d] or None) -> [N, d]; x becomes x + delta if there is a delta"""
    rotate: Callable[..., None] | None = None
    """(q [N, H, D], k [N, Hkv, D], cos, sin [N, 1, D], full_precision=bool), in place"""
    swiglu: Callable[[Tensor, Tensor], Tensor] | None = None
    """(gate, up [N, hidden]) -> silu(gate) * up"""
    joins: bool = False
    """Whether the products of one input are joined into one (``Products``)."""


def fuse(model: nn.Module, ops: FusedOps) -> None:
    """Make a model's layers use these kernels from now on."""
    for module in model.modules():
        if hasattr(type(module), "fused"):
            module.fused = ops  # type: ignore[assignment]
        for part in vars(module).values():
            if isinstance(part, Products):
                part.join() if ops.joins else part.divide()


def reorder(model: nn.Module, *, joins: bool, keeps_weights: bool = True) -> bool:
    """Make the products of a model on a CPU read copies of its weights (``Product``). Returns whether all do. ``joins`` says
    that executors will ask for products of one input together, never apart. Without ``keeps_weights``, a weight with a packed
    copy moves to the meta device: it can no longer be read, written or moved."""
    modules = list(model.modules())
    joined: set[int] = set()
    products: list[Product | None] = []
    for part in (part for module in modules for part in vars(module).values() if joins and isinstance(part, Products)):
        part.join()
        products.append(part.product)
        joined |= {id(layer) for layer in part.layers}
        if not keeps_weights:
            part.release()
    for module in modules:
        if isinstance(module, Linear) and id(module) not in joined:
            module.product = product_of(module.weight, module.bias, module.scales, module.dtype)
            products.append(module.product)
            if not keeps_weights:
                _release(module.product, module)
    return None not in products


def _release(product: Product | None, *layers: nn.Linear) -> None:
    if product is not None:
        product.release()
        if product.weight.is_meta:
            for layer in layers:
                layer.weight = nn.Parameter(layer.weight.detach().to("meta"), requires_grad=False)


def quantize(model: nn.Module, dtype: torch.dtype) -> None:
    """Give a model's linear layers int8 weights with one scale per output, for rows of ``dtype``."""
    for module in model.modules():
        if isinstance(module, Linear):
            codes, module.scales = quantize_weight(module.weight)
            module.weight, module.dtype = nn.Parameter(codes, requires_grad=False), dtype


def products_by(model: nn.Module) -> str:
    """The kind of kernel that multiplies in a model's layers: ``amx``, ``avx512``, ``avx2``, ``onednn`` or ``torch``."""
    modules = list(model.modules())
    parts = [*modules, *(part for module in modules for part in vars(module).values() if isinstance(part, Products))]
    products = [product for part in parts if (product := getattr(part, "product", None)) is not None]
    instructions = {instructions_of(product.dtype) for product in products if isinstance(product, Packed)}
    if instructions:
        return min(instructions)
    return "onednn" if products else "torch"


class Products:
    """Linear layers with the same input. Each has its own product, or they share one if their weights lie in one tensor."""

    def __init__(self, *layers: nn.Linear) -> None:
        self.layers = layers
        self._joined: tuple[Tensor, Tensor | None] | None = None
        self.product: Product | None = None
        self._widths: list[int] = []

    def __call__(self, x: Tensor) -> Iterator[Tensor]:
        """Yield [N, outputs] for each layer in turn. A layer's own product is computed when it is asked for. The rows of a
        joined one have the stride of the whole product."""
        if self._joined is None:
            return (layer(x) for layer in self.layers)
        return iter(self.whole(x).split(self._widths, dim=-1))

    def whole(self, x: Tensor) -> Tensor:
        """Return [N, all outputs] of joined layers."""
        if self.product is not None:
            return self.product(x)
        assert self._joined is not None, "products of their own"
        return F.linear(x, *self._joined)

    @torch.no_grad()
    def join(self) -> None:
        """Join the weights in one tensor; the layers' parameters become views of it. Weights that are replaced later are ignored."""
        if self._is_released:
            return
        weight = one_tensor([cast(nn.Parameter, layer.weight) for layer in self.layers])
        biases = [bias for layer in self.layers if isinstance(bias := layer.bias, nn.Parameter)]
        assert len(biases) in (0, len(self.layers)), "biases of all layers or none"
        self._joined = weight, one_tensor(biases) if biases else None
        self._widths = [layer.weight.shape[0] for layer in self.layers]
        if self.product is None or self.product.weight.data_ptr() != weight.data_ptr():
            is_trained = any(layer.weight.requires_grad for layer in self.layers)
            scales = [scale for layer in self.layers if (scale := getattr(layer, "scales", None)) is not None]
            quantization = (torch.cat(scales), cast(Linear, self.layers[0]).dtype) if scales else ()
            self.product = None if is_trained else product_of(*self._joined, *quantization)

    def release(self) -> None:
        """Keep only what the joined product reads."""
        _release(self.product, *self.layers)
        if self.product is not None:
            self._joined = self.product.weight, self.product.bias

    @property
    def _is_released(self) -> bool:
        return self.product is not None and self.product.weight.is_meta

    def divide(self) -> None:
        assert not self._is_released, "products of their own need their weights"
        self._joined = self.product = None


def one_tensor(parameters: Sequence[nn.Parameter]) -> Tensor:
    """Return the parameters concatenated along their first dimension. They become views of the result, unless they are already."""
    first = parameters[0].data
    size = sum(parameter.shape[0] for parameter in parameters)
    end, in_place = first.data_ptr(), True
    for parameter in parameters:
        in_place &= parameter.is_contiguous() and parameter.data_ptr() == end
        in_place &= parameter.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        end += parameter.numel() * parameter.element_size()
    if in_place:
        return first.as_strided((size, *first.shape[1:]), first.stride(), first.storage_offset())
    joined = torch.cat([parameter.data for parameter in parameters])
    for parameter, part in zip(parameters, joined.split([p.shape[0] for p in parameters]), strict=True):
        parameter.data = part
    return joined


class RMSNorm(nn.Module):
    """y = w * cast(x / rms(x)), normalised in float32."""

    fused = FusedOps()

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.shape = (width,)
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        if self.fused.rms_norm is not None:
            # With a single head, ``reshape`` keeps a part of a joined product in place, with other parts between its rows.
            rows = x.reshape(-1, self.shape[0]).contiguous()
            return self.fused.rms_norm(rows, self.weight, self.eps, None).view(x.shape)
        if x.dtype == torch.float32:
            return F.rms_norm(x, self.shape, self.weight, self.eps)
        y = F.rms_norm(x.float(), self.shape, None, self.eps)
        return self.weight * y.to(x.dtype)

    __call__ = forward

    def add_and_norm(self, x: Tensor, delta: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return x + delta, which a kernel writes in place of x, and its normalised values."""
        if delta is None:
            return x, self(x)
        if self.fused.rms_norm is None:
            x = x + delta
            return x, self(x)
        y = self.fused.rms_norm(x.view(-1, self.shape[0]), self.weight, self.eps, delta.view(-1, self.shape[0]))
        return x, y.view(x.shape)


class Linear(nn.Linear):
    product: Product | None = None
    scales: Tensor | None = None
    """Scales [outputs] of an int8 weight (``quantize``)."""
    dtype = torch.float32
    """The dtype of rows if the weight is int8."""

    def _apply(self, fn: Callable[..., Tensor], recurse: bool = True) -> "Linear":
        """Drop the product, whose copy is out of date once the weights change their dtype or device."""
        assert self.product is None or not self.weight.is_meta, "only the product has this weight"
        self.product = None
        super()._apply(fn, recurse)
        return self

    def __init__(self, inputs: int, outputs: int, *, bias: bool = False) -> None:
        super().__init__(inputs, outputs, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        if self.product is not None:
            return self.product(x)
        weight = self.weight if self.scales is None else (self.weight * self.scales[:, None]).to(x.dtype)
        return F.linear(x, weight, self.bias)

    # Looking for a module's hooks takes as long as the product of a few rows.
    __call__ = forward


def inverse_frequencies(head_dim: int, theta: float) -> Tensor:
    """theta^(-2i/D) for i < D/2, in float32 and on the CPU, so that every device gets the same numbers."""
    exponent = torch.arange(head_dim // 2, dtype=torch.float32, device="cpu") * 2 / head_dim
    return 1.0 / theta**exponent


def rotary_tables(angles: Tensor) -> tuple[Tensor, Tensor]:
    """cos, sin [N, 1, D] of angles [N, D/2] for ``rotate_halves``; sin is negated in its first half."""
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((cos, cos), dim=-1).unsqueeze(1), torch.cat((-sin, sin), dim=-1).unsqueeze(1)


def rotate_halves(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Half-split rotary embedding in the dtype of its inputs; x [N, heads, D], cos and sin [N, 1, D] of
    ``rotary_tables``."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat((b, a), dim=-1).mul_(sin).add_(x * cos)


def rotate_in_float32(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """``rotate_halves`` rounded once (rope_full_precision); cos and sin are float32."""
    return rotate_halves(x.float(), cos, sin).to(x.dtype)


class RotaryAttention(nn.Module):
    """Attention with rotary positions. Subclasses name the projections, and provide q, k and v as ``qkv``."""

    fused = FusedOps()
    rotates_in_float32: ClassVar[bool] = False
    qkv: Products

    def __init__(self, heads: int, kv_heads: int, head_dim: int) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, head_dim
        self.q_norm: RMSNorm | None = None
        """Norm of each head's queries before they are rotated; ``k_norm`` is set with it."""
        self.k_norm: RMSNorm | None = None

    def attend_heads(self, h: Tensor, cos: Tensor, sin: Tensor, layer: int, attend: Attend) -> Tensor:
        """Return [N, H * D], the input of the output projection, for h [N, d]."""
        n = h.shape[0]
        is_plain = not self.rotates_in_float32 and self.q_norm is None
        attend_products = getattr(attend, "attend_products", None) if is_plain else None
        if attend_products is not None:
            return attend_products(layer, self.qkv.whole(h), cos, sin)
        products = self.qkv(h)
        q = next(products).view(n, self.heads, self.head_dim)
        k = next(products).view(n, self.kv_heads, self.head_dim)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = self.rotate(q, k, cos, sin)
        v = next(products).view(n, self.kv_heads, self.head_dim)
        return attend(layer, q, k, v).reshape(n, -1)

    def rotate(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Return q and k rotated, perhaps in place."""
        if self.fused.rotate is None:
            rotate = rotate_in_float32 if self.rotates_in_float32 else rotate_halves
            return rotate(q, cos, sin), rotate(k, cos, sin)
        self.fused.rotate(q, k, cos, sin, full_precision=self.rotates_in_float32)
        return q, k


class GatedMLP(nn.Module):
    """A gated MLP. Subclasses name the projections, and provide the first two as ``gate_and_up``."""

    fused = FusedOps()
    gate_and_up: Products

    def activations(self, h: Tensor) -> Tensor:
        """Return [N, hidden], the input of the last projection."""
        products = self.gate_and_up(h)
        if self.fused.swiglu is None:
            gate = next(products)
            # In place unless we train: apart from products, a CPU spends most of its time fetching memory.
            return F.silu(gate) * next(products) if gate.requires_grad else F.silu(gate).mul_(next(products))
        return self.fused.swiglu(*products)
