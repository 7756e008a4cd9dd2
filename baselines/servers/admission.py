"""LAPS or Reserve as policies of a real engine: its requests become prefill tasks, and their plan says which to admit and to advance.

This module does not know the engine. The engine tells it of arrivals, departures and the progress of prefills, and learns which requests
the next step is for. The policy objects are those of the simulated and of the torch instances (engines.laps.system).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Literal, NamedTuple

from engines.data import json_object
from engines.knobs import Checked, Fixed, Range, Tokens, check_requested
from engines.laps.batching import TemporalConfig, WaitConfig
from engines.laps.latency import StepModel
from engines.laps.ours import ReserveConfig
from engines.laps.system import LapsConfig, PrefillSystem, laps, reserve
from engines.policies.views import NextStep, OpenQueue, PrefillTask, Situation


@dataclass(frozen=True, kw_only=True)
class AdmissionConfig(Checked):
    """Settings of a policy, and the step time it assumes: T = base + request B + token N + alpha sum L^2."""

    policy: Annotated[Literal["laps", "reserve"], Fixed] = "laps"
    boundary: Tokens = 256
    """LAPS's L_m."""
    chunk_tokens: Tokens = 512
    """LAPS's C_l."""
    short_tokens: Tokens = 2048
    """LAPS's M."""
    window_ms: float = 5.0
    """LAPS's longest wait for more requests."""
    slo_ms: float = 400.0
    min_step_ms: float = 50.0
    """Reserve keeps steps between this and ``max_step_ms``."""
    max_step_ms: float = 150.0
    base_ms: Annotated[float, Range(0)] = 2.0
    request_us: Annotated[float, Range(0)] = 50.0
    token_us: Annotated[float, Range(above=0)] = 10.0
    alpha_ns: Annotated[float, Range(0)] = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        _ = Admission(self)

    @staticmethod
    def parse(text: str, *, policy: str) -> "AdmissionConfig":
        """Parse settings from a JSON object."""
        settings = json_object("policy_settings", text, example='{"boundary": 256}')
        check_requested(settings, AdmissionConfig, owner="policy_settings")
        return AdmissionConfig(policy=policy, **settings)  # type: ignore[arg-type]

    @property
    def system(self) -> PrefillSystem:
        model = StepModel(
            base_s=self.base_ms / 1e3,
            request_s=self.request_us / 1e6,
            floor_s=0.0,
            token_s=self.token_us / 1e6,
            alpha=self.alpha_ns / 1e9,
            history_s=0.0,
            shapes={},
        )
        if self.policy == "reserve":
            bounds = ReserveConfig(
                slo_s=self.slo_ms / 1e3, min_step_s=self.min_step_ms / 1e3, max_step_s=self.max_step_ms / 1e3
            )
            return reserve(model, bounds, graphs="none")
        return laps(
            model,
            LapsConfig(
                boundary=self.boundary,
                slo_s=self.slo_ms / 1e3,
                graphs="none",
                wait=WaitConfig(max_window_s=self.window_ms / 1e3, token_max=self.short_tokens),
                temporal=TemporalConfig(chunk_tokens=self.chunk_tokens, short_tokens=self.short_tokens),
            ),
        )


class Advance(NamedTuple):
    """The work of the next step besides decoding. Requests have the engine's names, in the policy's order."""

    admitted: tuple[str, ...]
    shares: Mapping[str, int]
    """Tokens of each prompt that advances, both admitted ones and those begun before."""


class Admission:
    """Requests wait here until the policy admits them. Then they are begun until their prompt is computed."""

    def __init__(self, config: AdmissionConfig) -> None:
        system = config.system
        queue = system.make_queue()
        assert isinstance(queue, OpenQueue)
        self._queue, self._batching = queue, system.make_batching()
        self._waiting: dict[str, PrefillTask] = {}
        self._begun: dict[str, PrefillTask] = {}
        self._names: dict[int, str] = {}
        self._num_arrived = 0

    def __contains__(self, name: str) -> bool:
        return name in self._waiting

    def arrive(self, name: str, tokens: int, now: float) -> None:
        number = self._num_arrived
        self._num_arrived += 1
        task = PrefillTask(number, number, number, 0, "initial", history=0, tokens=tokens, ready_s=now, enqueued_s=now)
        self._waiting[name] = task
        self._names[number] = name
        self._queue.push(task)

    def leave(self, name: str) -> None:
        """Remove a request that ended, or that nobody wants any more."""
        if (task := self._waiting.pop(name, None)) is not None:
            self._queue.pull(task)
        else:
            task = self._begun.pop(name, None)
        if task is not None:
            del self._names[task.task_id]

    def step(self, now: float, computed: Mapping[str, int], room: int, block: int) -> Advance:
        """Plan a step. ``computed``: tokens done of each begun prompt; ``room``: free tokens of K/V, taken in blocks of ``block``."""
        for name in [name for name, task in self._begun.items() if computed.get(name, task.tokens) >= task.tokens]:
            self.leave(name)
        for name, task in self._begun.items():
            task.computed = computed[name]

        def need_of(task: PrefillTask) -> int:
            return -(-(task.tokens + 1) // block) * block

        state = Situation(self._queue, list(self._begun.values()), 0, room, need_of)
        plan: NextStep = self._batching.next_step(state, now)
        shares = {self._names[task.task_id]: tokens for task, tokens in plan.shares}
        admitted = tuple(name for name in shares if name in self._waiting)
        for name in admitted:
            self._begun[name] = self._waiting.pop(name)
        return Advance(admitted, shares)
