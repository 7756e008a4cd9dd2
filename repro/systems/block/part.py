"""What block-diffusion systems run on a card by default."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True, kw_only=True)
class BlockPart:
    """A cell's knobs override these by name."""

    system: ClassVar[str] = "block-diffusion"
    """Where none is named."""
    model: str
    """A shape by name (engines.models.block_config)."""
    memory_limit: int
    """Bytes."""
    tokens_per_forward: float = 4.0
    """Assumed: what a threshold makes of a model is in no shape."""
    device: str = "cuda"
    dtype: str = "bfloat16"
    num_prompts: int = 64
    length_scale: float = 1.0
    gen_length: int = 256
    max_num_seqs: int = 128
    max_num_batched_tokens: int = 8192
    max_model_len: int = 8192
