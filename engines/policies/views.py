"""The plain data that policies see and answer with. They never see the simulator (AMPD §3, §6).

First comes a waiting prefill, with its objectives and its queue. Then comes a step of a worker: what a batching policy sees before it,
and the plan it returns. Last come the workers as a router and a binder see them. Simulated workers satisfy ``PrefillView`` and
``DecodeView``. A live coordinator fills ``WorkerSnapshot`` from shared memory to ask the very same policies.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Literal, NamedTuple, Protocol

from engines.knobs import Checked, Range

TaskKind = Literal["initial", "incremental", "recompute"]
"""recompute: the K/V of a decoding sequence was dropped for lack of memory and is built again."""


@dataclass(slots=True)
class PrefillTask:
    task_id: int
    session_id: int
    order: int
    """Rank of the session by arrival; the lower is the older."""
    round_index: int
    kind: TaskKind
    history: int
    """l_hist: tokens whose K/V the decode worker holds, as far as the router knows."""
    tokens: int
    """l_incr: tokens to prefill."""
    ready_s: float
    """When the round could have started; TTFT counts from here."""
    enqueued_s: float = 0.0
    """T_enq of AMPD eq. (4)."""
    estimate_s: float = 0.0
    """t_pre of AMPD eqs. (1)-(3): the performance model's time on the worker it is queued at."""
    postponed: int = 0
    """Times it was overtaken by reordering (AMPD §4.2)."""
    computed: int = 0
    """Tokens prefilled in chunks so far."""

    @property
    def left(self) -> int:
        return self.tokens - self.computed


NO_OBJECTIVE_S = 1e6
"""The most seconds that an objective may allow. Policies see this value if there is no objective."""


@dataclass(frozen=True, kw_only=True)
class Slo(Checked):
    """The objectives of a service."""

    ttft_s: Annotated[float, Range(above=0)]
    itl_s: Annotated[float, Range(above=0)]


class Rule(NamedTuple):
    """One of our policies in words and numbers, by which compiled runs decide as it does."""

    kind: str
    choice: str = "shortest"
    signal: str = "done"
    limits: tuple[float, ...] = ()
    draw: Callable[[], float] = float
    """Draws a random number from 0 to 1 with the policy's own generator."""
    estimates: tuple[Callable[..., float], ...] = ()
    """Seconds of a local prefill, by its history, tokens and degree; and of a remote one, also by its decode worker's degree."""
    terms: tuple[float, ...] | None = ()
    """Constants of the step model by which it predicts; None if the model is not ours."""


def rule_of(policy: object) -> Rule | None:
    """Return a policy's rule; None if its own class defines no ``rule``, because a subclass of ours may decide otherwise."""
    return policy.rule() if "rule" in vars(type(policy)) else None  # type: ignore[attr-defined]


@dataclass(slots=True, eq=False)
class PrefillQueue:
    """First come, first served, except that a sequence that lost its K/V goes first (as in vLLM). A subclass is a policy: it decides how
    the queue is ordered, and whether a task may leave out of turn."""

    backlog_s: float = 0.0
    """Sum of the estimates of the waiting tasks: the queuing time of AMPD eqs. (1) and (2)."""
    backlog_tokens: int = 0
    _tasks: deque[PrefillTask] = field(default_factory=deque)

    def __len__(self) -> int:
        return len(self._tasks)

    def __iter__(self) -> Iterator[PrefillTask]:
        return iter(self._tasks)

    def push(self, task: PrefillTask) -> None:
        if task.kind == "recompute":
            self._tasks.appendleft(task)
        else:
            self._tasks.append(task)
        self._count(task)

    def peek(self, now: float) -> PrefillTask:
        """Return the task that ``take`` would return; changes nothing."""
        return self._tasks[0]

    def rule(self) -> Rule:
        return Rule("queue", limits=(0, 0.0, False))

    def take(self, now: float) -> PrefillTask:
        """Remove the next task. ``now`` is when it can start."""
        return self._taken(self._tasks.popleft())

    def _count(self, task: PrefillTask) -> None:
        self.backlog_s += task.estimate_s
        self.backlog_tokens += task.tokens

    def _taken(self, task: PrefillTask) -> PrefillTask:
        self.backlog_tokens -= task.tokens
        # An empty queue drops the rounding errors of the sums before.
        self.backlog_s = self.backlog_s - task.estimate_s if len(self) else 0.0
        return task


@dataclass(slots=True, eq=False)
class OpenQueue(PrefillQueue):
    """First come, first served; any task can be taken out of turn."""

    _waiting: dict[int, PrefillTask] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[PrefillTask]:
        return iter(self._waiting.values())

    def push(self, task: PrefillTask) -> None:
        self._waiting[task.task_id] = task
        self._count(task)

    def peek(self, now: float) -> PrefillTask:
        return next(iter(self._waiting.values()))

    def take(self, now: float) -> PrefillTask:
        return self.pull(self.peek(now))

    def pull(self, task: PrefillTask) -> PrefillTask:
        """Remove this task, whatever its place."""
        del self._waiting[task.task_id]
        return self._taken(task)


class Chunk(NamedTuple):
    """``tokens`` of one prompt prefilled over ``history`` tokens whose K/V exist."""

    history: int
    tokens: int


