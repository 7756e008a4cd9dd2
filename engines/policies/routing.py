"""Binders give a session a decode worker for life. Routers send each of its prefills there or to a prefill worker (AMPD §3)."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Literal, NamedTuple, Protocol, runtime_checkable

from engines.errors import require
from engines.knobs import Checked, Range, check_value
from engines.policies.views import DecodeView, PrefillTask, PrefillView, QueueView, Rule

Dispatch = Literal["shortest", "round-robin", "random", "shared"]
"""shortest: least estimated time of running and queued prefills (join the shortest queue). shared: one queue, from
which workers take when they are free; the route then only decides who is woken."""


class Decision(NamedTuple):
    """The worker of a prefill, and the rule that chose it."""

    worker_id: int
    is_local: bool
    """Whether it runs on the decode worker that its session is bound to."""
    reason: str


class Router(Protocol):
    def route(self, task: PrefillTask, home: DecodeView, prefills: Sequence[PrefillView], now: float) -> Decision:
        """``home`` is the decode worker that the session is bound to."""


class Estimator(Protocol):
    """The time that policies believe a prefill takes. On a worker it may take another."""

    def prefill_s(self, history: int, tokens: int, degree: int) -> float: ...


@dataclass(kw_only=True)
class Local:
    """Co-located serving: a prefill runs where its session lives."""

    reason: str = field(default="co-located", init=False)

    def route(self, task: PrefillTask, home: DecodeView, prefills: Sequence[PrefillView], now: float) -> Decision:
        return Decision(home.worker_id, True, self.reason)

    def rule(self) -> Rule:
        return Rule("local")


class RemoteOnly:
    """Sends all prefills to prefill workers, and picks the worker by ``dispatch``."""

    def __init__(self, dispatch: Dispatch = "shortest", *, seed: int = 0) -> None:
        check_value(Dispatch, "dispatch", dispatch)
        self.dispatch = dispatch
        self._rng = random.Random(seed)
        self._turn = 0

    def route(self, task: PrefillTask, home: DecodeView, prefills: Sequence[PrefillView], now: float) -> Decision:
        return Decision(self.pick(prefills, now).worker_id, False, "always-remote")

    def rule(self) -> Rule:
        return Rule("remote", self.dispatch, draw=self._rng.random)

    def pick(self, prefills: Sequence[PrefillView], now: float) -> PrefillView:
        require(bool(prefills), "no prefill workers: give a disaggregated deployment")
        if self.dispatch == "random":
            return prefills[int(self._rng.random() * len(prefills))]
        if self.dispatch == "round-robin":
            self._turn += 1
            return prefills[(self._turn - 1) % len(prefills)]
        if self.dispatch == "shared":
            return min(prefills, key=lambda worker: (worker.backlog_tokens, worker.worker_id))
        return min(prefills, key=lambda worker: (worker.busy_s(now) + worker.backlog_s, worker.worker_id))


class Binder(Protocol):
    def bind(self, decodes: Sequence[DecodeView], now: float) -> int:
        """Return the id of the decode worker to which a new session belongs for life."""


@dataclass(frozen=True, kw_only=True)
class LeastKvMemory:
    """Binds to the worker with the least K/V in use; ties by fewest sessions, then by id (AMPD §3, binding)."""

    def bind(self, decodes: Sequence[DecodeView], now: float) -> int:
        return min(decodes, key=lambda worker: (worker.kv_tokens, worker.num_sessions, worker.worker_id)).worker_id


@dataclass(kw_only=True)
class RoundRobin:
    """Binds to the workers in turn."""

    turn: int = field(default=0, init=False)

    def bind(self, decodes: Sequence[DecodeView], now: float) -> int:
        self.turn += 1
        return decodes[(self.turn - 1) % len(decodes)].worker_id


@dataclass(frozen=True, kw_only=True)
class FewestSessions:
    """Binds to the worker with the fewest sessions; ties by least K/V, then by id."""

    def bind(self, decodes: Sequence[DecodeView], now: float) -> int:
        return min(decodes, key=lambda worker: (worker.num_sessions, worker.kv_tokens, worker.worker_id)).worker_id


@runtime_checkable
class PromptBinder(Protocol):
    """A binder that looks at a session's first prompt."""

    def bind_prompt(self, order: int, tokens: int, decodes: Sequence[QueueView]) -> int:
        """Like ``Binder.bind``, for a session of rank ``order`` by arrival whose first prompt has ``tokens`` tokens."""


OverlapWeight = Annotated[float, Range(0, 100)]


@dataclass(frozen=True, kw_only=True)
class KvCost(Checked):
    """Dynamo's KV-aware router at temperature 0. It takes the worker of the least cost: ``overlap_weight`` x blocks to prefill + blocks in
    use. We count tokens, which is the same. Workers that only prefill hold nothing for long, so blocks in use do not count there."""

    overlap_weight: OverlapWeight = 1.0

    def bind_prompt(self, order: int, tokens: int, decodes: Sequence[QueueView]) -> int:
        return self._least(order, tokens, decodes, counts_use=True)

    def route(self, task: PrefillTask, home: DecodeView, prefills: Sequence[PrefillView], now: float) -> Decision:
        tokens = task.history + task.tokens
        return Decision(self._least(task.order, tokens, prefills, counts_use=False), False, "kv-aware")

    def rule(self) -> Rule:
        return Rule("kv-aware", limits=(self.overlap_weight,))

    def _least(self, order: int, tokens: int, workers: Sequence[QueueView], *, counts_use: bool) -> int:
        def cost(worker: QueueView) -> tuple[float, int, int]:
            to_prefill, in_use = worker.load_with(order, tokens)
            blocks = self.overlap_weight * to_prefill + (in_use if counts_use else 0)
            return blocks, worker.backlog_tokens, worker.worker_id

        require(bool(workers), "no workers to choose among: give a deployment that has some")
        return min(map(cost, workers))[2]
