"""The interface of a diffusion language model for engines and estimates, whatever its architecture."""

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
    """An ``Attend`` that also rotates q and k, for models that rotate by ``layers.rotate_halves``."""

    def attend_products(self, layer: int, qkv: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Returns [N, H * D]. ``qkv`` holds q, k and v side by side, [N, (H + 2 Hkv) * D], and may be overwritten."""


Rotary: TypeAlias = "tuple[Tensor, Tensor]"
"""cos and sin [N, 1, D] of N positions, in float32; sin is negated in its first half."""


class Ranks(Protocol):
    """The processes a model is divided among (``engines.parallel``), which make the same calls in the same order."""

    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...

    def all_reduce(self, x: Tensor) -> Tensor:
        """Return the sum over the ranks, in place; x must be contiguous."""

    def all_gather(self, x: Tensor, dim: int = 0) -> Tensor:
        """Return the ranks' tensors, all of one shape, concatenated along ``dim``."""

    def gather_columns(self, x: Tensor, width: int) -> Tensor:
        """Return [M, width], joined from the ranks' [M, part]."""


class DiffusionModel(Protocol):
    """A model over N packed rows (all requests of a step, no padding); rows meet only inside ``attend``."""

    kv_heads_here: int
    """KV heads of this process, Hkv of ``attend`` and of a KV pool; ``config.n_kv_heads`` if the model is not divided."""
    tensor_parallel: Ranks | None
    """None if this process holds the whole model. Otherwise all processes must make the same calls."""

    @property
    def config(self) -> ModelConfig:
        """The configuration of the whole model, even if it is divided."""

    def __call__(self, ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Return final-norm hidden states [N, d] of packed ids [N] at absolute positions [N]."""

    def rotary(self, positions: Tensor) -> Rotary: ...

    def hidden(self, ids: Tensor, rotary: Rotary, attend: Attend) -> Tensor:
        """Return the same, given the rotations of the positions, which the steps of a block share."""

    def logits(self, hidden: Tensor) -> Tensor:
        """Return raw logits [M, V] of hidden states [M, d]; see ``ModelConfig.shifts_logits``."""

    def local_logits(self, hidden: Tensor) -> Tensor:
        """Return the columns of ``logits`` that this process computes, [M, own]; all if the model is not divided."""

    def parameters(self) -> Iterator[nn.Parameter]: ...