class Bucket(NamedTuple):
    """Replay the graph captured for ``batch`` rows of ``length`` tokens each; the step's chunks are padded to it.

    LAPS §3.1, (L, B). Chunk i runs in row i over its own history; rows and tokens beyond the chunks are padding.
    """

    length: int
    batch: int

    @property
    def tokens(self) -> int:
        return self.length * self.batch


class Rung(NamedTuple):
    """Replay the graph captured for ``tokens`` packed tokens, of however many chunks; the rest is padding."""

    tokens: int


class Fallback(NamedTuple):
    """Use the standard kernels after looking for a graph: the same step as None, plus the time of the look-up."""


StepMode = Bucket | Rung | Fallback | None
FALLBACK = Fallback()


def padded_tokens(tokens: int, mode: object) -> int:
    """Tokens that a step of ``tokens`` tokens computes, including padding."""
    return mode.tokens if isinstance(mode, Bucket | Rung) else tokens


class StepTimes(Protocol):
    """Predicts step times. ``StepModel`` does, and so does a cost model if predictions shall have no error."""

    def step_s(self, chunks: Sequence[Chunk], decoding: int, context: int, mode: object = None) -> float: ...


class Share(NamedTuple):
    """``tokens`` of a prefill in one step."""

    task: PrefillTask
    tokens: int


class NextStep(NamedTuple):
    """The plan of a step. Without shares the worker decodes if there is something to decode, and else waits."""

    shares: Sequence[Share] = ()
    decodes: bool = False
    """Whether the decode batch advances by one token in the same step."""
    wake_s: float | None = None
    """Ask again at this time at the latest (a batching window)."""
    mode: object = None
    """How a prefill step runs, if a worker has several ways (LAPS: a captured graph). An executor obeys. None is the standard
    kernels, which any policy that knows no graphs asks for."""


IDLE = NextStep()


class Situation(NamedTuple):
    """A worker between two steps."""

    queue: PrefillQueue
    begun: Sequence[PrefillTask]
    """Admitted prefills with tokens left."""
    decoding: int
    """Sequences in the decode batch."""
    room: int
    """Tokens of K/V that may be admitted."""
    need_of: Callable[[PrefillTask], int]
    """Tokens of K/V that admitting a task takes, without the part of its history that the worker still has."""


class Batching(Protocol):
    def next_step(self, at: Situation, now: float) -> NextStep:
        """Return the plan. The policy takes new prefills from ``at.queue``; unfinished ones come again in ``at.begun``."""


class BacklogView(Protocol):
    """A worker that prefills."""

    @property
    def worker_id(self) -> int: ...
    @property
    def backlog_tokens(self) -> int:
        """Tokens left of the queued and of the running prefills."""


class Load(NamedTuple):
    """The tokens of a worker if it got one more prompt."""

    to_prefill: int
    """Queued and running tokens, without those that its cache spares."""
    in_use: int
    """Tokens of K/V that sequences hold and queued prompts will hold; tokens that several share count once."""


class QueueView(BacklogView, Protocol):
    """The prefill queue of any worker."""

    @property
    def degree(self) -> int:
        """theta: the tensor-parallel degree."""

    @property
    def backlog_s(self) -> float:
        """Estimated time of the queued prefills, without the running one (second term of AMPD eq. 1)."""

    def busy_s(self, now: float) -> float:
        """Estimated time left of the prefill that runs."""

    def oldest_wait_s(self, now: float) -> float:
        """Time since the oldest queued prefill was ready."""

    def load_with(self, order: int, tokens: int) -> Load:
        """Its load, if it got a prompt of ``tokens`` tokens of the session of rank ``order`` by arrival."""


class PrefillView(QueueView, Protocol):
    def windowed_ttft_s(self, now: float) -> float: ...

    def cached_tokens(self, order: int) -> int:
        """Tokens from the start of the session of rank ``order`` by arrival whose K/V it keeps itself."""


class DecodeView(QueueView, Protocol):
    def windowed_itl_s(self, now: float) -> float: ...

    def token_age_s(self, now: float) -> float:
        """How long the decode batch has waited for its next token; 0 without a batch."""

    @property
    def kv_tokens(self) -> int:
        """Tokens of K/V in use, including prefix caches of waiting sessions."""

    @property
    def kv_capacity(self) -> int: ...

    @property
    def num_sessions(self) -> int:
        """Sessions bound to it that have not ended."""


@dataclass(frozen=True, kw_only=True)
class WorkerSnapshot:
    """The state of a worker at one moment: a ``PrefillView`` and a ``DecodeView``."""

    worker_id: int
    degree: int = 1
    backlog_s: float = 0.0
    backlog_tokens: int = 0
    running_s: float = 0.0
    wait_s: float = 0.0
    ttft_s: float = 0.0
    itl_s: float = 0.0
    age_s: float = 0.0
    kv_tokens: int = 0
    kv_capacity: int = 0
    num_sessions: int = 0

    def busy_s(self, now: float) -> float:
        return self.running_s

    def oldest_wait_s(self, now: float) -> float:
        return self.wait_s

    def load_with(self, order: int, tokens: int) -> Load:
        return Load(self.backlog_tokens + tokens, self.kv_tokens + tokens)

    def windowed_ttft_s(self, now: float) -> float:
        return self.ttft_s

    def cached_tokens(self, order: int) -> int:
        return 0

    def windowed_itl_s(self, now: float) -> float:
        return self.itl_s

    def token_age_s(self, now: float) -> float:
        return self.age_s
