"""Prefill systems: LAPS, its ablations, Reserve and On-time (LAPS §3, Figure 6), and the routers that pick a request's instance.

The controller of spatial disaggregation (LAPS §3.2, Algorithm 2) compares pressures. As printed, utilisation lowers a pressure (psi =
alpha q + beta e - gamma u), so calm pools have negative pressures. With P < 0 the test P_s > (1 + tau) P_l holds for both pools at
once, and an instance moves at every cool-down. ``mended`` adds gamma u instead, which keeps psi >= 0.

Near capacity that is not enough. There a pool's pressure over one interval is mostly queue noise, and every move overloads the pool
that gives. So ``mended`` compares pressures averaged over ``window_s``, and begins the average anew after a move. It also makes no
move that would leave the giving pool under more pressure than the other.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Annotated, Any, Literal, NamedTuple, Protocol

from engines.knobs import Checked, Count, Range, Seconds, Tokens
from engines.laps.batching import (
    BATCHES,
    AdaptiveWait,
    ClassQueue,
    Graphs,
    TemporalConfig,
    TemporalDisaggregation,
    WaitConfig,
    WithGraphs,
    graph_choice,
)
from engines.laps.latency import StepModel
from engines.laps.ours import MooreHodgson, OnTime, OnTimeConfig, Reserve, ReserveConfig, StepSize
from engines.policies.views import BacklogView, Batching, Bucket, OpenQueue, PrefillQueue, PrefillTask, Rule

LengthClass = Literal["short", "long"]


class InstanceView(BacklogView, Protocol):
    """An instance as a router sees it."""

    @property
    def num_requests(self) -> int:
        """Queued and running requests."""

    @property
    def pool(self) -> LengthClass | None:
        """The class it serves under spatial disaggregation."""

    def cached_tokens(self, task: PrefillTask) -> int:
        """Tokens of the task's history whose K/V it holds."""


class InstanceRouter(Protocol):
    def pick(self, task: PrefillTask, instances: Sequence[InstanceView], now: float) -> int:
        """Id of the instance."""


@dataclass(kw_only=True)
class InstancesInTurn:
    """Plain data parallelism: instances in turn."""

    turn: int = field(default=0, init=False)

    def rule(self) -> Rule:
        return Rule("in-turn")

    def pick(self, task: PrefillTask, instances: Sequence[InstanceView], now: float) -> int:
        self.turn += 1
        return instances[(self.turn - 1) % len(instances)].worker_id


@dataclass(frozen=True, kw_only=True)
class LeastRequests:
    def rule(self) -> Rule:
        return Rule("least-requests")

    def pick(self, task: PrefillTask, instances: Sequence[InstanceView], now: float) -> int:
        return min(instances, key=lambda each: (each.num_requests, each.worker_id)).worker_id


@dataclass(frozen=True, kw_only=True)
class LeastTokens:
    """The instance with the least outstanding tokens. History that it does not hold counts, because it would prefill it again. Ties
    go to the lowest id."""

    def rule(self) -> Rule:
        return Rule("least-tokens")

    def pick(self, task: PrefillTask, instances: Sequence[InstanceView], now: float) -> int:
        # The task's own tokens and history are the same everywhere.
        return min([(each.backlog_tokens - each.cached_tokens(task), each.worker_id) for each in instances])[1]


@dataclass(frozen=True, kw_only=True)
class LeastTokensInPool:
    """The instance with the least tokens in the pool of the request's class. History to prefill again can make a request long."""

    boundary: int

    def rule(self) -> Rule:
        return Rule("least-in-pool", limits=(self.boundary,))

    def pick(self, task: PrefillTask, instances: Sequence[InstanceView], now: float) -> int:
        tokens = task.history + task.tokens
        candidates = [i for i in instances if i.pool == "short" and tokens - i.cached_tokens(task) < self.boundary]
        return LeastTokens().pick(task, candidates or [i for i in instances if i.pool == "long"], now)


Form = Literal["printed", "mended"]
_Weight = Annotated[float, Range(0, 1e6)]


class Signals(NamedTuple):
    """The signals that an instance reports at each control interval."""

    backlog_s: float
    """q: predicted time of the work that is queued for it."""
    violations: float
    """e: share of the requests it finished in the interval that missed their deadline."""
    utilisation: float
    """u: busy share of the interval."""


