"""What a system runs on: a loaded model, or a card's roofline."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

from engines.hardware import gpu
from engines.models.checkpoint import SHAPES, checkpoint_dir, config_of
from engines.models.shape import ModelShape
from engines.roofline import Roofline
from repro.calibration import load_calibration
from repro.settings import Settings

if TYPE_CHECKING:
    from engines.models.protocol import DiffusionModel

ModelKey = tuple[str, str, str, str]


def model_shape(settings: Settings) -> ModelShape:
    # A simulated card serves 16-bit weights whatever the measuring default.
    dtype_bytes = 2 if settings.model in SHAPES or settings.dtype != "float32" else 4
    return ModelShape.from_config(config_of(settings.model), name=settings.model, dtype_bytes=dtype_bytes)


def roofline(settings: Settings) -> Roofline:
    card = settings.platform.gpu
    assert card is not None, "settings refuse the roofline where there is no GPU model"
    return Roofline(model_shape(settings), gpu(card), load_calibration(card))


def model_key(settings: Settings) -> ModelKey:
    return settings.model, settings.dtype, settings.device, settings.weights


@lru_cache(maxsize=2)
def load(name: str, dtype: str, device: str, weights: str) -> DiffusionModel:
    """One load serves every cell of a sweep."""
    from engines.models.loader import load_model, parse_dtype

    return load_model(name, dtype=parse_dtype(dtype), device=device, weights=weights)  # type: ignore[arg-type]


def stop_ids(settings: Settings) -> frozenset[int] | None:
    """Of the checkpoint, where generation may end at one; random weights have the shape's own."""
    if not settings.generation.stop_at_eos or settings.weights == "random":
        return None
    from engines.models.chat import stop_token_ids

    return stop_token_ids(checkpoint_dir(settings.model), config_of(settings.model))
