"""Phase-multiplexed greedy scheduling at step granularity (dLLM-Serve §4.4).

Every iteration is packed anew: running requests first, oldest first, each charged the query tokens
of its current phase; then waiting requests, strictly in arrival order, as long as budget, slots and
KV rows suffice. The invariant: charged tokens never exceed ``max_num_batched_tokens``.

A running request that does not fit in this iteration is held, and nothing is admitted while one is.
Younger running requests may use what is left, because the packing starts over from the oldest: a
request's schedule never depends on requests that arrived after it, so nobody starves.
"""

from abc import ABC, abstractmethod
from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Sequenced
from dataclasses import dataclass, replace
from functools import lru_cache
from operator import attrgetter
from types import MappingProxyType
from typing import Any, ClassVar

import numpy as np

from engines.data import load_named, where_of
from engines.dllm.config import EngineConfig, GenerationConfig, Learned, RefreshRule, check_settling, sees
from engines.dllm.plan import PlanItem, Request, StepChanges, StepPlan
from engines.dllm.sequence import Coming, Sequence, Tokens, is_open_ended
from engines.errors import UserError, require


class KvPool:
    """First-fit allocator over ``num_rows`` rows; a row holds K and V of one token over all layers.

    Exact-fit runs leave no internal fragmentation; neighbouring free runs are merged on release, so
    an empty pool is always one run and any request that fits the pool can eventually be admitted.
    """

    def __init__(self, num_rows: int) -> None:
        self.num_rows = num_rows
        self.used_rows = 0
        self._starts: list[int] = [0] if num_rows else []
        self._lengths: list[int] = [num_rows] if num_rows else []

    def allocate(self, rows: int) -> int | None:
        """Start of a free run of ``rows`` rows, or None if there is none now. Zero rows start at 0."""
        if rows == 0:
            return 0
        for i, length in enumerate(self._lengths):
            if length >= rows:
                start = self._starts[i]
                if length == rows:
                    del self._starts[i], self._lengths[i]
                else:
                    self._starts[i] += rows
                    self._lengths[i] -= rows
                self.used_rows += rows
                return start
        return None

    def release(self, start: int, rows: int) -> None:
        if rows == 0:
            return
        i = bisect_left(self._starts, start)
        before_end = self._starts[i - 1] + self._lengths[i - 1] if i else 0
        after_start = self._starts[i] if i < len(self._starts) else self.num_rows
        assert before_end <= start, "released rows were not allocated"
        assert start + rows <= after_start, "released rows were not allocated"
        self._starts.insert(i, start)
        self._lengths.insert(i, rows)
        self.used_rows -= rows
        if i + 1 < len(self._starts) and start + rows == after_start:
            self._lengths[i] += self._lengths[i + 1]
            del self._starts[i + 1], self._lengths[i + 1]
        if i and before_end == start:
            self._lengths[i - 1] += self._lengths[i]
            del self._starts[i], self._lengths[i]


Told = Any
"""``StepOutcome.confidences`` and ``learned``"""


@dataclass(frozen=True, kw_only=True)
class NoKnobs:
    """A scheduler has none of its own."""


