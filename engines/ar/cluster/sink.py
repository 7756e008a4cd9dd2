"""A decode side without contention: every sequence gets a token at a fixed pace, memory has no end.

For studying the prefill side alone: prefill-only instances, queues with a closed form, planning.
"""

from __future__ import annotations

import sys

from engines.ar.cluster.hub import Hub, Live
from engines.ar.cluster.record import Stay, WorkerRow
from engines.policies.task import PrefillTask


class Sink:
    def __init__(self, hub: Hub, *, worker_id: int, degree: int = 1, itl_s: float = 0.0, server: int = 0) -> None:
        self.worker_id, self.degree, self.server = worker_id, degree, server
        self.num_sessions = 0
        self.backlog_s = 0.0
        self.backlog_tokens = 0
        self.kv_tokens = 0
        self.kv_capacity = sys.maxsize
        self.gaps: list[float] = []
        self.counts: list[int] = []
        self._hub, self._loop, self._itl_s = hub, hub.loop, itl_s

    def busy_s(self, now: float) -> float:
        return 0.0

    def oldest_wait_s(self, now: float) -> float:
        return 0.0

    def windowed_itl_s(self, now: float) -> float:
        return self._itl_s

    def token_age_s(self, now: float) -> float:
        return 0.0

    @property
    def log(self) -> tuple[list[float], list[int]]:
        return self.gaps, self.counts

    def row(self) -> WorkerRow:
        return WorkerRow(self.worker_id, "sink", self.degree, self.server)

    def bind(self, live: Live) -> None:
        self.num_sessions += 1

    def enqueue(self, task: PrefillTask) -> None:
        raise AssertionError("a sink prefills nothing: route every task to a prefill worker")

    def lend(self, live: Live) -> int:
        return live.context

    def land(self, live: Live, tokens: int) -> None:
        self.kv_tokens += tokens + 1
        now = self._loop.now
        if live.left:
            self._loop.at(now + live.left * self._itl_s, self._finish, live)
        else:
            self._finish(live)

    def end(self, live: Live) -> None:
        self.num_sessions -= 1
        self.kv_tokens -= live.context

    def _finish(self, live: Live) -> None:
        if live.left:
            live.token_s = self._loop.now
            self.kv_tokens += live.left
            live.context += live.left
            start = len(self.gaps)
            if live.left > 1:
                self.gaps.append(self._itl_s)
                self.counts.append(live.left - 1)
            self._hub.stayed(self.worker_id, Stay(live.row, self._itl_s, start, len(self.gaps)))
            live.left = 0
        self._hub.round_done(live)