@dataclass(frozen=True, kw_only=True)
class ControllerConfig(Checked):
    """The knobs of the controller. The paper prints no values."""

    form: Form = "mended"
    period_s: Annotated[float, Range(above=0, most=1e6)] = 1.0
    """Delta t: the interval between two decisions."""
    cooldown_s: Seconds = 5.0
    """T_cool: least time between two moves."""
    tau: _Weight = 1.0
    """Hysteresis: a pool grows if its pressure exceeds 1 + tau times that of the other."""
    n_min: Count = 1
    """Instances that a pool keeps at least."""
    alpha: _Weight = 1.0
    beta: _Weight = 1.0
    gamma: _Weight = 0.5
    quantile: Annotated[float, Range(0, 1)] = 0.9
    """The aggregate over a pool: P90."""
    window_s: Seconds = 10.0
    """Length of the averages that ``mended`` compares; 0 compares single intervals."""


class Adjustment(NamedTuple):
    grows: LengthClass | None
    """The pool that gets an instance from the other; None: no instance moves."""
    short_pressure: float
    long_pressure: float


class PressureController:
    def __init__(self, config: ControllerConfig) -> None:
        self.config = config
        self._last_s = -math.inf
        """Time of the last move."""
        self._short, self._long = _Average(config), _Average(config)

    def decide(self, shorts: Sequence[Signals], longs: Sequence[Signals], now: float) -> Adjustment:
        """Run one pass of the loop, with the signals of both pools' instances at ``now``."""
        config = self.config
        is_whole = self._short.add(self.pressure(shorts)) & self._long.add(self.pressure(longs))
        short, long = self._short.value, self._long.value
        if now - self._last_s < config.cooldown_s or not is_whole:
            return Adjustment(None, short, long)
        grows: LengthClass | None = None
        if self._is_due(short, len(shorts), long, len(longs)):
            grows = "short"
        elif self._is_due(long, len(longs), short, len(shorts)):
            grows = "long"
        if grows is not None:
            self._last_s = now
            self._short, self._long = _Average(config), _Average(config)
        return Adjustment(grows, short, long)

    def _is_due(self, high: float, num_high: int, low: float, num_low: int) -> bool:
        """Whether a pool of pressure ``high`` gets an instance from the other, whose pressure is ``low``."""
        config = self.config
        if not (high > (1 + config.tau) * low and num_low > config.n_min):
            return False
        # After the move the pressures spread over one instance more and one fewer.
        return config.form == "printed" or high * num_high / (num_high + 1) >= low * num_low / (num_low - 1)

    def pressure(self, pool: Sequence[Signals]) -> float:
        config = self.config
        gamma = -config.gamma if config.form == "printed" else config.gamma
        pressures = [config.alpha * q + config.beta * e + gamma * u for q, e, u in pool]
        return _quantile(pressures, config.quantile)


class _Average:
    """An exponential average over ``window_s``. It is whole once it spans that, and until then the mean of all values."""

    def __init__(self, config: ControllerConfig) -> None:
        self.value = 0.0
        window_s = config.window_s if config.form == "mended" else 0.0
        self._weight = config.period_s / window_s if window_s > 0 else 1.0
        self._count = 0

    def add(self, value: float) -> bool:
        """Add a period's value, and return whether the average is whole."""
        self._count += 1
        weight = max(1 / self._count, min(1.0, self._weight))
        self.value += weight * (value - self.value)
        return self._weight * self._count >= 1


