"""Rotary positions as a ``config.json`` states them; no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from engines.errors import UserError, require
from engines.knobs import knobs_of
from engines.models.config import Positive, Rows
from engines.models.config_fields import read_numbers, require_fields


@dataclass(frozen=True, kw_only=True)
class Rope:
    """``scaling`` is what a checkpoint says beyond theta, None where it says nothing."""

    theta: Positive
    scaling: LinearScaling | Llama3Scaling | None = None


@dataclass(frozen=True, kw_only=True)
class LinearScaling:
    """Every frequency divided by ``factor`` (position interpolation, arXiv 2306.15595)."""

    factor: Positive


@dataclass(frozen=True, kw_only=True)
class Llama3Scaling:
    """Llama 3.1's: long wavelengths are stretched by ``factor``, short ones kept, those between interpolated."""

    factor: Positive
    low_freq_factor: Positive
    high_freq_factor: Positive
    original_max_position_embeddings: Rows

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
    return Rope(**read_numbers(Rope, theta, {"theta": "rope_theta"}), scaling=_scaling(kind, scaling))


def _scaling(kind: object, raw: Mapping[str, Any]) -> LinearScaling | Llama3Scaling | None:
    if kind == "default":
        return None
    kinds: dict[object, Any] = {"linear": LinearScaling, "llama3": Llama3Scaling}
    if not isinstance(kind, str) or kind not in kinds:
        raise UserError(f"config.json has rope_type={kind!r}; only 'default', 'linear' and 'llama3' are implemented")
    names = {name: name for name in knobs_of(kinds[kind])}
    require_fields(raw, names)
    return kinds[kind](**read_numbers(kinds[kind], raw, names))  # type: ignore[no-any-return]
