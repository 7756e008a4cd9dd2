"""What a system runs on: a loaded model, or a card's roofline."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from engines.hardware.catalogue import Gpu, gpu
from engines.hardware.roofline import Roofline
from engines.models.checkpoint import SHAPES, checkpoint_dir, config_of
from engines.models.shape import ModelShape
from engines.parallel.division import rank_shape
from repro.systems.calibration import load_calibration
from repro.systems.settings import Settings

if TYPE_CHECKING:
    from engines.models.protocol import DiffusionModel
    from engines.parallel.group import TensorParallel

ModelKey = tuple[str, str, str, str]


def model_shape(settings: Settings) -> ModelShape:
    """Of what one device holds and computes."""
    # A simulated card serves 16-bit weights whatever the measuring default.
    is_simulated_card = settings.executor == "roofline" and settings.model in SHAPES
    dtype_bytes = 2 if is_simulated_card or settings.dtype != "float32" else 4
    shape = ModelShape.from_config(config_of(settings.model), name=settings.model, dtype_bytes=dtype_bytes)
    return rank_shape(shape, settings.tensor_parallel)


def roofline(settings: Settings) -> Roofline:
    card = settings.platform.gpu
    assert card is not None, "settings refuse the roofline where there is no GPU model"
    return Roofline(model_shape(settings), gpu(card), load_calibration(card))


def measured_roofline(settings: Settings) -> Roofline | None:
    """Of the card a measured run is on, at its peaks: what bounds the run's steps.

    They are the datasheet's. A device without one has those measured here, only where the run is profiled, as it
    takes a second. None otherwise, and for guided requests, whose second forward has no cost in the model.
    """
    if settings.generation.cfg_scale > 0:
        return None
    card = _card(settings.device)
    if card is None and settings.profile_every:
        card = _card_by_measuring(settings.device, settings.dtype)
    return None if card is None else Roofline(model_shape(settings), card)


def _card(device: str) -> Gpu | None:
    import torch

    from engines.hardware.peaks import datasheet_gpu

    return datasheet_gpu(torch.device(device))


@lru_cache(maxsize=4)
def _card_by_measuring(device: str, dtype: str) -> Gpu:
    import torch

    from engines.hardware.peaks import measured_gpu
    from engines.models.loader import parse_dtype

    return measured_gpu(torch.device(device), parse_dtype(dtype))


def bound_facts(roofline: Roofline) -> Mapping[str, Any]:
    card = roofline.gpu
    peaks = {"flops_per_s": card.peak_flops, "bytes_per_s": card.bandwidth, "source": card.source}
    return {"bound": {"card": card.name, **peaks}}


def model_key(settings: Settings) -> ModelKey:
    return settings.model, settings.dtype, settings.device, settings.weights


@lru_cache(maxsize=2)
def load(name: str, dtype: str, device: str, weights: str) -> DiffusionModel:
    """One load serves every cell of a sweep."""
    from engines.models.loader import load_model, parse_dtype

    return load_model(name, dtype=parse_dtype(dtype), device=device, weights=weights)  # type: ignore[arg-type]


def load_part(settings: Settings, group: TensorParallel) -> DiffusionModel:
    from engines.models.loader import parse_dtype
    from engines.parallel.shard import load_shard

    return load_shard(settings.model, group, dtype=parse_dtype(settings.dtype), weights=settings.weights)  # type: ignore[arg-type]


def lift_memory_limit(settings: Settings) -> None:
    """Before what is measured is planned with: a peak above the limit is a result there, not a failure."""
    _limit_memory(settings, None)


def set_memory_limit(settings: Settings) -> Mapping[str, int]:
    """Before a run's cache is allocated; a fact, the bytes torch may hold from then on, where there is such a limit."""
    allowed = _limit_memory(settings, settings.memory_bytes)
    return {} if allowed is None else {"enforced_memory_bytes": allowed}


def _limit_memory(settings: Settings, memory_bytes: int | None) -> int | None:
    """The first thing a run asks of its device: one that is not there is refused here."""
    import torch

    from engines.models.loader import check_device
    from engines.runtime.memory_limit import limit_memory

    check_device(settings.device)
    return limit_memory(torch.device(settings.device), memory_bytes)


def stop_ids(settings: Settings) -> frozenset[int] | None:
    """Of the checkpoint, where generation may end at one; random weights have the shape's own."""
    if not settings.generation.stop_at_eos or settings.weights == "random":
        return None
    from engines.models.chat import stop_token_ids

    return stop_token_ids(checkpoint_dir(settings.model), config_of(settings.model))
