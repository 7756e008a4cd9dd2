"""The coordinator binds sessions, routes their prefills, and gives lost work to other workers (AMPD §3, Figure 2).

It keeps only the policies. Sessions, queues and windows are in the store, so another coordinator goes on if this one
stops. It never waits for a worker.
"""

import heapq
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from engines.ampd.live.decisions import bind_line, route_line
from engines.ampd.live.store import Store, decode_hash, from_hash
from engines.cluster.sessions import Session
from engines.cluster.worker import WINDOW_S
from engines.data import ask
from engines.errors import RunError, UserError, require
from engines.policies.batching import checked_decision
from engines.policies.routing import Binder, Estimator, Router
from engines.policies.views import PrefillTask

SETTLE_S = 0.25
"""How long it is between two looks for overdue workers."""
Prompts = Callable[[Session, int], NDArray[np.int64]]
"""Returns the token ids that round i of a session adds."""


def random_prompts(vocab_size: int, seed: int) -> Prompts:
    """Return random prompts, whose ids depend only on (seed, session, round)."""

    def prompt(session: Session, round_index: int) -> NDArray[np.int64]:
        random = np.random.default_rng((seed, session.session_id, round_index))
        return random.integers(vocab_size, size=session.rounds[round_index].prefill_tokens, dtype=np.int64)

    return prompt


class Coordinator:
    def __init__(
        self,
        store: Store,
        *,
        binder: Binder,
        router: Router,
        estimator: Estimator | None,
        window_s: float = WINDOW_S,
        lease_s: float = 2.0,
    ) -> None:
        """For ``lease_s`` after this coordinator or the store was away, no worker counts as overdue."""
        self.store, self.lease_s = store, lease_s
        self._binder, self._router, self._estimator = binder, router, estimator
        self._num_outages = store.num_outages
        self._looked_s = store.clock.now()
        store.call("create", window_s)

    def open(self, session_id: int) -> int:
        """Begin a session, unless it is known already, and return its rank by arrival."""
        return int(self.store.call("open", session_id))

    def leave(self, session_id: int, order: int) -> bool:
        """Give up the round under way in the session of this rank, and all that was kept for it. Return whether there was one."""
        return bool(self.store.call("leave", session_id, order) == b"ok")

    def begin(
        self,
        session_id: int,
        round_index: int,
        ids: Sequence[int] | np.ndarray,
        *,
        decode_tokens: int,
        is_last: bool,
        ready_s: float | None = None,
    ) -> None:
        """Begin the session's next round, with its prompt or what the environment returned. Calling it again changes nothing."""
        require(len(ids) >= 1 and decode_tokens >= 1, f"session {session_id}: a round has a prompt and an answer")
        now = self.store.clock.now()
        payload = np.asarray(ids, dtype=np.int32).tobytes()
        ready_s = now if ready_s is None else ready_s
        answer = self.store.call("begin", session_id, round_index, payload, decode_tokens, is_last, ready_s, now=now)
        require(
            answer != b"busy",
            f"session {session_id}: round {round_index} begins before round {round_index - 1} has ended",
        )
        self.settle()

    def settle(self) -> int:
        """Take work from overdue workers, bind sessions without a home, and route waiting prefills. Return how many still wait."""
        now = self.store.clock.now()
        was_away = self.store.num_outages != self._num_outages or now - self._looked_s > self.lease_s / 2
        self._num_outages, self._looked_s = self.store.num_outages, now
        if was_away:  # heartbeats may have been lost meanwhile
            self.store.call("extend", self.lease_s)
        if not self.store.call("reap"):
            return 0
        homeless, tasks = self.store.call("waiting")
        num_homeless = sum(not self._bind(int(session)) for session in homeless)
        return num_homeless + sum(not self._route(from_hash(PrefillTask, decode_hash(fields))) for fields in tasks)

    def _bind(self, session_id: int) -> bool:
        while True:
            now = self.store.clock.now()
            workers = [member for member in self.store.members(now) if member.role == "decode"]
            if not workers:
                return False
            views = [member.view for member in workers]
            worker_id = ask(self._binder.bind, views, now)
            member = next((worker for worker in workers if worker.view.worker_id == worker_id), None)
            if member is None:
                raise RunError(
                    f"binder {type(self._binder).__name__} binds a session to {worker_id!r}, which is no decode worker"
                )
            line = bind_line(now, session_id, views, worker_id)
            if self.store.call("bind", session_id, worker_id, member.incarnation, line, now=now) != b"gone":
                return True

    def _route(self, task: PrefillTask) -> bool:
        while True:
            now = self.store.clock.now()
            home_id = self.store.retry(
                lambda: self.store.client.hget(self.store.key("session", task.session_id), "home")
            )
            members = self.store.members(now)
            homes = [member for member in members if home_id and member.view.worker_id == int(home_id)]
            if not homes:
                return False
            home = homes[0]
            candidates = [member for member in members if member.role == "prefill"]
            prefills = [member for member in candidates if not member.is_suspended] or candidates
            task.enqueued_s = now
            try:
                decision = ask(self._router.route, task, home.view, [member.view for member in prefills], now)
            except UserError:
                if prefills:
                    raise
                return False  # a router that only knows prefill workers waits for one
            members_of = {member.view.worker_id: member for member in prefills}
            decision = checked_decision(decision, self._router, home.view.worker_id, members_of)
            line = route_line(now, task, home.view, [member.view for member in prefills], decision)
            worker = home if decision.is_local else members_of[decision.worker_id]
            estimate_s = 0.0
            if self._estimator is not None:
                estimate_s = self._estimator.prefill_s(task.history, task.tokens, worker.view.degree)
            answer = self.store.call(
                "assign",
                task.task_id,
                decision.worker_id,
                worker.incarnation,
                decision.is_local,
                decision.reason,
                estimate_s,
                line,
                now=now,
            )
            if answer != b"gone":
                return True


