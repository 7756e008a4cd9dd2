"""Varlen attention: one call for a whole batch of ragged sequences, whose keys lie anywhere in a KV pool.

``attention_backend`` picks the implementation; all give the same numbers within rounding (tests/engines/test_attention.py).
"""

from engines.attention.backends import (
    HostVarlen,
    Run,
    Sdpa,
    SpanMetadata,
    Spans,
    VarlenAttention,
    sdpa,
    varlen_attention,
)
from engines.attention.registry import BACKENDS, attention_backend, availability, batch_attention

__all__ = [
    "BACKENDS",
    "HostVarlen",
    "Run",
    "Sdpa",
    "SpanMetadata",
    "Spans",
    "VarlenAttention",
    "attention_backend",
    "availability",
    "batch_attention",
    "sdpa",
    "varlen_attention",
]
