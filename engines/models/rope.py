"""Rotary positions as a ``config.json`` states them; no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from engines.errors import UserError, require
from engines.models.config_fields import positive_float, positive_int, require_fields


@dataclass(frozen=True, kw_only=True)
class Rope:
    """``scaling`` is what a checkpoint says beyond theta, None where it says nothing."""

    theta: float
    scaling: LinearScaling | Llama3Scaling | None = None


@dataclass(frozen=True, kw_only=True)
class LinearScaling:
    """Every frequency divided by ``factor`` (position interpolation, arXiv 2306.15595)."""

    factor: float


@dataclass(frozen=True, kw_only=True)
class Llama3Scaling:
    """Llama 3.1's: long wavelengths are stretched by ``factor``, short ones kept, those between interpolated."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int

    def __post_init__(self) -> None:
        require(
            self.low_freq_factor < self.high_freq_factor,
            f"config.json has low_freq_factor={self.low_freq_factor} and high_freq_factor={self.high_freq_factor}: the "
            "second must be larger",
        )


def read_rope(raw: Mapping[str, Any]) -> Rope:
    """From ``rope_theta`` and ``rope_scaling``, or from ``rope_parameters``, which replaced the two in transformers 5."""
    scaling = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    if not isinstance(scaling, Mapping):
        raise UserError(f"config.json has rope_scaling={scaling!r}: give an object, or null")
    theta = scaling if scaling.get("rope_theta") is not None else raw
    require_fields(theta, ("rope_theta",))
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if scaling.get("partial_rotary_factor") not in (None, 1, 1.0):
        raise UserError(
            f"config.json has partial_rotary_factor={scaling['partial_rotary_factor']!r}; only 1.0 is implemented"
        )
    return Rope(theta=positive_float(theta, "rope_theta"), scaling=_scaling(kind, scaling))


def _scaling(kind: object, raw: Mapping[str, Any]) -> LinearScaling | Llama3Scaling | None:
    if kind == "default":
        return None
    if kind == "linear":
        require_fields(raw, ("factor",))
        return LinearScaling(factor=positive_float(raw, "factor"))
    if kind == "llama3":
        require_fields(raw, ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"))
        return Llama3Scaling(
            factor=positive_float(raw, "factor"),
            low_freq_factor=positive_float(raw, "low_freq_factor"),
            high_freq_factor=positive_float(raw, "high_freq_factor"),
            original_max_position_embeddings=positive_int(raw, "original_max_position_embeddings"),
        )
    raise UserError(f"config.json has rope_type={kind!r}; only 'default', 'linear' and 'llama3' are implemented")
