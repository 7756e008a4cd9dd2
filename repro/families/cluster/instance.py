"""One measured prefill instance, and what we tell its policies about it: the floor, the knee and the step model."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from engines.ar.torch.executor import MeasuredSteps, PagedExecutor, grid
from engines.errors import require
from engines.laps.latency import StepModel
from engines.models.loader import load_causal, parse_dtype
from engines.models.qwen2_config import CausalConfig, causal_config, tiny_causal
from engines.policies.views import Bucket, Chunk, Rung
from repro.files import read_yaml
from repro.workloads.card import parse

SLO_FLOORS = 20
"""The TTFT objective, as a multiple of the time of a one-token step (the floor)."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Sizes of the experiments on one model."""

    model: str
    """'tiny', a name of ``CAUSAL_SHAPES``, a directory or a hub id."""
    shorts: tuple[int, int]
    """The fewest and the most tokens of a short prompt."""
    longs: tuple[int, int]
    lengths: tuple[int, ...]
    """Lengths of the buckets, L."""
    batches: tuple[int, ...]
    """Batch sizes of the buckets, B."""
    max_len: int
    num_tokens: int
    num_slots: int
    profile_lengths: tuple[int, ...]
    profile_histories: tuple[int, ...]
    profile_batches: tuple[tuple[int, int], ...]


_SETTINGS = read_yaml(Path(__file__).with_name("instances.yaml"))
TINY, CARD = (parse(Setting, _SETTINGS[name], f"instances.yaml: {name}") for name in ("tiny", "card"))


def setting_of(model: str) -> Setting:
    """The sizes for a model. Those of ``CARD`` fit 141 GB with any model of the paper, except that 32B leaves room for half the K/V."""
    if model == "tiny":
        return TINY
    is_large = config_of(model).n_layers >= 64
    return replace(CARD, model=model, num_tokens=CARD.num_tokens // 2 if is_large else CARD.num_tokens)


@dataclass(frozen=True, kw_only=True)
class MeasuredInstance:
    setting: Setting
    executor: PagedExecutor
    cost: MeasuredSteps
    """Runs and times every step once."""
    step_model: StepModel
    """A model of step times, fitted to the fastest of several runs of each profiled step."""
    floor_s: float
    """Seconds of a step of one token."""
    captured: tuple[Bucket | Rung, ...]

    @property
    def slo_s(self) -> float:
        return SLO_FLOORS * self.floor_s

    @property
    def boundary(self) -> int:
        """L_m: the number of tokens below which a step takes the floor, limited to lie between the setting's shorts and longs."""
        return min(max(round(self.step_model.knee_tokens), self.setting.shorts[1] + 1), self.setting.longs[0])

    @property
    def facts(self) -> dict[str, Any]:
        """Measurements of the instance before it served, as JSON values."""
        model = self.step_model
        return {
            "floor_s": self.floor_s,
            "knee_tokens": model.knee_tokens if model.token_s else None,
            "token_s": model.token_s,
            "step_model_error": model.mean_error,
            "threads": torch.get_num_threads(),
            "buckets": len(self.captured),
            **self.executor.paths(),
        }


def config_of(model: str) -> CausalConfig:
    return tiny_causal() if model == "tiny" else causal_config(model)


def executor_of(setting: Setting, *, device: str, dtype: str, uses_graphs: bool = True) -> PagedExecutor:
    """An executor with random weights, because step times do not depend on them."""
    model = load_causal(
        config_of(setting.model), dtype=parse_dtype(dtype), device=device, weights="random", keeps_weights=False
    )
    return PagedExecutor(
        model,
        num_slots=setting.num_slots,
        max_len=setting.max_len,
        num_tokens=setting.num_tokens,
        longest_bucket=max(setting.lengths),
        uses_graphs=uses_graphs,
    )


def measured_instance(
    setting: Setting = TINY,
    *,
    device: str = "cpu",
    dtype: str = "float32",
    captured: Sequence[Bucket | Rung] | None = None,
    repeats: int = 5,
    timer: Callable[[], float] = perf_counter,
) -> MeasuredInstance:
    """Load a model, capture its graphs and profile it. ``captured`` are the shapes that policies may use, by default the whole grid.
    ``timer`` goes to ``MeasuredSteps``."""
    require(repeats >= 1, f"repeats={repeats} must be at least 1")
    shapes = tuple(grid(setting.lengths, setting.batches) if captured is None else captured)
    executor = executor_of(setting, device=device, dtype=dtype)
    executor.capture(shapes)
    profiled = MeasuredSteps(executor, repeats=repeats, warmup=2, timer=timer)
    step_model = StepModel.profile(
        profiled,
        shapes,
        lengths=setting.profile_lengths,
        histories=setting.profile_histories,
        batches=setting.profile_batches,
    )
    return MeasuredInstance(
        setting=setting,
        executor=executor,
        cost=MeasuredSteps(executor, timer=timer),
        step_model=step_model,
        floor_s=profiled.step_s([Chunk(0, 1)], 0, 0),
        captured=shapes,
    )
