"""Which prefill instance gets a request: plain views in, an id out, for simulated and real instances alike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from engines.policies.task import PrefillTask

LengthClass = Literal["short", "long"]


class InstanceView(Protocol):
    """What a router may look at."""

    @property
    def worker_id(self) -> int: ...
    @property
    def num_requests(self) -> int:
        """Queued and running."""
        ...

    @property
    def backlog_tokens(self) -> int:
        """Tokens left of the queued and the running requests."""
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
    """Least outstanding tokens, those counted that an instance would prefill again for want of the history."""

    def pick(self, task: PrefillTask, instances: Sequence[InstanceView], now: float) -> int:
        return _with_least_tokens(instances, task)


@dataclass(frozen=True, kw_only=True)
class LeastTokensInPool:
    """The pool of the request's class, and least tokens in it; a history prefilled again can make it long."""

    boundary: int

    def pick(self, task: PrefillTask, instances: Sequence[InstanceView], now: float) -> int:
        short = [each for each in instances if each.pool == "short" and _tokens_to_prefill(each, task) < self.boundary]
        return _with_least_tokens(short or [each for each in instances if each.pool == "long"], task)


def _with_least_tokens(instances: Sequence[InstanceView], task: PrefillTask) -> int:
    """Counting the task's own; of equal ones the lowest id."""
    # What the task has of tokens and history is the same everywhere.
    return min([(each.backlog_tokens - each.cached_tokens(task), each.worker_id) for each in instances])[1]


def _tokens_to_prefill(instance: InstanceView, task: PrefillTask) -> int:
    return task.tokens + task.history - instance.cached_tokens(task)