class Scheduler(ABC):
    """Queues, admission and packing. Subclasses say what a request is charged and when one enters."""

    knobs: ClassVar[type] = NoKnobs
    """Settings of one's own, a frozen dataclass whose fields all have defaults; a run's knobs are read off it."""
    repeats: ClassVar[bool] = False
    """Whether this very class says by ``follow`` what it would plan: the same as long as nobody comes, ends or is charged otherwise."""
    now_s: float = 0.0
    """Seconds on the clock that the requests' ``arrival_s`` are on, as the engine is asked for its next step."""

    def __init__(
        self, config: EngineConfig, pool: KvPool, rule: RefreshRule, *, exact_steps: bool = False, own: Any = None
    ) -> None:
        """``own`` are its ``knobs``, by default at their defaults."""
        check_settling(config.settling, window=rule.window, selection=config.sparsity.selection, caches=rule.caches)
        self.own = self.knobs() if own is None else own
        self.config = config
        self.pool = pool
        self.rule = rule
        self.exact_steps = exact_steps
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self._by_id: dict[int, Sequence] = {}
        self._coming = Coming(1)

    @classmethod
    def check(cls, config: EngineConfig, generation: GenerationConfig) -> None:
        """Refuse generation settings that this policy cannot schedule; to be known before anything is loaded."""
        return

    @classmethod
    def check_rule(cls, rule: RefreshRule) -> None:
        """Refuse a refresh rule likewise."""
        return

    def submit(self, request: Request) -> None:
        """Queue a request; one that could never run is refused here, not discovered later."""
        self.check(self.config, request.generation)
        cap, longest = self.config.max_num_batched_tokens, self.config.max_model_len
        total = request.total_len
        require(request.prompt_len >= 1, f"prompt of request {request.request_id} is empty: give at least one token")
        require(
            request.request_id not in self._by_id,
            f"request_id={request.request_id} is already in use: number requests uniquely",
        )
        require(
            total <= longest,
            f"prompt_len={request.prompt_len} + gen_length={request.generation.gen_length} exceeds "
            f"max_model_len={longest}: shorten the prompt or the generation",
        )
        require(
            total <= cap,
            f"request of {total} tokens exceeds max_num_batched_tokens={cap}: raise the budget or shorten the request",
        )
        guidance = request.generation.cfg_scale
        require(
            guidance == 0 or not self.rule.caches,
            f"cfg_scale={guidance} needs a second, uncached forward and this system caches: leave it out",
        )
        sequence = Sequence(request, self.rule, self.config, exact_steps=self.exact_steps)
        require(
            sequence.kv_rows <= self.pool.num_rows,
            f"request needs {sequence.kv_rows} KV rows and the pool has {self.pool.num_rows}: raise the memory "
            f"limit or lower retention_ratio",
        )
        self._by_id[request.request_id] = sequence
        self.waiting.append(sequence)

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def find(self, request_id: int) -> Sequence | None:
        """The state of a request that waits or runs; None of one that has ended, or never was."""
        return self._by_id.get(request_id)

    def cancel(self, request_id: int) -> bool:
        """Forget a request, between two steps, and free its rows; whether it was running. Does nothing for an id that
        neither waits nor runs."""
        sequence = self.find(request_id)
        if sequence is None:
            return False
        is_running = sequence in self.running
        (self.running if is_running else self.waiting).remove(sequence)
        self._drop(sequence)
        return is_running

    @abstractmethod
    def charge(self, sequence: Sequence) -> int:
        """Tokens a request takes from the budget in its current step."""

    def schedule(self) -> StepPlan | None:
        budget = self.config.max_num_batched_tokens
        chosen: list[Sequence] = []
        for sequence in self.running:
            charge = self.charge(sequence)
            if charge <= budget:
                budget -= charge
                chosen.append(sequence)
        self._coming = Coming(1)
        plan = self._filled(chosen, budget, admits=len(chosen) == len(self.running))
        return plan if plan.items else None

    def follow(self, begun: Iterable[int], number: int) -> StepPlan | None:
        """What ``schedule`` would plan for the step of that number, behind one that ran every running request, but for the items: only those
        of the requests in a block that this was not told of yet, and of those that it admits. None where nothing runs, or not all can."""
        chosen = [self._by_id[request_id] for request_id in begun]
        for sequence in chosen:
            self._coming.add(number, self.charges(sequence))
        if not self.running:
            return None
        (charged,) = self._coming.at(number)
        if (budget := self.config.max_num_batched_tokens - charged) < 0:
            return None
        plan = self._filled(chosen, budget)
        for sequence in chosen[len(chosen) - len(plan.admitted) :]:
            self._coming.add(number + 1, self.charges(sequence)[:, 1:])
        return plan

    def charges(self, sequence: Sequence) -> Tokens:
        """[1, steps]: ``charge`` in this step of its block and in the later ones."""
        return sequence.coming_tokens()[None]

    def _filled(self, chosen: list[Sequence], budget: int, *, admits: bool = True) -> StepPlan:
        """With the requests, which this appends, that are admitted to what is left of the budget."""
        admitted: list[Request] = []
        while admits and self.waiting and len(self.running) < self.config.max_num_seqs:
            sequence = self.waiting[0]
            charge = self.charge(sequence)
            if charge > budget or not self._reserve(sequence):
                break
            budget -= charge
            self.running.append(self.waiting.popleft())
            chosen.append(sequence)
            admitted.append(sequence.request)
        charged = self.config.max_num_batched_tokens - budget
        return StepPlan(tuple(map(plan_item, chosen)), tuple(admitted), charged)

    def complete(
        self, plan: StepPlan, committed: tuple[int, ...], stops: Mapping[int, int] = MappingProxyType({}), **told: Told
    ) -> StepChanges:
        """Book an executed plan (``committed`` and ``stops`` are StepOutcome's, as are ``confidences`` where a refresh rule asks for
        them); frees the rows of requests it finished."""
        done = booked(self._by_id, plan, committed, stops, **told)
        for request_id in done.finished:
            self._drop(self._by_id[request_id])
        if done.finished:
            self.running = [sequence for sequence in self.running if not sequence.is_finished]
        return done

    def fail(self, plan: StepPlan) -> tuple[int, ...]:
        """Give up the requests of a plan that could not be executed, and free their rows; their ids."""
        lost = tuple(item.request_id for item in plan.items)
        for request_id in lost:
            self._drop(self._by_id[request_id])
        self.running = [sequence for sequence in self.running if sequence.request.request_id in self._by_id]
        return lost

    def _reserve(self, sequence: Sequence) -> bool:
        start = self.pool.allocate(sequence.kv_rows)
        if start is None:
            return False
        sequence.kv_start = start
        return True

    def _drop(self, sequence: Sequence) -> None:
        """Forget a request and free its rows; one that waits has none."""
        if sequence.kv_start >= 0:
            self.pool.release(sequence.kv_start, sequence.kv_rows)
        del self._by_id[sequence.request.request_id]


