"""AMPD's policies while it serves: where a prefill runs (§4.1, Algorithm 1, eqs. 1 and 2), and which of the first tasks of a queue
runs next (§4.2, Algorithm 2, eqs. 3 and 4).

By default we route as printed. The printed algorithm visits prefill workers in random order, and takes the first whose
mean TTFT of the last seconds has slack. That is random dispatch by a signal that lags. ``route_order`` and ``window`` are
our repairs, off by default.
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice, permutations
from typing import Annotated, Literal

from engines.ampd.performance import PerformanceModel
from engines.errors import require
from engines.knobs import Checked, Range
from engines.policies.routing import Decision
from engines.policies.views import DecodeView, PrefillQueue, PrefillTask, PrefillView, QueueView, Rule, Slo

RouteOrder = Literal["random", "load"]
WindowSignal = Literal["done", "age", "backlog"]
_Slack = Annotated[float, Range(0, 1e6)]


@dataclass(frozen=True, kw_only=True)
class RoutingConfig(Checked):
    alpha: _Slack = 0.9
    """A prefill worker gets the task if its windowed mean TTFT is at most this share of the TTFT objective (Algorithm 1, line 2)."""
    beta: _Slack = 0.85
    """The decode worker prefills itself if its windowed mean ITL is at most this share of the ITL objective (Algorithm 1, line 4)."""
    route_order: RouteOrder = "random"
    """The order in which prefill workers are visited. random: as printed. load: the shortest backlog first."""
    window: WindowSignal = "done"
    """The measure of load. done: windowed means of finished work, as printed. age: at least the age of the oldest queued prefill.
    backlog: at least the backlog in front of the task. Both also count the age of the next token."""


class AdaptiveRouter:
    """Algorithm 1."""

    def __init__(
        self, model: PerformanceModel, slo: Slo, config: RoutingConfig | None = None, *, seed: int = 0
    ) -> None:
        self.model, self.slo, self.config = model, slo, config or RoutingConfig()
        self._rng = random.Random(seed)

    def route(self, task: PrefillTask, home: DecodeView, prefills: Sequence[PrefillView], now: float) -> Decision:
        slo = self.slo
        for worker in self._visits(prefills, now):  # line 1
            if self._ttft_s(worker, now) <= self.config.alpha * slo.ttft_s:  # line 2
                return Decision(worker.worker_id, False, "ttft-slack")  # line 3
        if self._itl_s(home, now) <= self.config.beta * slo.itl_s:  # line 4
            return Decision(home.worker_id, True, "itl-slack")  # line 5
        best_s = local_cost_s(self.model, task, home)  # line 6
        best = Decision(home.worker_id, True, "cost")
        for worker in prefills:  # line 7
            cost_s = remote_cost_s(self.model, task, home, worker)  # line 8
            if cost_s < best_s:
                best_s, best = cost_s, Decision(worker.worker_id, False, "cost")
        return best  # line 9

    def rule(self) -> Rule:
        config, slo = self.config, self.slo
        limits = config.alpha * slo.ttft_s, config.beta * slo.itl_s
        estimates = self.model.prefill_s, partial(_remote_prefill_s, self.model)
        return Rule("adaptive", config.route_order, config.window, limits, self._rng.random, estimates)

    def _visits(self, prefills: Sequence[PrefillView], now: float) -> Iterator[PrefillView]:
        """Yield workers in the order of visits. They are drawn one by one, because most tasks go to the first."""
        if self.config.route_order == "load":
            yield from sorted(prefills, key=lambda worker: (ahead_s(worker, now), worker.worker_id))
            return
        unvisited = list(prefills)
        while unvisited:
            pick = int(self._rng.random() * len(unvisited))
            unvisited[pick], unvisited[-1] = unvisited[-1], unvisited[pick]
            yield unvisited.pop()

    def _ttft_s(self, worker: PrefillView, now: float) -> float:
        windowed = worker.windowed_ttft_s(now)
        if self.config.window == "age":
            return max(windowed, worker.oldest_wait_s(now))
        if self.config.window == "backlog":
            return max(windowed, ahead_s(worker, now))
        return windowed

    def _itl_s(self, home: DecodeView, now: float) -> float:
        windowed = home.windowed_itl_s(now)
        return windowed if self.config.window == "done" else max(windowed, home.token_age_s(now))


def local_cost_s(model: PerformanceModel, task: PrefillTask, home: DecodeView) -> float:
    """t_local, eq. (1): the prefill and the queue before it."""
    return model.prefill_s(task.history, task.tokens, home.degree) + home.backlog_s


def remote_cost_s(model: PerformanceModel, task: PrefillTask, home: DecodeView, worker: PrefillView) -> float:
    """t_remote, eq. (2): t_pre + t_kv there and back + t_queue."""
    return _remote_prefill_s(model, task.history, task.tokens, home.degree, worker.degree) + worker.backlog_s


def _remote_prefill_s(model: PerformanceModel, history: int, tokens: int, home_degree: int, degree: int) -> float:
    kv_s = model.transfer_s(history, home_degree, degree) + model.transfer_s(tokens, degree, home_degree)
    return model.prefill_s(history, tokens, degree) + kv_s


def ahead_s(worker: QueueView, now: float) -> float:
    """Estimated time until a new task could start: the rest of the running prefill, and the queued ones."""
    return worker.busy_s(now) + worker.backlog_s


MAX_LOOKAHEAD = 8
"""8! = 40,320 orderings; the paper uses 2 to 5."""


def best_ordering(window: Sequence[PrefillTask], now: float, ttft_s: float, w: int) -> tuple[int, ...]:
    """Return pi*: positions of ``window`` in the order to run, lines 2-6.

    We skip an ordering that postpones a task which was postponed ``w`` times already (line 4). A task is postponed if it
    stands later than in the queue. Ties keep the earlier ordering, so the queue's own unless another gains.
    ``now`` is when the first task can start.
    """
    identity = tuple(range(len(window)))
    if len(window) < 2:
        return identity
    best, best_count = identity, _num_satisfied(window, identity, now, ttft_s)
    if best_count == len(window):
        return identity
    for ordering in islice(permutations(identity), 1, None):
        if any(position > task and window[task].postponed >= w for position, task in enumerate(ordering)):
            continue
        count = _num_satisfied(window, ordering, now, ttft_s)
        if count > best_count:
            best, best_count = ordering, count
    return best


def _num_satisfied(window: Sequence[PrefillTask], ordering: Sequence[int], now: float, ttft_s: float) -> int:
    """Return S_pi, how many tasks meet the TTFT objective (eq. 4), by completion times C (eq. 3)."""
    completion_s = 0.0
    count = 0
    for position in ordering:
        task = window[position]
        completion_s += task.estimate_s
        count += (now - task.enqueued_s) + completion_s <= ttft_s
    return count


class ReorderingQueue(PrefillQueue):
    def __init__(self, *, ttft_s: float, w: int = 3) -> None:
        super().__init__()
        require(1 <= w <= MAX_LOOKAHEAD, f"w={w} must be between 1 and {MAX_LOOKAHEAD}: all orderings of w are tried")
        self.ttft_s, self.w = ttft_s, w
        self._peeked: tuple[float, list[PrefillTask], tuple[int, ...]] | None = None

    def rule(self) -> Rule:
        return Rule("queue", limits=(self.w, self.ttft_s, False))

    def peek(self, now: float) -> PrefillTask:
        """The first task of the window's best ordering. We do not search again for the same window and ``now``."""
        window = list(islice(self._tasks, self.w))  # line 1
        if self._peeked is None or self._peeked[:2] != (now, window):
            self._peeked = now, window, best_ordering(window, now, self.ttft_s, self.w)
        return window[self._peeked[2][0]]

    def take(self, now: float) -> PrefillTask:
        """Algorithm 2: the head of the queue takes the chosen order and its first task leaves."""
        self.peek(now)
        assert self._peeked is not None
        (_, window, ordering), self._peeked = self._peeked, None
        for position, task in enumerate(ordering):
            window[task].postponed += position > task  # line 7
        for position, task in enumerate(ordering):  # line 8
            self._tasks[position] = window[task]
        return super().take(now)
