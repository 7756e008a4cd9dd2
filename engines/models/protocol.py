"""What engines and estimates may ask of a diffusion language model, whatever its architecture."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Protocol, TypeAlias

if TYPE_CHECKING:
    from torch import Tensor, nn

    from engines.models.config import ModelConfig


class Attend(Protocol):
    """Attention of one layer: rotated q [N, H, D] against whatever keys the cache policy exposes."""

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Rotated ``k`` and ``v`` are [N, Hkv, D]; returns [N, H, D]."""


class AttendProducts(Attend, Protocol):
    """One that rotates as well, where the rotation is ``layers.rotate_halves``."""

    def of_products(self, layer: int, qkv: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """[N, H * D] of q, k and v side by side, [N, (H + 2 Hkv) * D], which may be written to."""


Rotary: TypeAlias = "tuple[Tensor, Tensor]"
"""cos and sin [N, 1, D] of N positions, in float32; sin is negated in its first half."""


class Ranks(Protocol):
    """The processes a model is divided among (``engines.parallel``), which make the same calls in the same order."""

    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum over the ranks, in place; x contiguous."""

    def all_gather(self, x: Tensor, dim: int = 0) -> Tensor:
        """The ranks' tensors, all of one shape, one behind the other along ``dim``."""

    def gather_columns(self, x: Tensor, width: int) -> Tensor:
        """[M, width] of the ranks' [M, part]."""


class DiffusionModel(Protocol):
    """N packed rows (all requests of a step, no padding); rows meet only inside ``attend``."""

    kv_heads_here: int
    """KV heads of this process, Hkv of ``attend`` and of a KV pool; ``config.n_kv_heads`` where the model is whole."""
    tensor_parallel: Ranks | None
    """None where this process holds the whole model. Then every process must make the calls that one makes."""

    @property
    def config(self) -> ModelConfig:
        """The whole model's, however it is divided."""

    def __call__(self, ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Final-norm hidden states [N, d] of packed ids [N] at absolute positions [N]."""

    def rotary(self, positions: Tensor) -> Rotary: ...

    def hidden(self, ids: Tensor, rotary: Rotary, attend: Attend) -> Tensor:
        """The same for positions whose rotations are at hand: steps of a block share them."""

    def logits(self, hidden: Tensor) -> Tensor:
        """[M, V] raw logits of hidden states [M, d]; see ``ModelConfig.shifts_logits``."""

    def local_logits(self, hidden: Tensor) -> Tensor:
        """[M, own] the columns of ``logits`` that this process computes; all where the model is whole."""

    def parameters(self) -> Iterator[nn.Parameter]: ...
