"""A prefill worker with a prefix cache of its own, which reads nothing from decode workers (vLLM's, behind Dynamo).

It keeps the K/V of all it prefilled: the prompts of a session, and of its answers those that it computed again. What it lacks
of a history, answers that were decoded elsewhere and what was evicted, it prefills with the increment.
"""

from __future__ import annotations

from typing import Unpack

from engines.ar.cluster.worker import Hub, Parts, PrefillWorker
from engines.ar.kv import KvPool
from engines.ar.window import WINDOW_S
from engines.policies.step import Share, Situation
from engines.policies.task import PrefillTask


class CachingPrefillWorker(PrefillWorker):
    kv: KvPool

    def __init__(self, hub: Hub, *, kv_capacity: int, window_s: float = WINDOW_S, **parts: Unpack[Parts]) -> None:
        super().__init__(hub, overlaps=False, window_s=window_s, **parts)
        self.kv, self.kv_capacity = KvPool(kv_capacity), kv_capacity

    def cached_tokens(self, order: int) -> int:
        return self.kv.cached(order)

    def sent(self, task: PrefillTask) -> None:
        """The home has the K/V: it may be evicted here, the least recently used session's first."""
        self.kv.park(task.order, task.history + task.tokens)
        self.poke()

    def _situation(self, start_s: float) -> Situation:
        return Situation(self.queue, self.begun, 0, self.kv.capacity - self.kv.held, _need)

    def _read(self, share: Share) -> Share:
        """From its own memory: what is missing is prefilled again, and what it has of a recomputation's tokens is not."""
        task, tokens = share
        if task.computed:
            return share
        is_whole = tokens == task.tokens
        self._hub.owed.more(task, task.history - self.kv.resume(task.order))
        self.kv.make_room(task.tokens, self._loop.now)
        self.kv.hold(task.tokens)
        return Share(task, task.tokens if is_whole else min(tokens, task.tokens))


def _need(task: PrefillTask) -> int:
    return task.history + task.tokens
