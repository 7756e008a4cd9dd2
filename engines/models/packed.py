"""The base of all architectures: embedding, layers, final norm and output head over packed (varlen) rows.

Shapes: N packed rows (all requests of a step, no padding), d model width, V vocabulary rows. Rows of different requests
meet only inside ``attend``, which also makes a model causal. Everything else is row-wise, so continuous batching is a
concatenation.
"""

from abc import abstractmethod
from collections.abc import Callable
from functools import cache
from operator import attrgetter
from typing import ClassVar, Generic, TypeVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engines.models.block_config import BlockConfig
from engines.models.config import ModelConfig
from engines.models.layers import RMSNorm, quantize, reorder
from engines.models.product import FEWEST_ROWS, Product, product_of, quantize_weight
from engines.models.protocol import Attend, Ranks, Rotary
from engines.models.qwen2_config import CausalConfig
from engines.runtime.rows import MIN_ROWS

Config = TypeVar("Config", bound=ModelConfig | CausalConfig | BlockConfig)
_getter = cache(attrgetter)


class PackedModel(nn.Module, Generic[Config]):
    """A ``DiffusionModel`` or a causal model; subclasses name their tensors as published checkpoints do.

    No model has a time-step embedding: the number of masks is the only time information of a diffusion model.
    """

    EMBEDDING: ClassVar[str]
    """Path of the embedding, whose weight is ``EMBEDDING.weight`` in the state dict; likewise for the other parts."""
    LAYERS: ClassVar[str]
    NORM: ClassVar[str]
    HEAD: ClassVar[str] = "lm_head"
    """Path of the output head of a model whose weights are not tied."""
    ignored: ClassVar[tuple[str, ...]] = ()
    """Prefixes of the names of a checkpoint's tensors that we do not use."""
    rotates_in_float32: ClassVar[bool] = False
    """Whether positions are rotated in float32; otherwise in the dtype of the activations."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.kv_heads_here = config.n_kv_heads
        self.tensor_parallel: Ranks | None = None
        self._tied_head: Product | None = None
        self.is_quantized = False
        self.min_rows = MIN_ROWS
        """With at least so many rows, a row's numbers do not depend on the other rows."""

    @property
    def embedding(self) -> nn.Module:
        return _getter(self.EMBEDDING)(self)

    @property
    def blocks(self) -> nn.ModuleList:
        return _getter(self.LAYERS)(self)

    @property
    def final_norm(self) -> RMSNorm:
        return _getter(self.NORM)(self)

    @property
    def head(self) -> nn.Module:
        return _getter(self.HEAD)(self)

    @abstractmethod
    def rotary(self, positions: Tensor) -> Rotary:
        """float32 cos, sin [N, 1, D] for absolute positions [N]."""

    @property
    def tied_weights(self) -> dict[str, str]:
        """Names that a checkpoint may store again -> the tensor that they share."""
        return {f"{self.HEAD}.weight": f"{self.EMBEDDING}.weight"} if self.config.weight_tying else {}

    @property
    def float32_weights(self) -> frozenset[str]:
        """Names of the weights that stay in float32 whatever the model's dtype is."""
        return frozenset()

    @property
    def unit_weights(self) -> frozenset[str]:
        """Names of the weights, beside the norms', that are one in a random model."""
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
        """Return final-norm hidden states [N, d] of packed ids [N] at absolute positions [N]."""
        return self.hidden(ids, self.rotary(positions), attend)

    def hidden(self, ids: Tensor, rotary: Rotary, attend: Attend) -> Tensor:
        """Like ``forward``, given the rotations of the positions."""
        x = self.embedding(ids)
        cos, sin = rotary if self.rotates_in_float32 else (table.to(x.dtype) for table in rotary)
        delta, all_layers = None, getattr(attend, "all_layers", None)
        if all_layers is not None:
            x, delta = all_layers(x, cos, sin)
        else:
            for layer, block in enumerate(self.blocks):
                x, delta = block(x, delta, cos, sin, layer, attend)
        return self.final_norm.add_and_norm(x, delta)[1]

    def local_logits(self, hidden: Tensor) -> Tensor:
        """Return the columns of ``logits`` that this process computes, [M, own]; all if the model is not divided."""
        if not self.config.weight_tying:
            return self.head(hidden)
        return F.linear(hidden, self._embedding_weight) if self._tied_head is None else self._tied_head(hidden)

    def _apply(self, fn: Callable[..., Tensor], recurse: bool = True) -> "PackedModel[Config]":
        super()._apply(fn, recurse)
        self._tied_head, self.min_rows = None, MIN_ROWS
        return self

    def quantize(self) -> None:
        """Give all products int8 weights, a tied head's too, but not embeddings and norms. Call it before ``reorder``."""
        quantize(self, self.dtype)
        self.is_quantized = True

    def reorder(self, *, joins: bool, keeps_weights: bool = True) -> None:
        """See ``layers.reorder``. A tied head gets a product too, and the embedding keeps its weight."""
        is_complete = reorder(self, joins=joins, keeps_weights=keeps_weights)
        if self.config.weight_tying:
            weight = self._embedding_weight
            codes, scales = quantize_weight(weight) if self.is_quantized else (weight, None)
            self._tied_head = product_of(codes, None, scales, self.dtype)
            is_complete &= self._tied_head is not None
            if not keeps_weights and self._tied_head is not None:
                self._tied_head.release()
        self.min_rows = FEWEST_ROWS if is_complete else MIN_ROWS

    def logits(self, hidden: Tensor) -> Tensor:
        """Return raw logits [M, V]. Row i predicts the token at its own position. In a causal model, and if the configuration
        ``shifts_logits``, it predicts the token at the next position."""
        logits = self.local_logits(hidden)
        if self.tensor_parallel is None:
            return logits
        return self.tensor_parallel.gather_columns(logits, self.config.vocab_size)
