"""How LAPS batches: short requests wait for others to join them, and every step has only one class (LAPS §3.1 and §3.2).

Adaptive wait-depth batching decides how long short requests wait, and for how many others (Algorithm 1). As printed (``printed``),
one round without a request ends it: the round dispatches the empty batch, d = 0 < D sets D = 0, and no later round can collect
anything. ``guarded`` keeps D >= 1 and starts the timer at the first request. It still only lowers D, until every dispatch is a single
request. ``repaired`` recomputes the window at every decision epoch, as in §3.2, and raises D again after two full rounds.

Temporal disaggregation has one instance and two queues. While short requests wait for others, a long chunk may run: the instance
never idles with a long request queued, unless ``while_waiting`` is "idle". Short requests go first, but a long one that has waited
``max_long_wait_s`` gets every other step. From then on at most one short batch runs between two long steps. So the long request
starts after at most as many short batches as there are long steps ahead of it.

Graphs of prefill steps: we capture the grid of LAPS §3.1 or a ladder of packed sizes, as far as a memory budget allows. Behind any
batching policy, a last stage chooses the captured graph that a step replays, if any.
"""

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import attrgetter
from typing import Annotated, ClassVar, Literal, NamedTuple, Protocol, get_args

from engines.errors import UserError, require
from engines.knobs import Checked, Fixed, Only, Range, Seconds, Tokens
from engines.laps.latency import StepModel
from engines.policies.views import (
    FALLBACK,
    IDLE,
    Batching,
    Bucket,
    Chunk,
    NextStep,
    OpenQueue,
    PrefillTask,
    Rule,
    Rung,
    Share,
    Situation,
    StepMode,
    StepTimes,
)

Graphs = Literal["none", "nearest", "cheapest", "ladder"]
"""nearest: the smallest bucket that holds the step. cheapest: the same, if predicted faster. ladder: a packed size, if predicted faster."""
LENGTHS = (8, 16, 32, 64, 128, 256)
BATCHES = (1, 2, 4, 8, 16, 32, 64)
GRID: tuple[Bucket, ...] = tuple(Bucket(length, batch) for length in LENGTHS for batch in BATCHES)
"""All 42 shapes."""

LADDER: tuple[Rung, ...] = tuple(
    Rung(tokens) for tokens in (*range(16, 257, 16), *range(320, 1025, 64), *range(1152, 2049, 128))
)
"""Packed sizes, finer where a padded token costs a larger share."""

GRAPH_MB = {"Qwen2.5-7B": 228, "Qwen2.5-14B": 240, "Qwen2.5-32B": 277}
"""Memory of one captured prefill graph as the paper prints it (LAPS §4.2)."""


def graph_bytes(model: str, num_layers: int) -> int:
    """Memory of one graph: the paper's number, else a line through its 7B and 32B."""
    megabytes = GRAPH_MB.get(model)
    return round((190 + 1.36 * num_layers) * 1e6) if megabytes is None else megabytes * 10**6


