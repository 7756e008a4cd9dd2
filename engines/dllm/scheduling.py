"""Phase-multiplexed greedy scheduling at step granularity (dLLM-Serve §4.4).

Every iteration is packed anew. Running requests come first, oldest first, each charged the query tokens of its current phase. Waiting
requests follow, strictly in arrival order, as long as budget, slots and KV rows suffice. The invariant: charged tokens never exceed
``max_num_batched_tokens``.

A running request that does not fit in this iteration is held, and nothing is admitted while one is. Younger running requests may use the
rest of the budget, because packing starts over from the oldest. A request's schedule never depends on requests that arrived after it, so
nobody starves.
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

from engines.data import import_path_of, load_named
from engines.dllm.config import EngineConfig, GenerationConfig, Learned, RefreshRule, check_settling, sees
from engines.dllm.plan import PlanItem, Request, StepChanges, StepPlan
from engines.dllm.sequence import Coming, Sequence, Tokens, is_open_ended
from engines.errors import UserError, require


class KvPool:
    """First-fit allocator over ``num_rows`` rows; a row holds K and V of one token over all layers.

    Exact-fit runs leave no internal fragmentation. Neighbouring free runs are merged on release, so an empty pool is always one run. Any
    request that fits the pool can eventually be admitted.
    """

    def __init__(self, num_rows: int) -> None:
        self.num_rows = num_rows
        self.used_rows = 0
        self._starts: list[int] = [0] if num_rows else []
        self._lengths: list[int] = [num_rows] if num_rows else []

    def allocate(self, rows: int) -> int | None:
        """Return the start of a free run of ``rows`` rows, or None if there is none now. Zero rows start at 0."""
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


@dataclass(frozen=True, kw_only=True)
class NoKnobs:
    """The knobs of a scheduler, or the options of a method, that has none of its own."""


class Scheduler(ABC):
    """Queues, admission and packing. Subclasses say what a request is charged and when one enters."""

    knobs: ClassVar[type] = NoKnobs
    """Your scheduler's own settings, a frozen dataclass whose fields all have defaults; a run reads its knobs off it."""
    repeats: ClassVar[bool] = False
    """Whether this very class plans ahead by ``follow``: the same step again, as long as nobody comes, ends or is charged otherwise."""
    now_s: float = 0.0
    """The time in seconds when the engine asks for its next step, on the clock of the requests' ``arrival_s``."""

    def __init__(
        self, config: EngineConfig, pool: KvPool, rule: RefreshRule, *, exact_steps: bool = False, own: Any = None
    ) -> None:
        """``own`` holds the values of ``knobs``, by default their defaults."""
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
        """Raise UserError for generation settings that this policy cannot schedule; called before anything is loaded."""
        return

    @classmethod
    def check_rule(cls, rule: RefreshRule) -> None:
        """Raise UserError for a refresh rule that this policy cannot schedule."""
        return

    def submit(self, request: Request) -> None:
        """Queue a request. Raises UserError now for one that could never run."""
        self.check(self.config, request.generation)
        budget, max_len = self.config.max_num_batched_tokens, self.config.max_model_len
        total = request.total_len
        require(request.prompt_len >= 1, f"prompt of request {request.request_id} is empty: give at least one token")
        require(
            request.request_id not in self._by_id,
            f"request_id={request.request_id} is already in use: number requests uniquely",
        )
        require(
            total <= max_len,
            f"prompt_len={request.prompt_len} + gen_length={request.generation.gen_length} exceeds "
            f"max_model_len={max_len}: shorten the prompt or the generation",
        )
        require(
            total <= budget,
            f"request of {total} tokens exceeds max_num_batched_tokens={budget}: raise the budget or shorten the request",
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
        """The state of a request that waits or runs; None if it has ended or never was."""
        return self._by_id.get(request_id)

    def cancel(self, request_id: int) -> bool:
        """Forget a request, between two steps, and free its rows; return whether it was running. Does nothing for an id that neither waits
        nor runs."""
        sequence = self.find(request_id)
        if sequence is None:
            return False
        is_running = sequence in self.running
        (self.running if is_running else self.waiting).remove(sequence)
        self._drop(sequence)
        return is_running

    @abstractmethod
    def charge(self, sequence: Sequence) -> int:
        """Tokens that a request takes from the budget in its current step."""

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
        """Plan step ``number``, after a step that ran all running requests, like ``schedule``. Items are only those of ``begun``, the
        requests in a block that is new to this method, and of those that it admits. Returns None if nothing runs, or not all can."""
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
        """Return the plan of ``chosen`` and of the waiting requests that fit the rest of the budget; appends these to ``chosen``."""
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
        self, plan: StepPlan, committed: tuple[int, ...], stops: Mapping[int, int] = MappingProxyType({}), **extras: Any
    ) -> StepChanges:
        """Book an executed plan and free the rows of requests it finished. ``committed`` and ``stops`` are StepOutcome's, as are
        ``extras``: ``confidences`` and ``learned``, if a refresh rule asks for them."""
        changes = book(self._by_id, plan, committed, stops, **extras)
        for request_id in changes.finished:
            self._drop(self._by_id[request_id])
        if changes.finished:
            self.running = [sequence for sequence in self.running if not sequence.is_finished]
        return changes

    def fail(self, plan: StepPlan) -> tuple[int, ...]:
        """Drop the requests of a plan that could not run, and free their rows; return their ids."""
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
        """Forget a request and free its rows; a waiting request has none."""
        if sequence.kv_start >= 0:
            self.pool.release(sequence.kv_start, sequence.kv_rows)
        del self._by_id[sequence.request.request_id]


