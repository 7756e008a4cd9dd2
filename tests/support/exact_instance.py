"""A measured prefill instance without a model, whose steps take a known time."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest

from engines.laps.latency import StepModel
from engines.policies.views import Bucket, Chunk
from repro.families.cluster import on_torch
from repro.families.cluster.instance import TINY, Setting
from repro.families.cluster.laps_settings import MEASURED_GRID

FLOOR_S, TOKEN_S = 3e-3, 5e-5


@dataclass(frozen=True)
class Exact:
    """T = floor + token N, padding included."""

    def step_s(self, chunks: Sequence[Chunk], decoding: int, context: int, mode: object = None) -> float:
        tokens = mode.tokens if isinstance(mode, Bucket) else sum(chunk.tokens for chunk in chunks)
        return FLOOR_S + TOKEN_S * tokens


STEP_MODEL = StepModel(
    base_s=FLOOR_S,
    request_s=0.0,
    floor_s=0.0,
    token_s=TOKEN_S,
    alpha=0.0,
    history_s=0.0,
    shapes={bucket: FLOOR_S + TOKEN_S * bucket.tokens for bucket in MEASURED_GRID},
)


@dataclass(frozen=True, kw_only=True)
class ExactInstance:
    setting: Setting = TINY
    cost: Any = Exact()
    step_model: StepModel = STEP_MODEL
    captured: tuple[Bucket, ...] = MEASURED_GRID

    @property
    def facts(self) -> dict[str, Any]:
        return {"floor_s": FLOOR_S}


def profile_little(monkeypatch: pytest.MonkeyPatch) -> None:
    """This CPU's own instance is made anew, of a few steps that are each timed once."""
    monkeypatch.setattr(on_torch, "PROFILED", (1, 8, 32, 128))
    monkeypatch.setattr(on_torch, "REPEATS", 1)
    monkeypatch.setattr(on_torch, "instance", cache(on_torch.instance.__wrapped__))
