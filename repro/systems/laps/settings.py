"""A cell's knobs, resolved against its platform: model, instances, objective, turns."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal, get_args

from engines.ar.step_mode import Bucket, Rung
from engines.errors import UserError, require
from engines.hardware.catalogue import gpu
from engines.laps.buckets import GRID, graph_bytes
from engines.laps.cost import PrefillConstants, PrefillCost
from engines.laps.graphs import StepTimes
from engines.laps.step_model import StepModel
from engines.laps.system import Graphs, shapes_of
from engines.models.shape import SHAPES, model_shape
from repro.runs.cell import Cell
from repro.systems.laps import knobs
from repro.systems.laps.part import PrefillPart, part_of
from repro.systems.laps.workload import MOST_CLIENTS, PrefillWorkloadConfig, Stream
from repro.systems.platforms import Platform, platform
from repro.workloads.arrivals import ArrivalConfig
from repro.workloads.conversations import load_conversation_card
from repro.workloads.conversations.card import LONG

if TYPE_CHECKING:
    from repro.prefill.instance import MeasuredInstance

Decode = Literal["none", "apart", "mixed"]
DIFFUSION = ("llada", "dream")
SHORT_PROMPT = 63
"""Most tokens of a short prompt in LAPS Figures 1 and 3."""
MEMORY_SHARE = 0.85
"""Of a GPU's memory, for weights and K/V."""
CONSTANTS = ("kappa", "overlap", "layer_launch_s", "boundary")
"""Knobs that are constants of the cost model."""
SIMULATED = ("kappa", "overlap", "layer_launch_s", "decode", "graph_budget_gb")
"""Knobs that mean nothing to a measured instance."""
BOUNDARY = 256
"""L_m, tokens of the data set."""
MEASURED_GRID = tuple(bucket for bucket in GRID if bucket.length <= 64 and bucket.batch <= 16)
"""Buckets of a measured instance: up to the boundary, a quarter as long as the paper's, and as deep as its figures have clients."""
UNMEASURED = StepModel(
    base_s=1e-3,
    request_s=1e-5,
    floor_s=1e-4,
    token_s=1e-5,
    alpha=1e-9,
    history_s=1e-8,
    shapes=dict.fromkeys(MEASURED_GRID, 1e-3),
)
"""Stands for a measured instance's step model until there is one: options are checked before any run."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Everything a run needs besides its policies."""

    platform: Platform
    part: PrefillPart
    model: str
    """As the shape spells it."""
    num_instances: int
    constants: PrefillConstants
    slo_s: float
    has_deadlines: bool
    """Whether policies know the objective."""
    boundary: int
    cache: str
    reprefills_answer: bool
    decode: Decode
    is_transient: bool
    workload: PrefillWorkloadConfig
    instance: MeasuredInstance | None = None
    """What a measured run is on, while it runs."""

    @property
    def is_simulated(self) -> bool:
        return self.part.gpu is not None

    @property
    def cost(self) -> StepTimes:
        if self.is_simulated:
            return self.roofline
        assert self.instance is not None, "only a run has a measured instance"
        return self.instance.cost

    @property
    def roofline(self) -> PrefillCost:
        """Of a simulated card."""
        assert self.part.gpu is not None
        return cost_of(self.model, self.part.gpu, self.constants)

    def step_model(self, shapes: tuple[Bucket | Rung, ...]) -> StepModel:
        """What policies know of the instances' speed: a fit to profiled steps, and the replay of every captured graph."""
        if self.part.gpu is not None:
            return step_model_of(self.model, self.part.gpu, self.constants, shapes)
        model = UNMEASURED if self.instance is None else self.instance.step_model
        return replace(model, shapes={shape: model.shapes[shape] for shape in shapes})

    def shapes(self, graphs: Graphs, budget_gb: float | None = None) -> tuple[Bucket | Rung, ...]:
        """What is captured for a way to choose: simulated what fits the budget, measured what the instance has."""
        if not self.is_simulated:
            require(
                graphs != "ladder",
                "graphs='ladder': packed sizes pay where launches cost, a CPU has none: use none, nearest or cheapest",
            )
            captured = MEASURED_GRID if self.instance is None else self.instance.captured
            return () if graphs == "none" else captured
        size = graph_bytes(self.model, model_shape(self.model).n_layers)
        return shapes_of(graphs, None if budget_gb is None else round(budget_gb * 1e9), size)

    @property
    def deadline_s(self) -> float | None:
        """What policies know of the objective."""
        return self.slo_s if self.has_deadlines else None

    @property
    def kv_capacity(self) -> int:
        """Tokens of K/V beside the weights on one GPU; measured, what the instance has positions for."""
        if self.part.gpu is None:
            return self.part.most_tokens
        shape = model_shape(self.model)
        return int((MEMORY_SHARE * gpu(self.part.gpu).memory_bytes - shape.weight_bytes) / shape.kv_bytes_per_token)

    @property
    def basis(self) -> str:
        """Digest of what is behind the numbers besides requests and code: constants and objective, or the model and the scales."""
        if self.is_simulated:
            text = repr((self.roofline.shape, self.roofline.gpu, self.constants, self.slo_s, self.boundary))
        else:
            text = repr((self.part, self.slo_s, self.boundary))
        return hashlib.sha256(text.encode()).hexdigest()[:12]


