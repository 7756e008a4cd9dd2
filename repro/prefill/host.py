"""What a step costs the host: no layer runs, which leaves metadata, slots, the head and sampling."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median

import torch
from torch import Tensor

from engines.ar.torch.measured import MeasuredSteps
from engines.models.decoder import CausalModel
from engines.models.protocol import Attend, Rotary

STEPS = {
    "decode 1": [(100, 1)],
    "decode 32": [(100, 1)] * 32,
    "decode 64": [(100, 1)] * 64,
    "prefill 1x512": [(0, 512)],
    "prefill 32x16": [(0, 16)] * 32,
    "re-prefill 32x16 over 100": [(100, 16)] * 32,
    "mixed 1x512 + 32x16": [(0, 512), *[(0, 16)] * 32],
}
"""(history, tokens) of each sequence."""


@dataclass(frozen=True, kw_only=True)
class HostTime:
    """Measured: medians. ``host_s`` is the step without the layers, ``step_s`` all of it."""

    step: str
    host_s: float
    step_s: float
    repeats: int


def host_times(steps: MeasuredSteps, repeats: int) -> Iterator[HostTime]:
    for name, parts in STEPS.items():
        with layers_of(steps.executor.model, count=0):
            host_s = _median(steps, parts, repeats)
        yield HostTime(step=name, host_s=host_s, step_s=_median(steps, parts, repeats), repeats=repeats)


def _median(steps: MeasuredSteps, parts: list[tuple[int, int]], repeats: int) -> float:
    steps.timed(parts)
    return median(steps.timed(parts)[0] for _ in range(repeats))


@contextmanager
def layers_of(model: CausalModel, *, count: int) -> Iterator[None]:
    """The model with its first ``count`` layers only."""
    layers, hidden = model.blocks, model.hidden

    def shallow(ids: Tensor, rotary: Rotary, attend: Attend) -> Tensor:
        model.model["layers"] = torch.nn.ModuleList(layers[:count])
        try:
            return hidden(ids, rotary, attend)
        finally:
            model.model["layers"] = layers

    model.hidden = shallow  # type: ignore[method-assign]
    try:
        yield
    finally:
        del model.hidden  # type: ignore[attr-defined]