def book(
    sequences: Mapping[int, Sequence],
    plan: StepPlan,
    committed: tuple[int, ...],
    stops: Mapping[int, int],
    confidences: Sequenced[tuple[float, ...]] | None = None,
    learned: Sequenced[Learned] | None = None,
) -> StepChanges:
    """Advance the sequences (request id -> sequence) by an executed plan; return what became of them."""
    first_block, finished, stopped = [], [], []
    for index, (item, count) in enumerate(zip(plan.items, committed, strict=True)):
        request_id = item.request_id
        sequence = sequences[request_id]
        block = sequence.block
        sequence.advance(
            count,
            stops.get(request_id),
            () if confidences is None else confidences[index],
            None if learned is None else learned[index],
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
"""The changes of most steps: none. It is one object, so comparing two is fast."""


_ASKED = {"request_id": "request.request_id", "commit": "quota", "total_len": "length"}
due_fields = attrgetter(*(_ASKED.get(name, name) for name in PlanItem._fields))
"""Reads from a sequence the due values of an item's fields, in order. It must be fast: every request of every step passes here."""


def plan_item(sequence: Sequence) -> PlanItem:
    return PlanItem(*due_fields(sequence))


class PhaseScheduler(Scheduler):
    """The paper's scheduler: a Refresh is charged its whole length, a Reuse only its block."""

    repeats = True

    def charge(self, sequence: Sequence) -> int:
        return sequence.query_tokens


class RequestScheduler(Scheduler):
    """Request-level provisioning (§3.1): charges the whole length for life, so Reuse headroom sits idle."""

    repeats = True

    def charge(self, sequence: Sequence) -> int:
        return sequence.total_len

    def charges(self, sequence: Sequence) -> Tokens:
        return np.full_like(super().charges(sequence), sequence.total_len)


MAX_PATTERNS = 64
"""How many generation settings have their trajectories cached for later requests with the same settings."""


class LookaheadScheduler(PhaseScheduler):
    """Look-ahead admission: a request enters only if its whole trajectory fits (ours). It is charged as in ``PhaseScheduler``.

    The paper (§7) leaves a "Budgeting-Aware Scheduler" to future work. It would pre-compute the trajectory of tokens over the generation
    window, so that admitted requests never violate the cap. This is our design of one. On a fixed schedule, we know the query tokens of all
    steps of a request when it arrives: T for a Refresh, the window for a Reuse. The trajectories of all running requests add up to the
    demand committed to each coming step. The head of the queue enters at the first step where a slot and KV rows are free and its
    trajectory fits. It fits if it stays, on top of the demand, within ``max_num_batched_tokens`` to its end.

    An admitted request therefore runs at every step: it is never held, and takes exactly as many steps as it has. Admission is strictly
    first come, first served. A later request that fits does not overtake: its demand could push back the first step at which the head fits.

    How far to look: suppose every block but a request's last takes the same number of steps S in all requests. Then a request costs no more
    at step t + S than at t. So does their sum, and demand that fits for S steps fits for good: one period is exact. Unequal settings break
    that, so we compare the whole trajectory: one vectorised comparison of at most ``steps`` numbers.

    If confidence or chance decides how many tokens a step commits, Refreshes move and we can promise nothing, so such requests are refused.
    ``stop_at_eos`` and a cancellation only cut a trajectory short: its rest is given back.
    """

    def __init__(self, config: EngineConfig, pool: KvPool, rule: RefreshRule, **options: Any) -> None:
        """``options`` are ``Scheduler``'s."""
        super().__init__(config, pool, rule, **options)
        self.check_rule(rule)
        self._demand: Tokens = np.zeros(0, dtype=np.int64)
        """Query tokens that admitted requests will take in each coming step, the next one first."""
        self._num_steps = 0
        """Steps executed so far."""
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
        generation = request.generation if self.config.cut.cuts else replace(request.generation, seed=0)
        pattern = self._pattern(generation)
        self._trajectories[request.request_id] = np.where(pattern > 0, pattern, request.total_len + pattern)

    def _reuse_tokens(self, generation: GenerationConfig) -> Tokens:
        """Query tokens of every step. A Refresh depends on the prompt, so it has its tokens minus the whole length: 0 or below."""
        request = Request(request_id=0, prompt_len=1, generation=generation)
        sequence = Sequence(request, self.rule, self.config, exact_steps=self.exact_steps)
        total_len = request.total_len
        steps = [tokens - total_len if phase.is_refresh else tokens for phase, tokens in sequence.trajectory()]
        return np.array(steps, dtype=np.int64)

    def schedule(self) -> StepPlan | None:
        admitted: list[Request] = []
        while self.waiting and len(self.running) < self.config.max_num_seqs and self._enter(self.waiting[0]):
            sequence = self.waiting.popleft()
            self.running.append(sequence)
            admitted.append(sequence.request)
        if not self.running:
            return None
        return StepPlan(tuple(map(plan_item, self.running)), tuple(admitted), int(self._ahead(1)[0]))

    def _enter(self, sequence: Sequence) -> bool:
        request_id = sequence.request.request_id
        trajectory = self._trajectories[request_id]
        demand = self._ahead(len(trajectory))
        if (demand + trajectory).max() > self.config.max_num_batched_tokens or not self._reserve(sequence):
            return False
        demand += trajectory
        self._entered_at[request_id] = self._num_steps
        return True

    def complete(
        self, plan: StepPlan, committed: tuple[int, ...], stops: Mapping[int, int] = MappingProxyType({}), **extras: Any
    ) -> StepChanges:
        self._advance()
        return super().complete(plan, committed, stops, **extras)

    def fail(self, plan: StepPlan) -> tuple[int, ...]:
        self._advance()
        return super().fail(plan)

    def _ahead(self, num_steps: int) -> Tokens:
        """Return a view of the demand of the next ``num_steps`` steps; write to it to commit."""
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
        remaining = trajectory[self._num_steps - self._entered_at.pop(request_id) :]
        self._ahead(len(remaining))[:] -= remaining


SCHEDULERS: Mapping[str, type[Scheduler]] = {
    "phase": PhaseScheduler,
    "request": RequestScheduler,
    "lookahead": LookaheadScheduler,
}


def scheduler_of(name: str) -> type[Scheduler]:
    """Return one of ``SCHEDULERS``, or a subclass of ``Scheduler``, given as ``module:NAME`` or by the name in an installed package."""
    if name in SCHEDULERS:
        return SCHEDULERS[name]
    scheduler_class = load_named("scheduler", import_path_of("scheduler", name, SCHEDULERS))
    if not (isinstance(scheduler_class, type) and issubclass(scheduler_class, Scheduler)):
        raise UserError(f"scheduler={name!r} is no subclass of engines.dllm.scheduling.Scheduler: name one")
    return scheduler_class