def booked(
    sequences: Mapping[int, Sequence],
    plan: StepPlan,
    committed: tuple[int, ...],
    stops: Mapping[int, int],
    confidences: Sequenced[tuple[float, ...]] | None = None,
    learned: Sequenced[Learned] | None = None,
) -> StepChanges:
    """Advance the sequences, by id of request, by an executed plan; what became of them in it."""
    first_block, finished, stopped = [], [], []
    for place, (item, count) in enumerate(zip(plan.items, committed, strict=True)):
        request_id = item.request_id
        sequence = sequences[request_id]
        block = sequence.block
        sequence.advance(
            count,
            stops.get(request_id),
            () if confidences is None else confidences[place],
            None if learned is None else learned[place],
        )
        if sequence.block == block:
            continue
        if block == 0:
            first_block.append(request_id)
        if sequence.is_finished:
            finished.append(request_id)
            if sequence.stop is not None:
                stopped.append((request_id, sequence.output_len))
    if not first_block and not finished:
        return _NOTHING
    return StepChanges(tuple(first_block), tuple(finished), tuple(stopped))


_NOTHING = StepChanges()
"""What becomes of requests in most steps; one, so that whoever compares two has nothing to look at."""


_ASKED = {"request_id": "request.request_id", "commit": "quota", "total_len": "length"}
due_fields = attrgetter(*(_ASKED.get(name, name) for name in PlanItem._fields))
"""Reads from a sequence what is due, in the order of an item's fields: every request of every step passes here."""


def plan_item(sequence: Sequence) -> PlanItem:
    return PlanItem(*due_fields(sequence))


class PhaseScheduler(Scheduler):
    """The paper's scheduler: a Refresh is charged its whole length, a Reuse only its block."""

    repeats = True

    def charge(self, sequence: Sequence) -> int:
        return sequence.query_tokens


class RequestScheduler(Scheduler):
    """Request-level provisioning (§3.1): the whole length for life, so Reuse headroom sits idle."""

    repeats = True

    def charge(self, sequence: Sequence) -> int:
        return sequence.total_len

    def charges(self, sequence: Sequence) -> Tokens:
        return np.full_like(super().charges(sequence), sequence.total_len)


MAX_PATTERNS = 64
"""Generation settings whose trajectories are kept for the next request that asks for the same."""


