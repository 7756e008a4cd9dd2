"""Which prefill instance gets a request: plain views in, an id out, for simulated and real instances alike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from engines.policies.task import PrefillTask
from engines.policies.views import BacklogView

LengthClass = Literal["short", "long"]


class InstanceView(BacklogView, Protocol):
    """What a router may look at."""

    @property
    def num_requests(self) -> int:
        """Queued and running."""
        ...

    @property
    def pool(self) -> LengthClass | None:
        """The class it serves under spatial disaggregation."""
        ...

    def cached_tokens(self, task: PrefillTask) -> int:
        """Tokens of the task's history whose K/V it holds."""
        ...


class InstanceRouter(Protocol):
    def pick(self, task: PrefillTask, instances: Sequence[InstanceView], now: float) -> int:
        """Id of the instance."""
        ...


@dataclass(kw_only=True)
class RoundRobin:
    """Plain data parallelism: instances in turn."""

    turn: int = field(default=0, init=False)

    def pick(self, task: PrefillTask, instances: Sequence[InstanceView], now: float) -> int:
        self.turn += 1
        return instances[(self.turn - 1) % len(instances)].worker_id


@dataclass(frozen=True, kw_only=True)
class LeastRequests:
    def pick(self, task: PrefillTask, instances: Sequence[InstanceView], now: float) -> int:
        return min(instances, key=lambda each: (each.num_requests, each.worker_id)).worker_id


@dataclass(frozen=True, kw_only=True)
class LeastTokens:
    """Least outstanding tokens, those counted that an instance would prefill again for want of the history; of equal ones the
    lowest id."""

    def pick(self, task: PrefillTask, instances: Sequence[InstanceView], now: float) -> int:
        # What the task has of tokens and history is the same everywhere.
        return min([(each.backlog_tokens - each.cached_tokens(task), each.worker_id) for each in instances])[1]


@dataclass(frozen=True, kw_only=True)
class LeastTokensInPool:
    """The pool of the request's class, and least tokens in it; a history prefilled again can make it long."""

    boundary: int

    def pick(self, task: PrefillTask, instances: Sequence[InstanceView], now: float) -> int:
        tokens = task.history + task.tokens
        short = [i for i in instances if i.pool == "short" and tokens - i.cached_tokens(task) < self.boundary]
        return LeastTokens().pick(task, short or [i for i in instances if i.pool == "long"], now)
