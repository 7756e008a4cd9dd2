"""What all architectures share: embedding, layers, final norm and output head over packed (varlen) rows.

Shapes: N packed rows (all requests of a step, no padding), d model width, V vocabulary rows. Rows of different requests
meet only inside ``attend``, which is also what makes a model causal; everything else is row-wise, and so continuous
batching is a concatenation.
"""

from abc import abstractmethod
from collections.abc import Callable
from typing import ClassVar, Generic, TypeVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engines.models.block_config import BlockConfig
from engines.models.config import ModelConfig
from engines.models.layers import RMSNorm, quantize, reorder
from engines.models.product import FEWEST_ROWS, Packed, Product, product_of, quantized
from engines.models.protocol import Attend, Ranks, Rotary
from engines.models.qwen2_config import CausalConfig
from engines.runtime.rows import MIN_ROWS

Config = TypeVar("Config", bound=ModelConfig | CausalConfig | BlockConfig)


class PackedModel(nn.Module, Generic[Config]):
    """A ``DiffusionModel``, or a causal one; subclasses name their tensors as published checkpoints do.

    None has a time-step embedding: the number of masks is the only time information of a diffusion model.
    """

    EMBEDDING: ClassVar[str]
    """Name of its weight in the state dict; likewise ``HEAD``."""
    HEAD: ClassVar[str]
    ignored: ClassVar[tuple[str, ...]] = ()
    """What names of a checkpoint's tensors begin with that nothing here computes with."""
    rotates_in_float32: ClassVar[bool] = False
    """Else in the dtype of the activations."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.kv_heads_here = config.n_kv_heads
        self.tensor_parallel: Ranks | None = None
        self._tied_head: Product | None = None
        self.is_quantized = False
        self.min_rows = MIN_ROWS
        """Rows among which a row's numbers are those it has in any company."""

    @property
    @abstractmethod
    def embedding(self) -> nn.Module: ...

    @property
    @abstractmethod
    def blocks(self) -> nn.ModuleList: ...

    @property
    @abstractmethod
    def final_norm(self) -> RMSNorm: ...

    @property
    @abstractmethod
    def head(self) -> nn.Module:
        """The output head of a model whose weights are not tied."""

    @abstractmethod
    def rotary(self, positions: Tensor) -> Rotary:
        """float32 cos, sin [N, 1, D] for absolute positions [N]."""

    @property
    def tied_weights(self) -> dict[str, str]:
        """Names a checkpoint may repeat -> the tensor they share."""
        return {self.HEAD: self.EMBEDDING} if self.config.weight_tying else {}

    @property
    def float32_weights(self) -> frozenset[str]:
        """Names of what stays in float32 whatever the model is in."""
        return frozenset()

    @property
    def unit_weights(self) -> frozenset[str]:
        """Names of those that are one in a random model, beside the norms'."""
        return frozenset()

    @property
    def device(self) -> torch.device:
        return self._embedding_weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self._embedding_weight.dtype

    @property
    def _embedding_weight(self) -> Tensor:
        return cast(Tensor, self.embedding.weight)

    def forward(self, ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Final-norm hidden states [N, d] of packed ids [N] at absolute positions [N]."""
        return self.hidden(ids, self.rotary(positions), attend)

    def hidden(self, ids: Tensor, rotary: Rotary, attend: Attend) -> Tensor:
        """As ``forward``, with the positions' rotations made beforehand."""
        x = self.embedding(ids)
        cos, sin = rotary if self.rotates_in_float32 else (table.to(x.dtype) for table in rotary)
        delta, all_layers = None, getattr(attend, "all_layers", None)
        if all_layers is not None:
            x, delta = all_layers(x, cos, sin)
        else:
            for layer, block in enumerate(self.blocks):
                x, delta = block(x, delta, cos, sin, layer, attend)
        return self.final_norm.of_sum(x, delta)[1]

    def local_logits(self, hidden: Tensor) -> Tensor:
        """[M, own] the columns of ``logits`` that this process computes; all where the model is whole."""
        if not self.config.weight_tying:
            return self.head(hidden)
        return F.linear(hidden, self._embedding_weight) if self._tied_head is None else self._tied_head(hidden)

    def _apply(self, fn: Callable[..., Tensor], recurse: bool = True) -> "PackedModel[Config]":
        super()._apply(fn, recurse)
        self._tied_head, self.min_rows = None, MIN_ROWS
        return self

    def quantize(self) -> None:
        """int8 weights for all products, a tied head's too; embeddings stay, and so do norms. Before ``reorder``."""
        quantize(self, self.dtype)
        self.is_quantized = True

    def reorder(self, *, joins: bool, keeps_weights: bool = True) -> None:
        """See ``layers.reorder``; a tied head is a product, too, whose embeddings stay."""
        every = reorder(self, joins=joins, keeps_weights=keeps_weights)
        if self.config.weight_tying:
            weight = self._embedding_weight
            codes, scales = quantized(weight) if self.is_quantized else (weight, None)
            self._tied_head = product_of(codes, None, scales, self.dtype)
            every &= self._tied_head is not None
            if not keeps_weights and isinstance(self._tied_head, Packed):
                self._tied_head.release()
        self.min_rows = FEWEST_ROWS if every else MIN_ROWS

    def logits(self, hidden: Tensor) -> Tensor:
        """[M, V] raw logits; row i predicts the token at its own position, or at the next of a causal model and where
        the configuration ``shifts_logits``."""
        logits = self.local_logits(hidden)
        if self.tensor_parallel is None:
            return logits
        return self.tensor_parallel.gather_columns(logits, self.config.vocab_size)