OnTurn = Callable[[int], None]


def serve(
    coordinator: Coordinator,
    sessions: Sequence[Session],
    prompts: Prompts,
    *,
    until_s: float,
    on_turn: OnTurn | None = None,
) -> float:
    """Serve all sessions. Return when the run began, on the store's clock: the arrivals count from then.

    ``on_turn`` is called again and again with the number of ended sessions. Raises RunError after ``until_s``.
    """
    store = coordinator.store
    clock = store.clock
    start_s = clock.now()
    due = [(session.arrival_s, index, 0) for index, session in enumerate(sessions)]
    heapq.heapify(due)
    index_of = {session.session_id: index for index, session in enumerate(sessions)}
    next_events, num_ended, settled_s = store.follow("events"), 0, start_s
    while num_ended < len(sessions):
        now = clock.now() - start_s
        if now > until_s:
            raise RunError(
                f"{len(sessions) - num_ended} of {len(sessions)} sessions have not ended after {until_s:g} s"
            )
        while due and due[0][0] <= now:
            ready_s, index, number = heapq.heappop(due)
            session = sessions[index]
            if number == 0:
                coordinator.open(session.session_id)
            coordinator.begin(
                session.session_id,
                number,
                prompts(session, number),
                decode_tokens=session.rounds[number].decode_tokens,
                is_last=number == len(session.rounds) - 1,
                ready_s=start_s + ready_s,
            )
        if clock.now() - settled_s > SETTLE_S:
            coordinator.settle()
            settled_s = clock.now()
        wait_s = SETTLE_S if not due else min(SETTLE_S, max(0.0, due[0][0] - (clock.now() - start_s)))
        for event in next_events(wait_s):
            session_id = int(event["session"])
            if session_id not in index_of:
                continue  # a session of another client
            if event["what"] == "end":
                num_ended += 1
                continue
            index, ended_round = index_of[session_id], int(event["round"])
            ended_s = float(event["at"]) - start_s
            heapq.heappush(due, (ended_s + sessions[index].rounds[ended_round].delay_s, index, ended_round + 1))
        if on_turn is not None:
            on_turn(num_ended)
    return start_s