@lru_cache(maxsize=64)
def cost_of(model: str, card: str, constants: PrefillConstants) -> PrefillCost:
    return PrefillCost(model_shape(model), gpu(card), constants)


@lru_cache(maxsize=256)
def step_model_of(model: str, card: str, constants: PrefillConstants, shapes: tuple[Bucket | Rung, ...]) -> StepModel:
    """The mixing penalty is not in it: policies know what a step of one prompt takes."""
    return StepModel.profile(cost_of(model, card, replace(constants, kappa=0.0)), shapes)


def resolve(cell: Cell, system: str, own: Mapping[str, knobs.Kind], part: PrefillPart | None = None) -> Settings:
    """Platform defaults, or those of ``part``, overridden by the cell's knobs; what cannot be is refused by name."""
    given = {name: value for name, value in cell.knob_values.items() if value is not None}
    where = platform(cell.platform)
    part = part or part_of(where)
    wanted = "torch" if part.gpu is None else "roofline"
    require(
        cell.executor == wanted,
        f"executor={cell.executor!r}: system={system!r} is {'measured' if wanted == 'torch' else 'simulated'} on "
        f"platform={where.name!r}, leave it out or use {wanted}",
    )
    knobs.check_knobs(system, own, given)
    load_conversation_card(cell.dataset)
    model = _model(system, part, given)
    num = int(given.get("num_instances", 1))
    require(
        1 <= num <= part.most_instances,
        f"num_instances={num} must be between 1 and {part.most_instances} on platform={where.name!r}",
    )
    slo_s = float(given.get("slo_ttft_s", part.slo_s))
    require(0 < slo_s < math.inf, f"slo_ttft_s={slo_s} must be above 0 s")
    decode = given.get("decode", "none")
    if decode not in get_args(Decode):
        raise UserError(f"decode={decode!r} is unknown: use one of {', '.join(get_args(Decode))}")
    require(
        decode == "none" or cell.rate is None, f"decode={decode!r} needs clients in a closed loop: leave the rate out"
    )
    return Settings(
        platform=where,
        part=part,
        model=model,
        num_instances=num,
        constants=PrefillConstants(**{name: given[name] for name in CONSTANTS if name in given}),  # type: ignore[arg-type]
        slo_s=slo_s,
        has_deadlines=bool(given.get("deadlines", True)),
        boundary=_boundary(part, given),
        cache=str(given.get("cache", "shared")),
        reprefills_answer=bool(given.get("reprefills_answer")),
        decode=decode,  # type: ignore[arg-type]
        is_transient=bool(given.get("transient")),
        workload=_workload(cell, part, given),
    )