class LookaheadScheduler(PhaseScheduler):
    """Look-ahead admission: a request enters only where its whole trajectory fits (ours). It is charged as ``PhaseScheduler`` does.

    The paper (§7) leaves a "Budgeting-Aware Scheduler" to future work: it would pre-compute the
    trajectory of tokens over the generation window, so that admitted requests never violate the cap.
    This is our design of one. On a fixed schedule the query tokens of every step that a request will
    ever run are known when it arrives: T where the step is a Refresh, the window where it is a Reuse. The
    trajectories of all running requests add up to the demand committed to each coming step. The head of
    the queue is admitted at the first step from which its own trajectory, on top of that demand, stays
    within ``max_num_batched_tokens`` to its end, a slot and its KV rows being free.

    An admitted request therefore runs at every step: it is never held, and its service takes exactly as
    many steps as it has. Admission is strictly first come, first served. A later request that fits
    does not overtake: its demand could push back the first step at which the head fits.

    How far to look. Where every block but a request's last takes the same number of steps S in all
    requests, a request costs no more at step t + S than at t. So does their sum, and what fits for S
    steps fits for good: one period is exact. Unequal settings break that, so the whole trajectory is compared:
    one vectorised comparison of at most ``steps`` numbers, without a case distinction.

    Where confidence or chance decides how many tokens a step commits, Refreshes move and nothing can be
    promised; such requests are refused. ``stop_at_eos`` and a cancellation only cut a trajectory short: the
    rest is given back.
    """

    def __init__(
        self, config: EngineConfig, pool: KvPool, rule: RefreshRule, *, exact_steps: bool = False, own: Any = None
    ) -> None:
        super().__init__(config, pool, rule, exact_steps=exact_steps, own=own)
        self.check_rule(rule)
        self._demand: Tokens = np.zeros(0, dtype=np.int64)
        """What admitted requests will take in the coming steps, the next one first."""
        self._num_steps = 0
        """Executed so far."""
        self._trajectories: dict[int, Tokens] = {}
        self._entered_at: dict[int, int] = {}
        self._pattern = lru_cache(maxsize=MAX_PATTERNS)(self._reuse_tokens)

    @classmethod
    def check(cls, config: EngineConfig, generation: GenerationConfig) -> None:
        if is_open_ended(generation, config.decode):
            name, value = generation.parallel_by or ("quota", config.decode.quota)
            raise UserError(
                f"{name}={value!r} leaves open how many steps a block takes, and scheduler='lookahead' plans every step "
                f"at admission: use scheduler='phase'"
            )

    @classmethod
    def check_rule(cls, rule: RefreshRule) -> None:
        require(
            not sees(rule),
            f"refresh rule {type(rule).__name__} decides as it goes, and scheduler='lookahead' plans every step at "
            f"admission: use scheduler='phase'",
        )

    def submit(self, request: Request) -> None:
        super().submit(request)
        own = request.generation if self.config.cut.cuts else replace(request.generation, seed=0)
        reuse = self._pattern(own)
        self._trajectories[request.request_id] = np.where(reuse > 0, reuse, request.total_len + reuse)

    def _reuse_tokens(self, generation: GenerationConfig) -> Tokens:
        """Query tokens of every step; where it is a Refresh, which depends on the prompt, less what the whole length has, 0 or below."""
        request = Request(request_id=0, prompt_len=1, generation=generation)
        sequence = Sequence(request, self.rule, self.config, exact_steps=self.exact_steps)
        whole = request.total_len
        steps = [tokens - whole if phase.is_refresh else tokens for phase, tokens in sequence.trajectory()]
        return np.array(steps, dtype=np.int64)

    def schedule(self) -> StepPlan | None:
        admitted: list[Request] = []
        while self.waiting and len(self.running) < self.config.max_num_seqs and self._enter(self.waiting[0]):
            sequence = self.waiting.popleft()
            self.running.append(sequence)
            admitted.append(sequence.request)
        if not self.running:
            return None
        return StepPlan(
            items=tuple(map(plan_item, self.running)), admitted=tuple(admitted), scheduled_tokens=int(self._ahead(1)[0])
        )

    def _enter(self, sequence: Sequence) -> bool:
        request_id = sequence.request.request_id
        trajectory = self._trajectories[request_id]
        ahead = self._ahead(len(trajectory))
        if (ahead + trajectory).max() > self.config.max_num_batched_tokens or not self._reserve(sequence):
            return False
        ahead += trajectory
        self._entered_at[request_id] = self._num_steps
        return True

    def complete(
        self, plan: StepPlan, committed: tuple[int, ...], stops: Mapping[int, int] = MappingProxyType({}), **told: Told
    ) -> StepChanges:
        self._advance()
        return super().complete(plan, committed, stops, **told)

    def fail(self, plan: StepPlan) -> tuple[int, ...]:
        self._advance()
        return super().fail(plan)

    def _ahead(self, num_steps: int) -> Tokens:
        """A view of the demand of so many coming steps; write to it to commit."""
        missing = num_steps - len(self._demand)
        if missing > 0:
            self._demand = np.append(self._demand, np.zeros(missing, dtype=np.int64))
        return self._demand[:num_steps]

    def _advance(self) -> None:
        self._num_steps += 1
        self._demand = self._demand[1:]

    def _drop(self, sequence: Sequence) -> None:
        super()._drop(sequence)
        request_id = sequence.request.request_id
        trajectory = self._trajectories.pop(request_id)
        if request_id not in self._entered_at:
            return
        rest = trajectory[self._num_steps - self._entered_at.pop(request_id) :]
        self._ahead(len(rest))[:] -= rest


SCHEDULERS: Mapping[str, type[Scheduler]] = MappingProxyType(
    {"phase": PhaseScheduler, "request": RequestScheduler, "lookahead": LookaheadScheduler}
)


def scheduler_of(name: str) -> type[Scheduler]:
    """One of ``SCHEDULERS``, or a subclass of ``Scheduler`` as ``module:NAME`` or by the name that an installed package gives it."""
    if name in SCHEDULERS:
        return SCHEDULERS[name]
    found = load_named("scheduler", where_of("scheduler", name, SCHEDULERS))
    if not (isinstance(found, type) and issubclass(found, Scheduler)):
        raise UserError(f"scheduler={name!r} is no subclass of engines.dllm.scheduling.Scheduler: name one")
    return found
