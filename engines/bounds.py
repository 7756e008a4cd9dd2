"""How large a number of a configuration may be, and of what kind; checked before anything is allocated or counted to.

The bounds are far above what anyone runs and far below what a machine cannot hold.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import fields
from functools import cache
from numbers import Integral, Real
from types import MappingProxyType
from typing import Any, NamedTuple

from engines.errors import UserError

MOST: Mapping[str, float] = MappingProxyType(
    {
        # Of a request.
        "gen_length": 2**17,
        "block_length": 2**17,
        "steps": 2**17,
        "top_k": 2**31 - 1,
        "temperature": 1e6,
        "alg_temp": 1e6,
        "factor": 1e6,
        "cfg_scale": 1e6,
        # Of a cache.
        "pool_kernel": 2**16 - 1,
        "prompt_interval": 10**6,
        "gen_interval": 10**6,
        "cfg_interval": 10**6,
        # Of an engine.
        "max_num_batched_tokens": 2**20,
        "max_num_logits": 2**20,
        "max_num_seqs": 2**20,
        "max_model_len": 2**20,
        "batch_size": 2**14,
        "tensor_parallel": 64,
        "profile_every": 10**9,
        "memory_limit": 10**15,
        # Of a workload.
        "num_prompts": 10**5,
        "num_requests": 10**5,
        "num_fewshot": 64,
        "input_len": 2**20,
        "length_scale": 1e3,
        "rate": 1e6,
        "burstiness": 1e6,
        # Of a sweep.
        "jobs": 1024,
        # Of a comparison.
        "num_runs": 1000,
        "limit": 10**5,
        # Of a model.
        "d_model": 2**17,
        "hidden_size": 2**17,
        "n_layers": 1024,
        "num_hidden_layers": 1024,
        "n_heads": 4096,
        "n_kv_heads": 4096,
        "num_attention_heads": 4096,
        "num_key_value_heads": 4096,
        "mlp_hidden_size": 2**20,
        "intermediate_size": 2**20,
        "mlp_ratio": 1024,
        "vocab_size": 2**24,
        "embedding_size": 2**24,
        "max_sequence_length": 2**24,
        "max_position_embeddings": 2**24,
    }
)
"""By name of the option or field."""

LEAST: Mapping[str, int] = MappingProxyType({"jobs": 1, "num_runs": 1})
"""Likewise."""


class _Field(NamedTuple):
    name: str
    kind: type
    may_be_none: bool


_KINDS = {"int": Integral, "float": Real, "bool": bool, "str": str}
_SAID = {Integral: "a whole number", Real: "a number", bool: "true or false", str: "a text"}


def check_most(name: str, value: object, *, prefix: str = "") -> None:
    """Refuse a number above its bound; what has none, or is no number, passes."""
    most = MOST.get(name)
    if most is not None and isinstance(value, int | float) and value > most:
        raise UserError(
            f"{prefix}{name}={_written(value)} is more than {most:.16g}, the most that is taken: give a smaller number"
        )


def check_least(name: str, value: object) -> None:
    """Refuse a number below its bound; what has none, or is no number, passes."""
    least = LEAST.get(name)
    if least is not None and isinstance(value, int | float) and value < least:
        raise UserError(f"{name}={_written(value)} must be at least {least}")


def _written(number: float) -> str:
    """Python writes no integer of more than 4,300 digits."""
    try:
        return str(number)
    except ValueError:
        return f"{'-' if number < 0 else ''}9999..."


def check_count(name: str, value: object) -> None:
    """Refuse what is no whole number within its bounds; None, which stands for a default, passes."""
    if value is None:
        return
    if not isinstance(value, Integral) or isinstance(value, bool):
        raise UserError(f"{name}={value!r} must be a whole number")
    check_least(name, int(value))
    check_most(name, int(value))


def check_fields(instance: Any) -> None:
    """Refuse a field of a dataclass that is not of its declared kind, not finite, or above its bound. Fields of other
    kinds than numbers, texts and truth values are their class's own business."""
    kind: Any = type(instance)
    for field in _checked(kind):
        value = getattr(instance, field.name)
        if value is None and field.may_be_none:
            continue
        if not isinstance(value, field.kind) or (isinstance(value, bool) and field.kind is not bool):
            raise UserError(f"{field.name}={value!r} must be {_SAID[field.kind]}")
        if isinstance(value, float) and not math.isfinite(value):
            raise UserError(f"{field.name}={value} must be a finite number")
        check_most(field.name, value)


@cache
def _checked(kind: type) -> tuple[_Field, ...]:
    found = []
    for field in fields(kind):
        declared = str(field.type)
        base = declared.removesuffix(" | None")
        if base in _KINDS:
            found.append(_Field(field.name, _KINDS[base], base != declared))
    return tuple(found)