def _model(system: str, part: PrefillPart, given: Mapping[str, Any]) -> str:
    if part.gpu is None:
        for name in SIMULATED:
            require(
                name not in given, f"{name}={given.get(name)!r} has no effect where steps are measured: leave it out"
            )
        asked = given.get("model", part.model)
        require(asked == part.model, f"model={asked!r} is not measured here: leave it out, or use {part.model}")
        return part.model
    shape = model_shape(str(given.get("model", part.model)))
    if shape.name.lower().startswith(DIFFUSION):
        usable = ", ".join(each.name for each in SHAPES if not each.name.lower().startswith(DIFFUSION))
        raise UserError(
            f"model={shape.name!r} is a diffusion model, which system={system!r} cannot serve: use {usable}"
        )
    return shape.name


def _boundary(part: PrefillPart, given: Mapping[str, Any]) -> int:
    boundary = int(given.get("boundary", round(BOUNDARY * part.length_scale)))
    require(1 <= boundary <= 10**6, f"boundary={boundary} must be between 1 and 1,000,000 tokens")
    return boundary


def _workload(cell: Cell, part: PrefillPart, given: Mapping[str, Any]) -> PrefillWorkloadConfig:
    num = int(given.get("num_prompts", part.num_turns))
    require(1 <= num <= 10**6, f"num_prompts={num} must be between 1 and 1,000,000 turns")
    think_s = float(given.get("think_s", 0.0))
    require(0 <= think_s < math.inf, f"think_s={think_s} must be 0 s or more")
    path = given.get("dataset_path")
    source = given.get("dataset_source", "embedded" if path is None else "local")
    if source not in ("embedded", "local"):
        raise UserError(f"dataset_source={source!r} is unknown for conversations: use embedded or local")
    streams = _streams(cell, part, given, num)
    kind = given.get("arrivals", "poisson" if cell.rate is not None else None)
    arrivals = None
    if cell.rate is not None or kind is not None:
        require(
            kind not in ("burst", "trace"),
            f"arrivals={kind!r}: turns come at a rate (poisson, gamma, constant), or leave it out for clients in a closed loop",
        )
        extra = {} if given.get("burstiness") is None else {"burstiness": float(given["burstiness"])}
        arrivals = ArrivalConfig(kind=kind, rate=cell.rate, **extra)  # type: ignore[arg-type]
        require(think_s == 0, f"think_s={think_s} has no effect at a request rate: leave one of them out")
    else:
        require(given.get("burstiness") is None, "burstiness has no effect without a request rate: leave it out")
    return PrefillWorkloadConfig(
        dataset=cell.dataset.lower(),
        seed=cell.seed,
        streams=streams,
        arrivals=arrivals,
        think_s=think_s,
        answer_tokens=given.get("answer_tokens"),
        source=source,  # type: ignore[arg-type]
        path=None if path is None else str(path),
        length_scale=part.length_scale,
    )


def _streams(cell: Cell, part: PrefillPart, given: Mapping[str, Any], num: int) -> tuple[Stream, ...]:
    """One of whole conversations or of a band of prompts; or two closed loops, of long and of short ones."""
    pair = {name: int(given[name]) for name in ("long_clients", "short_clients") if name in given}
    for name in ("clients", *pair):
        if name in given:
            most = MOST_CLIENTS
            least = 0 if name in pair else 1
            require(least <= given[name] <= most, f"{name}={given[name]} must be between {least} and {most:,}")
            require(cell.rate is None, f"{name}={given[name]} has no effect at a request rate: leave one of them out")
    if not pair:
        clients = None if cell.rate is not None else int(given.get("clients", part.clients))
        low, high = given.get("min_tokens"), given.get("max_tokens")
        return (Stream(num_turns=num, clients=clients, low=low, high=high),)
    for name in ("clients", "min_tokens", "max_tokens", "arrivals"):
        require(name not in given, f"{name}={given.get(name)!r} has no effect with {next(iter(pair))}: leave one out")
    total = sum(pair.values())
    require(total > 0, "long_clients=0 and short_clients=0: give one of them clients")
    # As many turns for each client.
    return tuple(
        Stream(num_turns=max(1, round(num * pair[name] / total)), clients=pair[name], low=low, high=high)
        for name, low, high in (("long_clients", LONG + 1, None), ("short_clients", None, SHORT_PROMPT))
        if pair.get(name)
    )
