"""What engines and estimates may ask of a diffusion language model, whatever its architecture."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeAlias

if TYPE_CHECKING:
    from torch import Tensor, nn


class ModelConfig(Protocol):
    """Frozen; implemented by ``LLaDAConfig`` and ``DreamConfig``."""

    family: ClassVar[str]
    """'llada' or 'dream': names the chat format and the decoding conventions."""
    shifts_logits: ClassVar[bool]
    """Row i of ``DiffusionModel.logits`` predicts the token at i + 1, not at i. The decoder shifts."""
    qkv_bias: ClassVar[bool]

    @property
    def d_model(self) -> int: ...
    @property
    def n_layers(self) -> int: ...
    @property
    def n_heads(self) -> int: ...
    @property
    def n_kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def mlp_hidden_size(self) -> int: ...
    @property
    def vocab_size(self) -> int:
        """Rows of the embedding and of the head, padding rows included."""
        ...

    @property
    def max_sequence_length(self) -> int: ...
    @property
    def rope_theta(self) -> float: ...
    @property
    def rms_norm_eps(self) -> float: ...
    @property
    def mask_token_id(self) -> int: ...
    @property
    def eos_token_id(self) -> int: ...
    @property
    def pad_token_id(self) -> int: ...
    @property
    def weight_tying(self) -> bool: ...

    def to_dict(self) -> dict[str, Any]:
        """The published layout of ``config.json``."""
        ...


class Attend(Protocol):
    """Attention of one layer: rotated q [N, H, D] against whatever keys the cache policy exposes."""

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Rotated ``k`` and ``v`` are [N, Hkv, D]; returns [N, H, D]."""
        ...


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
        ...

    def all_gather(self, x: Tensor, dim: int = 0) -> Tensor:
        """The ranks' tensors, all of one shape, one behind the other along ``dim``."""
        ...

    def gather_columns(self, x: Tensor, width: int) -> Tensor:
        """[M, width] of the ranks' [M, part]."""
        ...


class DiffusionModel(Protocol):
    """N packed rows (all requests of a step, no padding); rows meet only inside ``attend``."""

    kv_heads_here: int
    """KV heads of this process, Hkv of ``attend`` and of a KV pool; ``config.n_kv_heads`` where the model is whole."""
    tensor_parallel: Ranks | None
    """None where this process holds the whole model. Then every process must make the calls that one makes."""

    @property
    def config(self) -> ModelConfig:
        """Of the whole model."""
        ...

    def __call__(self, ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Final-norm hidden states [N, d] of packed ids [N] at absolute positions [N]."""
        ...

    def rotary(self, positions: Tensor) -> Rotary: ...

    def hidden(self, ids: Tensor, rotary: Rotary, attend: Attend) -> Tensor:
        """The same for positions whose rotations are at hand: steps of a block share them."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """[M, V] raw logits of hidden states [M, d]; see ``ModelConfig.shifts_logits``."""
        ...

    def local_logits(self, hidden: Tensor) -> Tensor:
        """[M, own] the columns of ``logits`` that this process computes; all where the model is whole."""
        ...

    def parameters(self) -> Iterator[nn.Parameter]: ...
