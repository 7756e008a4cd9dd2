"""A decode side without contention: every sequence gets a token at a fixed pace, memory has no end.

For studying the prefill side alone: prefill-only instances, queues with a closed form, planning.
"""

from __future__ import annotations

import sys

from engines.ar.cluster.hub import Hub, Live
from engines.ar.record import Stay, TokenLog, WorkerRow
from engines.policies.task import PrefillTask


class Sink:
    def __init__(self, hub: Hub, *, worker_id: int, degree: int = 1, itl_s: float = 0.0, server: int = 0) -> None:
        self.worker_id, self.degree, self.server = worker_id, degree, server
        self.num_sessions = 0
        self.backlog_s = 0.0
        self.backlog_tokens = 0
        self.kv_tokens = 0
        self.kv_capacity = sys.maxsize
        self.log = TokenLog()
        self._hub, self._loop, self._itl_s = hub, hub.loop, itl_s

    def busy_s(self, now: float) -> float:
        return 0.0

    def oldest_wait_s(self, now: float) -> float:
        return 0.0

    def windowed_itl_s(self, now: float) -> float:
        return self._itl_s

    def token_age_s(self, now: float) -> float:
        return 0.0

    def row(self) -> WorkerRow:
        return WorkerRow(self.worker_id, "sink", self.degree, self.server)

    def enqueue(self, task: PrefillTask) -> None:
        raise AssertionError("a sink prefills nothing: route every task to a prefill worker")

    def join(self, live: Live) -> None:
        raise AssertionError("a sink prefills nothing")

    def lend(self, live: Live) -> int:
        return live.context

    def land(self, live: Live, tokens: int) -> None:
        self.kv_tokens += tokens + 1
        now = self._loop.now
        if live.left:
            self._loop.at(now + live.left * self._itl_s, self._finish, live)
        else:
            self._finish(live)

    def _finish(self, live: Live) -> None:
        if live.left:
            live.token_s = self._loop.now
            self.kv_tokens += live.left
            live.context += live.left
            gaps, counts, start = self.log.gaps, self.log.counts, len(self.log.gaps)
            if live.left > 1:
                gaps.append(self._itl_s)
                counts.append(live.left - 1)
            self.log.stays.append(Stay(live.row, self._itl_s, start, len(gaps)))
            live.left = 0
        if not self._hub.round_done(live):
            self.kv_tokens -= live.context