def _quantile(values: list[float], quantile: float) -> float:
    """Interpolates linearly between order statistics, as numpy does by default. numpy itself takes longer than all else here."""
    ordered = sorted(values)
    position = (len(ordered) - 1) * quantile
    below = int(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (position - below) * (ordered[above] - ordered[below])


Pooling = Literal["global", "each"]
"""global: instances pull from their pool's queue (LAPS §3.2). each: requests are pushed to the instance of the pool
with the least outstanding tokens, so that a session stays where its history is cached."""


@dataclass(frozen=True, kw_only=True)
class Spatial(Checked):
    """Pools of instances that serve one class each."""

    num_short: Count
    """n_s at the start."""
    controller: ControllerConfig | None = None
    """None: the pools stay as they are."""
    pooling: Pooling = "global"


@dataclass(frozen=True, kw_only=True)
class PrefillSystem:
    """A prefill system. Policies keep state, so factories make new ones for every instance of every run."""

    make_batching: Callable[[], Batching]
    make_queue: Callable[[], PrefillQueue] = PrefillQueue
    make_router: Callable[[], InstanceRouter] = InstancesInTurn
    work_s: Callable[[int, int], float] | None = None
    """Predicted work of (history, tokens), for tasks' estimates."""
    spatial: Spatial | None = None


@dataclass(frozen=True, kw_only=True)
class LapsConfig(Checked):
    """The knobs of LAPS. The defaults mend what is broken as printed; every switch also has the printed setting."""

    boundary: Tokens = 256
    """L_m: prompts of fewer tokens are short."""
    slo_s: Annotated[float, Range(above=0, most=1e6)] | None = 0.4
    graphs: Graphs = "cheapest"
    wait: WaitConfig = field(default_factory=WaitConfig)
    """``slo_s`` of this configuration replaces its own."""
    temporal: TemporalConfig = field(default_factory=TemporalConfig)
    spatial: Spatial | None = None


def laps(model: StepModel, config: LapsConfig | None = None) -> PrefillSystem:
    """Return LAPS. ``model`` must know the captured shapes (``StepModel.profile(cost, shapes_of(graphs))``)."""
    config = config or LapsConfig()
    captured = tuple(model.shapes)
    choice = graph_choice(config.graphs, model, captured)
    depths = sorted({shape.batch for shape in captured if isinstance(shape, Bucket)}) or list(BATCHES)
    wait_config = replace(config.wait, slo_s=config.slo_s)

    return PrefillSystem(
        make_queue=lambda: ClassQueue(config.boundary),
        make_batching=lambda: WithGraphs(
            TemporalDisaggregation(AdaptiveWait(wait_config, depths, model.batch_s), config.temporal), choice
        ),
        make_router=lambda: LeastTokens() if config.spatial is None else LeastTokensInPool(boundary=config.boundary),
        work_s=model.work_s,
        spatial=config.spatial,
    )


def srpt(
    model: StepModel, size: StepSize | None = None, *, aging: float = 0.0, graphs: Graphs = "ladder"
) -> PrefillSystem:
    """Shortest remaining prefill first. It takes Reserve's steps without deadlines, and a wait counts only by ``aging``, so that only
    the order differs."""
    return reserve(model, _reserve_config(size, slo_s=None, aging=aging), graphs=graphs)


def edf(model: StepModel, size: StepSize | None = None, *, graphs: Graphs = "ladder") -> PrefillSystem:
    """Earliest due time first, late or not, in the same steps. With one objective for all, that is by arrival."""
    return srpt(model, size, aging=_ALL_WORK, graphs=graphs)


def moore_hodgson(
    model: StepModel, size: StepSize | None = None, *, slo_s: float | None, graphs: Graphs = "ladder"
) -> PrefillSystem:
    """The same steps, but as few requests as possible are given up."""
    config = _reserve_config(size, slo_s=slo_s)
    return _our_system(lambda: MooreHodgson(model, config), model, graphs)


def _reserve_config(size: StepSize | None, **config: float | None) -> ReserveConfig:
    size = size or StepSize()
    options: dict[str, Any] = dict(config)
    return ReserveConfig(**options, **{field.name: getattr(size, field.name) for field in fields(StepSize)})


_ALL_WORK = 1e6
"""An aging by which the shortest wait counts more than all work of a prefill."""


def reserve(model: StepModel, config: ReserveConfig | None = None, *, graphs: Graphs = "ladder") -> PrefillSystem:
    config = config or ReserveConfig()
    Reserve(model, config)  # shows wrong options before any run
    return _our_system(lambda: Reserve(model, config), model, graphs)


def on_time(model: StepModel, config: OnTimeConfig | None = None, *, graphs: Graphs = "ladder") -> PrefillSystem:
    config = config or OnTimeConfig()
    return _our_system(lambda: OnTime(model, config), model, graphs)


def _our_system(make: Callable[[], Batching], model: StepModel, graphs: Graphs) -> PrefillSystem:
    choice = graph_choice(graphs, model, tuple(model.shapes))
    return PrefillSystem(
        make_queue=OpenQueue,
        make_batching=lambda: WithGraphs(make(), choice),
        make_router=LeastTokens,
        work_s=model.work_s,
    )