def shapes_of(
    graphs: Graphs, budget_bytes: int | None = None, bytes_per_graph: int = 240 * 10**6
) -> tuple[Bucket | Rung, ...]:
    """Return the shapes to capture: as many as a budget of graph memory holds (None: all). The fewest tokens go first, because only
    small steps are bound by launches.

    The deeper of two equal sizes goes first, because it also serves smaller batches of its length. All rungs share one memory pool,
    in which the largest rung bounds the memory of each.
    """
    require(bytes_per_graph > 0, f"bytes_per_graph={bytes_per_graph} must be above 0")
    require(budget_bytes is None or budget_bytes >= 0, f"budget_bytes={budget_bytes} must not be negative")
    if graphs == "none":
        return ()
    shapes = LADDER if graphs == "ladder" else sorted(GRID, key=lambda shape: (shape.tokens, -shape.batch))
    return tuple(shapes if budget_bytes is None else shapes[: budget_bytes // bytes_per_graph])


class Nearest:
    """Chooses the smallest captured (L, B) that covers the step, at any cost (LAPS §3.1 as printed). With ``times``, only if they
    predict it to be faster than the standard kernels."""

    def __init__(self, captured: Iterable[Bucket], times: StepTimes | None = None) -> None:
        shapes, self.times = tuple(captured), times
        self.lengths = sorted({shape.length for shape in shapes})
        self.batches = sorted({shape.batch for shape in shapes})
        # cover[i][j]: fewest tokens among the shapes at least as long as lengths[i] and as deep as batches[j].
        self.cover = [
            [
                min(
                    (shape for shape in shapes if shape.length >= length and shape.batch >= batch),
                    key=lambda shape: (shape.tokens, shape.length),
                    default=None,
                )
                for batch in self.batches
            ]
            for length in self.lengths
        ]

    def rule(self) -> Rule:
        return Rule("nearest")

    def choose(self, chunks: Sequence[Chunk]) -> StepMode:
        row = bisect_left(self.lengths, max(chunk.tokens for chunk in chunks))
        column = bisect_left(self.batches, len(chunks))
        if row == len(self.lengths) or column == len(self.batches):
            return FALLBACK
        bucket, times = self.cover[row][column], self.times
        if bucket is None:
            return FALLBACK
        return bucket if times is None else _faster(bucket, times, chunks)


class Ladder:
    """Chooses the smallest rung that holds the step, if it is predicted to be faster than the standard kernels."""

    rungs: list[Rung]
    times: StepTimes | None

    def __init__(self, captured: Iterable[Rung], times: StepTimes) -> None:
        self.rungs, self.times = sorted(captured), times

    def rule(self) -> Rule:
        return Rule("ladder", limits=(math.inf,))

    def choose(self, chunks: Sequence[Chunk]) -> StepMode:
        index = bisect_left(self.rungs, Rung(sum(chunk.tokens for chunk in chunks)))
        if index == len(self.rungs) or self.times is None:
            return FALLBACK
        return _faster(self.rungs[index], self.times, chunks)


def _faster(graph: Bucket | Rung, times: StepTimes, chunks: Sequence[Chunk]) -> StepMode:
    """Return the graph if it is predicted to be faster than the standard kernels, else ``FALLBACK``."""
    return graph if times.step_s(chunks, 0, 0, graph) < times.step_s(chunks, 0, 0, FALLBACK) else FALLBACK


class GraphChoice(Protocol):
    def choose(self, chunks: Sequence[Chunk]) -> StepMode: ...


def graph_choice(graphs: Graphs, times: StepTimes, captured: tuple[Bucket | Rung, ...]) -> GraphChoice | None:
    if graphs == "none":
        return None
    buckets = [shape for shape in captured if isinstance(shape, Bucket)]
    rungs = [shape for shape in captured if isinstance(shape, Rung)]
    if graphs == "ladder":
        return Ladder(rungs, times)
    return Nearest(buckets, None if graphs == "nearest" else times)


@dataclass(frozen=True, slots=True)
class WithGraphs:
    """A batching policy whose steps replay the graphs that ``choice`` chooses; without ``choice``, none."""

    passes_on: ClassVar = True

    batching: Batching
    choice: GraphChoice | None

    def next_step(self, at: Situation, now: float) -> NextStep:
        plan = self.batching.next_step(at, now)
        if self.choice is None or not isinstance(plan, NextStep):  # the caller refuses it
            return plan
        if not plan.shares or (at.decoding and plan.decodes):
            return plan
        require(plan.mode is None, f"mode={plan.mode!r}: the policy has already chosen one")
        chunks = [Chunk(task.history + task.computed, tokens) for task, tokens in plan.shares]
        return NextStep(plan.shares, plan.decodes, plan.wake_s, self.choice.choose(chunks))


_age = attrgetter("ready_s", "task_id")
Joins = Literal["all", "shorter", "same"]
"""Which buckets join the bucket of the oldest short request."""
_RATE_WEIGHT = 0.1
"""Weight of the newest gap between arrivals in their moving average."""


class ClassQueue(OpenQueue):
    """Q_s and Q_l: requests under ``boundary`` tokens are short, and kept by their bucket of length."""

    def __init__(self, boundary: int) -> None:
        super().__init__()
        require(boundary >= 1, f"boundary={boundary} must be at least 1 token")
        self.boundary = boundary
        self.longs: dict[int, PrefillTask] = {}
        self.buckets: list[dict[int, PrefillTask]] = [{} for _ in range(len(LENGTHS) + 1)]
        """Short requests by the bucket length that covers them; the last holds requests that no bucket covers."""
        self.num_short = 0
        self.short_tokens = 0
        self.short_rate = 0.0
        """r_s: short arrivals per second, one over the moving average of their gaps; 0 before the second arrival."""
        self._last_short_s: float | None = None
        self._gap_s: float | None = None

    def __len__(self) -> int:
        return self.num_short + len(self.longs)

    def __iter__(self) -> Iterator[PrefillTask]:
        """In order of arrival."""
        return iter(sorted(chain(self.longs.values(), *(bucket.values() for bucket in self.buckets)), key=_age))

    def push(self, task: PrefillTask) -> None:
        if task.tokens < self.boundary:
            self.buckets[bisect_left(LENGTHS, task.tokens)][task.task_id] = task
            self.num_short += 1
            self.short_tokens += task.tokens
            if self._last_short_s is not None:
                gap_s = max(0.0, task.ready_s - self._last_short_s)
                old = gap_s if self._gap_s is None else self._gap_s
                self._gap_s = old + _RATE_WEIGHT * (gap_s - old)
                self.short_rate = 1 / max(self._gap_s, 1e-9)
            self._last_short_s = task.ready_s
        else:
            self.longs[task.task_id] = task
        self._count(task)

    def peek(self, now: float) -> PrefillTask:
        oldest = [next(iter(group.values())) for group in (self.longs, *self.buckets) if group]
        return min(oldest, key=_age)

    def pull(self, task: PrefillTask) -> PrefillTask:
        if task.tokens < self.boundary:
            del self.buckets[bisect_left(LENGTHS, task.tokens)][task.task_id]
            self.num_short -= 1
            self.short_tokens -= task.tokens
        else:
            del self.longs[task.task_id]
        return self._taken(task)

    def oldest_short(self) -> PrefillTask | None:
        return min((next(iter(bucket.values())) for bucket in self.buckets if bucket), key=_age, default=None)

    def shorts_by_bucket(self, joins: Joins = "all") -> Iterator[PrefillTask]:
        """Short requests: the oldest one's bucket, then shorter buckets (no more padding), then longer ones; oldest first in each."""
        oldest = self.oldest_short()
        if oldest is None:
            return iter(())
        first_bucket = bisect_left(LENGTHS, oldest.tokens)
        order = [*range(first_bucket, -1 if joins != "same" else first_bucket - 1, -1)]
        if joins == "all":
            order += range(first_bucket + 1, len(self.buckets))
        return chain.from_iterable(self.buckets[index].values() for index in order)


WaitRule = Literal["off", "printed", "guarded", "repaired"]
_WAITING = Only(wait=("printed", "guarded", "repaired"))
_EPSILON = 1e-9
"""The least rate of arrivals in the formula of a window."""
_FULL_ROUNDS = 2
"""After so many rounds in a row that reached D, D rises."""


@dataclass(frozen=True, kw_only=True)
class WaitConfig(Checked):
    """The paper prints none of these times."""

    wait: WaitRule = "repaired"
    """How long short requests wait for others. off: not at all. printed: by Algorithm 1. guarded: the same, but an empty round does not
    end it for ever. repaired: the window is recomputed, and the depth can rise again."""
    min_window_s: Annotated[Seconds, _WAITING] = 0.0
    """Least seconds of a window."""
    max_window_s: Annotated[Seconds, _WAITING] = 5e-3
    """Most seconds of a window."""
    slack_s: Annotated[Seconds, _WAITING] = 50e-3
    """sigma: a request whose deadline is this near is dispatched at once."""
    margin_s: Annotated[Seconds, _WAITING] = 10e-3
    """delta, the safety margin of W_SLA."""
    max_wait_s: Annotated[Seconds, _WAITING] = 0.2
    """T_max: the longest wait of the oldest short request."""
    slo_s: Annotated[float, Range(above=0, most=1e6), Fixed] | None = 0.4
    """TTFT objective; None is the deadline-free mode, which waits for ``token_max`` tokens."""
    token_max: Annotated[Tokens, _WAITING] = 8192
    """M_s: tokens that a round waits for if there is no deadline."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            self.min_window_s <= self.max_window_s,
            f"min_window_s={self.min_window_s} must not be above max_window_s={self.max_window_s}",
        )

    @property
    def deadline_s(self) -> float:
        """A request's deadline, counted from its arrival."""
        return math.inf if self.slo_s is None else self.slo_s


def window_s(config: WaitConfig, *, slack_s: float, target: int, depth: int, rate: float) -> float:
    """W = clip(min(W_SLA, W_GR), [W_min, W_max]) (LAPS §3.2 a)."""
    # Both are at least 0, which W_min ensures.
    # W_SLA = max(0, min_i (DDL_i - t - S) - delta)
    sla_s = slack_s - config.margin_s
    # W_GR = max(0, D - depth(B)) / max(r_s, epsilon), to fill the batch
    graph_s = (target - depth) / max(rate, _EPSILON)
    return min(max(min(sla_s, graph_s), config.min_window_s), config.max_window_s)


class Wait(NamedTuple):
    """How many short requests to dispatch now, or when to look again."""

    depth: int
    wake_s: float | None = None


class AdaptiveWait:
    """State of one instance: the window W, the depth D and the round in progress."""

    def __init__(self, config: WaitConfig, depths: Sequence[int], service_s: Callable[[int, int], float]) -> None:
        """``depths`` are the batch sizes of the captured graphs; ``service_s(requests, tokens)`` is S, the step's predicted time."""
        self.config, self.depths = config, sorted(set(depths))
        self.target = self.depths[-1]
        """D."""
        self.window_s = config.max_window_s
        """W. In line 1 a minimum over no request sets no limit."""
        self.service_s = service_s
        self._round_s: float | None = None
        self._full_rounds = 0
        self._collected = 0
        """Requests in B of ``printed``."""

    def next_batch(self, queue: ClassQueue, now: float) -> Wait:
        wait_rule = self.config.wait
        if wait_rule == "off":
            return Wait(min(queue.num_short, self.depths[-1]))
        if wait_rule == "printed":
            return self._wait_as_printed(queue, now)
        if not queue.num_short:
            self._round_s = None
            return Wait(0)
        if self._round_s is None:
            self._round_s = now
        depth = min(queue.num_short, self.target)
        wake_s = self._wake_s(queue, depth, now)
        is_full = self.config.slo_s is None and queue.short_tokens >= self.config.token_max
        if now < wake_s and depth < self.target and not is_full:
            return Wait(0, wake_s)
        self._close(depth, now - self._round_s)
        return Wait(depth)

    def _wake_s(self, queue: ClassQueue, depth: int, now: float) -> float:
        """When the round in progress ends at the latest: W elapsed, a deadline near, or T_max waited."""
        config = self.config
        oldest = queue.oldest_short()
        assert oldest is not None
        assert self._round_s is not None
        service_s = self.service_s(depth, queue.short_tokens)
        latest_start_s = oldest.ready_s + config.deadline_s - service_s
        if config.wait == "repaired":
            if config.slo_s is None:
                self.window_s = config.max_window_s
            else:
                self.window_s = window_s(
                    config, slack_s=latest_start_s - now, target=self.target, depth=depth, rate=queue.short_rate
                )
        return min(self._round_s + self.window_s, latest_start_s - config.slack_s, oldest.ready_s + config.max_wait_s)

    def _close(self, depth: int, took_s: float) -> None:
        """End a round: lines 10-13, and the repair."""
        self._round_s = None
        config = self.config
        if depth >= self.target:
            if config.wait != "repaired":
                self.window_s = min(max(took_s, config.min_window_s), config.max_window_s)
                return
            self._full_rounds += 1
            if self._full_rounds >= _FULL_ROUNDS:
                self._full_rounds = 0
                index = bisect_right(self.depths, self.target)
                self.target = self.depths[min(index, len(self.depths) - 1)]
            return
        self._full_rounds = 0
        self.target = depth if config.wait == "printed" else max(1, depth)

    def _wait_as_printed(self, queue: ClassQueue, now: float) -> Wait:
        """The loop to the letter: the timer starts with the round, and a round dispatches what it collected, even if nothing."""
        if not self.target:
            return Wait(0)
        if self._round_s is None:
            self._round_s, self._collected = now, 0
        depth = min(queue.num_short, self.target)
        wake_s = self._round_s + self.window_s
        oldest = queue.oldest_short()
        if oldest is not None:
            latest_start_s = oldest.ready_s + self.config.deadline_s - self.service_s(depth, queue.short_tokens)
            urgent_s = latest_start_s - self.config.slack_s
            if now >= urgent_s:
                # Line 3 looks at the next request before line 5 adds it, so only requests collected before go.
                return self._dispatch(self._collected, now)
            wake_s = min(wake_s, urgent_s)
        self._collected = depth
        if now < wake_s and depth < self.target:
            return Wait(0, wake_s)
        return self._dispatch(depth, now)

    def _dispatch(self, depth: int, now: float) -> Wait:
        assert self._round_s is not None
        self._close(depth, now - self._round_s)
        return Wait(depth) if depth else Wait(0, now)


# ---- which class a step has ----------------------------------------------------------------------------------------


LongDispatch = Literal["single", "pack"]
ClassRule = Literal["short-first", "urgency"]


@dataclass(frozen=True, kw_only=True)
class TemporalConfig(Checked):
    chunk_tokens: Tokens = 2048
    """C_l: most tokens of long prompts in a step."""
    long_dispatch: LongDispatch = "pack"
    """single: a step advances one request by C_l tokens, as printed. pack: several requests share a step's C_l tokens."""
    class_rule: ClassRule = "short-first"
    """short-first: short requests. urgency: the class whose deadline is nearer than sigma, else that with the larger backlog in steps."""
    max_long_wait_s: Seconds = 1.0
    """Seconds after which a long request gets every other step."""
    short_tokens: Tokens = 8192
    """M: most tokens of a short batch."""
    joins: Joins = "all"
    """Which short prompts join the oldest one's batch. same: only those of its bucket of length, as printed (§3.1). shorter: also
    shorter ones, which add no padding. all: every one, whatever a graph then pads."""
    while_waiting: Literal["long", "idle"] = "long"
    """While short prompts wait for others, an instance runs a step of long ones (long), or nothing (idle)."""


@dataclass(slots=True)
class TemporalDisaggregation:
    """Batches both classes on one instance. In a pool, whose queue holds only one class, it drains the other after a migration."""

    wait: AdaptiveWait
    config: TemporalConfig
    _was_long: bool = False
    """The class of the step before."""

    def rule(self) -> Rule:
        config, wait = self.config, self.wait
        of_wait = wait.config
        own_limits = (
            *(config.chunk_tokens, config.long_dispatch == "pack", config.class_rule == "urgency"),
            *(config.max_long_wait_s, config.short_tokens, get_args(Joins).index(config.joins)),
            config.while_waiting == "idle",
        )
        wait_limits = (
            *(get_args(WaitRule).index(of_wait.wait), of_wait.min_window_s, of_wait.max_window_s, of_wait.slack_s),
            *(of_wait.margin_s, of_wait.max_wait_s, of_wait.deadline_s, of_wait.token_max, of_wait.slo_s is not None),
        )
        model = getattr(wait.service_s, "__self__", None)
        terms = model.terms if isinstance(model, StepModel) and wait.service_s == model.batch_s else None
        return Rule("temporal", limits=(*own_limits, *wait_limits, *wait.depths), terms=terms)

    def next_step(self, at: Situation, now: float) -> NextStep:
        queue = at.queue
        if not isinstance(queue, ClassQueue):
            raise UserError(
                f"queue={type(queue).__name__}: temporal disaggregation keeps two queues, give a ClassQueue"
            )
        batch = self.wait.next_batch(queue, now) if queue.num_short and not self._long_is_due(at, queue, now) else None
        if batch is None and not queue.num_short and self.wait.config.wait == "printed":
            batch = self.wait.next_batch(queue, now)
        shares = self._short_shares(at, queue, batch.depth) if batch is not None and batch.depth else []
        if shares:
            self._was_long = False
            return NextStep(shares)
        is_held = batch is not None and batch.wake_s is not None and self.config.while_waiting == "idle"
        shares = [] if is_held else self._long_shares(at, queue)
        if shares:
            self._was_long = True
            return NextStep(shares)
        return IDLE if batch is None or batch.wake_s is None else NextStep(wake_s=batch.wake_s)

    # ---- which class ---------------------------------------------------------------------------------

    def _long_is_due(self, at: Situation, queue: ClassQueue, now: float) -> bool:
        oldest = min(at.begun, key=lambda task: task.ready_s) if at.begun else next(iter(queue.longs.values()), None)
        if oldest is None:
            return False
        if now - oldest.ready_s >= self.config.max_long_wait_s:
            return not self._was_long
        return self.config.class_rule == "urgency" and self._long_is_more_urgent(oldest, at, queue, now)

    def _long_is_more_urgent(self, long: PrefillTask, at: Situation, queue: ClassQueue, now: float) -> bool:
        short = queue.oldest_short()
        assert short is not None
        slo_s, sigma_s = self.wait.config.deadline_s, self.wait.config.slack_s
        # Both classes have the same objective: the older request has the nearer deadline.
        if min(long.ready_s, short.ready_s) + slo_s - now <= sigma_s and slo_s < math.inf:
            return long.ready_s < short.ready_s
        long_tokens = queue.backlog_tokens - queue.short_tokens + sum(task.left for task in at.begun)
        return long_tokens / self.config.chunk_tokens > queue.short_tokens / self.config.short_tokens

    # ---- which requests ---------------------------------------------------------------------------------

    def _short_shares(self, at: Situation, queue: ClassQueue, depth: int) -> list[Share]:
        """Take short requests bucket by bucket, within the token budget (Algorithm 1, line 5)."""
        budget, room = self.config.short_tokens, at.room
        tasks: list[PrefillTask] = []
        for task in queue.shorts_by_bucket(self.config.joins):
            need = at.need_of(task)
            if len(tasks) == depth or need > room or (tasks and task.tokens > budget):
                break
            tasks.append(task)
            budget -= task.tokens
            room -= need
        return [Share(queue.pull(task), task.tokens) for task in tasks]

    def _long_shares(self, at: Situation, queue: ClassQueue) -> list[Share]:
        """Take begun requests, then the oldest, within C_l tokens and the room for K/V."""
        budget, room = self.config.chunk_tokens, at.room
        shares: list[Share] = []
        num_begun = len(at.begun)
        for index, task in enumerate(chain(at.begun, queue.longs.values())):
            if index >= num_begun:
                need = at.need_of(task)
                if need > room:
                    break
                room -= need
            tokens = min(task.left, budget)
            shares.append(Share(task, tokens))
            budget -= tokens
            if not budget or self.config.long_dispatch == "single":
                break
        for task, _ in shares[num_begun:]:
            queue.pull(task)
        return shares
