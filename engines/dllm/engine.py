"""The step loop: schedule, execute, book. It is the same for every executor, clock and system.

The ledger tracks which requests were submitted and how far executed steps have brought them. It is separate from the scheduler, which may
be anyone's. We check each plan against it before the step, and the scheduler's report after it. So each recorded step is the step that its
requests needed, whatever the scheduler says.
"""

from bisect import bisect
from collections import defaultdict
from collections.abc import Generator, Iterable, Mapping
from contextlib import suppress
from time import perf_counter
from typing import Any

from engines.data import ask
from engines.dllm.config import Phase, is_constant, sees
from engines.dllm.plan import (
    Chosen,
    Executor,
    ExecutorError,
    Occupancy,
    PlanFacts,
    PlanItem,
    Request,
    StepChanges,
    StepOutcome,
    StepPlan,
    StepRecord,
)
from engines.dllm.scheduling import Scheduler, book, due_fields, plan_item
from engines.dllm.sequence import Course, Sequence, hold_together, is_open_ended
from engines.errors import RunError
from engines.runtime.step_timer import DeviceTimes

_OTHERS = {"phase": Phase, "commit_probability": float, "suffix": bytes, "chosen": Chosen}
_KINDS = tuple(_OTHERS.get(name, int) for name in PlanItem._fields)


class Ledger:
    def __init__(self, scheduler: Scheduler) -> None:
        self._who = f"scheduler {type(scheduler).__name__}"
        # Read them now: a scheduler could change them later.
        self._config, self._rule, self._exact_steps = scheduler.config, scheduler.rule, scheduler.exact_steps
        self.kv_rows_total = scheduler.pool.num_rows
        self.kv_rows_used = 0
        """KV rows that the running requests need."""
        self.open: dict[int, Sequence] = {}
        """Request id -> state of each request that is neither finished nor failed."""
        self.running: dict[int, Sequence] = {}
        """Request id -> state of each open request that a plan has admitted."""

    def submit(self, request: Request) -> None:
        self.open[request.request_id] = Sequence(request, self._rule, self._config, exact_steps=self._exact_steps)

    def drop(self, request_id: int) -> bool:
        """Forget a request; return whether it was running."""
        self.open.pop(request_id, None)
        sequence = self.running.pop(request_id, None)
        if sequence is None:
            return False
        self.kv_rows_used -= sequence.kv_rows
        return True

    def begin(self, plan: StepPlan) -> None:
        """Admit the plan's new requests; raise RunError if the plan is not what its requests need."""
        if type(plan) is not StepPlan or type(plan.scheduled_tokens) is not int or type(plan.items) is not tuple:
            raise self._fault("plans no StepPlan with a whole number of scheduled_tokens and a tuple of items")
        if not plan.items:
            raise self._fault("plans a step without requests")
        items, running, pad_to, new_items = plan.items, self.running, plan.pad_to, []
        for item in items:
            if type(item) is not PlanItem:
                raise self._fault("plans a step whose items are no PlanItem")
            if tuple(map(type, item)) != _KINDS:
                raise self._fault("plans a step with an item whose fields are of another kind than PlanItem's")
            if item.request_id not in running:
                new_items.append(item)
        if len(items) > 1 and len({item.request_id for item in items}) < len(items):
            raise self._fault("runs a request twice in one step")
        if new_items or plan.admitted:
            self._admit(new_items, plan)
        for item in items:
            sequence = running[item.request_id]
            if item != due_fields(sequence):
                due = plan_item(sequence)
                name = next(name for name in PlanItem._fields if getattr(item, name) != getattr(due, name))
                raise self._fault(
                    f"runs request {item.request_id} with {name}={getattr(item, name)!r}, where {getattr(due, name)!r} is due"
                )
            if pad_to is not None and pad_to < item.total_len:
                raise self._fault(f"pads a batch to {pad_to} tokens, fewer than a member has")

    def end(self, plan: StepPlan, outcome: StepOutcome, reported: StepChanges) -> None:
        """Book an executed plan; raise RunError if the scheduler reports another result."""
        expected = book(self.running, plan, outcome.committed, outcome.stops, **extras(outcome))
        for request_id in expected.finished:
            self.drop(request_id)
        if reported is expected:
            return
        if not isinstance(reported, StepChanges):
            raise self._fault(f"reports {reported!r} of a step, which is no StepChanges")
        if reported != expected:
            for name, value, wanted in zip(StepChanges._fields, reported, expected, strict=True):
                if value != wanted:
                    raise self._fault(f"reports {name}={_join(value)} of a step with {name}={_join(wanted)}")

    def course(self, request_id: int, scheduler: Scheduler) -> Course:
        """Return the course of the request's block; raise RunError if the scheduler's own request follows another."""
        course, scheduled = self.running[request_id].course(), scheduler.find(request_id)
        if course is None or scheduled is None or scheduled.course() is not course:
            raise self._fault(f"goes on with request {request_id} otherwise than is due")
        return course

    def _admit(self, items: list[PlanItem], plan: StepPlan) -> None:
        """Begin the requests of these items; raise RunError if the plan reports others as admitted, or the engine does not hold them."""
        sequences = []
        for item in items:
            sequence = self.open.get(item.request_id)
            if sequence is None:
                raise self._fault(f"runs request {item.request_id}, which has ended or was never submitted")
            sequence.kv_start = item.kv_start
            self.running[item.request_id] = sequence
            self.kv_rows_used += sequence.kv_rows
            sequences.append(sequence)
        if {id(sequence.request) for sequence in sequences} != {id(request) for request in plan.admitted}:
            ids = _join(request.request_id for request in plan.admitted)
            raise self._fault(f"reports requests {ids} as admitted, {_join(item.request_id for item in items)} began")
        if len(self.running) > self._config.max_num_seqs:
            raise self._fault(f"runs {len(self.running)} requests at once, max_num_seqs={self._config.max_num_seqs}")
        end = 0
        for start, rows, request_id in sorted((s.kv_start, s.kv_rows, i) for i, s in self.running.items()):
            if rows and start < end:
                raise self._fault(f"gives request {request_id} K/V rows that another request holds")
            end = max(end, start + rows)
        if end > self.kv_rows_total:
            raise self._fault(f"gives out {end} K/V rows, the pool has {self.kv_rows_total}")
        if plan.pad_to is not None:
            hold_together(sequences)

    def _fault(self, problem: str) -> RunError:
        return RunError(f"{self._who} {problem}")


def _join(values: Iterable[object]) -> str:
    return ", ".join(map(str, values)) or "none"


def extras(outcome: StepOutcome) -> dict[str, Any]:
    """The parts of the outcome that a refresh rule asked for."""
    if outcome.confidences is None and outcome.learned is None:
        return {}  # true of most steps
    parts = {"confidences": outcome.confidences, "learned": outcome.learned}
    return {name: value for name, value in parts.items() if value is not None}


def _plan_facts(plan: StepPlan) -> PlanFacts:
    num_refresh = sum([item.phase.is_refresh for item in plan.items])
    admitted = tuple([request.request_id for request in plan.admitted]) if plan.admitted else ()
    return PlanFacts(num_refresh, len(plan.items) - num_refresh, plan.scheduled_tokens, admitted)


_NOTHING_DONE = StepChanges()
NOTHING_RUN = StepOutcome(committed=(), query_rows=0, logit_rows=0, forward_s=0.0, duration_s=None)


class Engine:
    """Serves requests: ``submit`` them and call ``step`` until it returns None. Outputs are kept until you take them."""

    def __init__(self, scheduler: Scheduler, executor: Executor) -> None:
        self.scheduler = scheduler
        self.executor = executor
        self.num_steps = 0
        self._repeats = vars(type(scheduler)).get("repeats", False) and is_constant(scheduler.rule)
        self.ahead: Generator[StepRecord] | None = None
        """The steps after the last one, as long as they need no whole plan of their own."""
        self._has_come = False
        """Whether requests were submitted since the last step was planned."""
        self._ledger = Ledger(scheduler)
        self._outputs: dict[int, tuple[int, ...] | None] = {}
        self._num_executed = 0
        self._executed: dict[int, int] = {}
        """Execution number -> step number, for steps since the last call of ``times`` whose outcome leaves ``forward_s`` open."""

    def submit(self, request: Request) -> None:
        self._has_come = True
        self.executor.validate(request)
        ask(self.scheduler.submit, request)
        self._ledger.submit(request)

    def cancel(self, request_id: int) -> None:
        """Forget a waiting or running request, between two steps; a finished request keeps its output."""
        self.settle()
        self.scheduler.cancel(request_id)
        if self._ledger.drop(request_id):
            with suppress(ExecutorError):  # nobody reads the output
                self.executor.release(request_id)

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    def is_open_ended(self, request: Request) -> bool:
        """Whether the model, and not the schedule, decides how the request's steps go."""
        decode, generation = self.scheduler.config.decode, request.generation
        return is_open_ended(generation, decode) or generation.stop_at_eos or sees(self.scheduler.rule)

    @property
    def num_running(self) -> int:
        return len(self._ledger.running)

    @property
    def num_waiting(self) -> int:
        return len(self._ledger.open) - len(self._ledger.running)

    def take_output(self, request_id: int) -> tuple[int, ...] | None:
        """Return the gen_length ids of a finished request (None on a simulated executor). You can take them only once."""
        return self._outputs.pop(request_id)

    def step(self, now_s: float | None = None) -> StepRecord | None:
        """Run one iteration; return None if there is nothing to run. Raises RunError if the scheduler's plan is not the one that is due.
        ``now_s`` is the scheduler's current time, on the clock of the requests' arrivals."""
        if self.ahead is not None:
            if (record := next(self.ahead, None)) is not None:
                return record
            self.ahead = None
        started = perf_counter()
        if now_s is not None:
            self.scheduler.now_s = now_s
        plan = ask(self.scheduler.schedule)
        if plan is None:
            return None
        self._ledger.begin(plan)
        occupancy, facts = self._occupancy(), _plan_facts(plan)
        try:
            outcome = self.executor.execute(plan)
        except ExecutorError as error:
            facts = facts._replace(num_refresh=0, num_reuse=0)
            outcome, changes = NOTHING_RUN, self._fail(plan, str(error))
        else:
            if outcome.forward_s is None:
                self._executed[self._num_executed] = self.num_steps
            self._num_executed += 1
            changes = self._complete(plan, outcome)
        duration = perf_counter() - started if outcome.duration_s is None else outcome.duration_s
        if outcome.parts is not None:
            # Parts that are known right after the step leave out the engine's own time, in which nothing was computed.
            idle = outcome.parts["idle"] + max(0.0, duration - sum(outcome.parts.values()))
            outcome = outcome._replace(parts={**outcome.parts, "idle": idle})
        self.num_steps += 1
        if (
            self._repeats
            and len(outcome.committed) == occupancy.num_running
            and hasattr(self.executor, "execute_again")
        ):
            self.ahead = self._go_on()
        occupancy = occupancy._replace(num_waiting=self.num_waiting)
        return StepRecord(self.num_steps - 1, duration, facts, outcome, changes, occupancy)

    def _go_on(self) -> Generator[StepRecord]:
        """Yield the steps after one that ran every running request. Each request is planned and booked block by block. We book all requests
        when the scheduler must make a whole plan, or somebody looks at a request."""
        ledger, repeat = self._ledger, self.executor.execute_again  # type: ignore[attr-defined]
        items: dict[int, PlanItem] = {}
        booked: dict[int, int] = {}
        """Request id -> number of its first step that is not booked."""
        turns: defaultdict[int, list[tuple[int, Phase, int]]] = defaultdict(list)
        """Step number -> requests that it runs in another phase, or with another quota."""
        ends: defaultdict[int, list[int]] = defaultdict(list)
        """Step number -> requests whose block it ends."""
        begun, has_gone, before = list(ledger.running), True, None
        settles = self.scheduler.config.settling.settles  # so the charge changes from step to step
        plan, facts, occupancy = StepPlan((), (), 0), PlanFacts(0, 0, 0), self._occupancy()
        try:
            while True:
                number, new_blocks, done = self.num_steps, [], _NOTHING_DONE
                if begun or has_gone or settles or number in turns or self._has_come:
                    if not all(ledger.running[request_id].course() for request_id in begun):
                        return
                    if (followed := self.scheduler.follow(begun, number)) is None:
                        return
                    self._has_come, before = False, None
                    if followed.items:
                        ledger.begin(followed)
                    for item in followed.items:
                        request_id, step = item.request_id, item.step_in_block
                        course = ledger.course(request_id, self.scheduler)
                        new_blocks.append((item, course))
                        items[request_id], booked[request_id] = item, number
                        for turn in course.turns[bisect(course.turns, step) :]:
                            turns[number + turn - step].append((request_id, course.phases[turn], course.quotas[turn]))
                        ends[number + len(course.phases) - 1 - step].append(request_id)
                    for request_id, phase, quota in turns.pop(number, ()):
                        items[request_id] = items[request_id]._replace(phase=phase, commit=quota)
                    plan = followed._replace(items=tuple(items.values()))
                    facts, occupancy = _plan_facts(plan), self._occupancy()
                elif plan.admitted:
                    plan, facts = plan._replace(admitted=()), facts._replace(admitted=())
                before = outcome = repeat(plan, new_blocks, number, before)
                self.num_steps += 1
                begun, has_gone = [], False
                if number in ends:
                    ended = ends.pop(number)
                    self._book(ended, booked, number)
                    part = plan._replace(items=tuple([item for item in plan.items if item.request_id in ended]))
                    done = self._complete(part, outcome._replace(committed=tuple([item.commit for item in part.items])))
                    booked |= dict.fromkeys(ended, self.num_steps)
                    begun = [request_id for request_id in ended if request_id in ledger.running]
                    if has_gone := len(begun) < len(ended):
                        items = {request_id: item for request_id, item in items.items() if request_id in ledger.running}
                yield StepRecord(number, outcome.duration_s, facts, outcome, done, occupancy)
        finally:
            self._book(items, booked, self.num_steps)

    def _book(self, requests: Iterable[int], booked: Mapping[int, int], number: int) -> None:
        """Book the steps of these requests before step ``number``, in the ledger and in the scheduler."""
        for request_id in requests:
            if times := number - booked[request_id]:
                for sequence in (self._ledger.running[request_id], self.scheduler.find(request_id)):
                    if sequence is not None:
                        sequence.move(times)

    def _occupancy(self) -> Occupancy:
        ledger, pool = self._ledger, self.scheduler.pool
        # A static batch reserves more than its members need.
        used = max(pool.used_rows, ledger.kv_rows_used)
        return Occupancy(used, ledger.kv_rows_total, len(ledger.running), self.num_waiting)

    def settle(self) -> None:
        """Book the steps that have run, before somebody looks at requests or changes them between two steps."""
        if self.ahead is not None:
            self.ahead.close()
            self.ahead = None

    def _complete(self, plan: StepPlan, outcome: StepOutcome) -> StepChanges:
        changes: StepChanges = ask(self.scheduler.complete, plan, outcome.committed, outcome.stops, **extras(outcome))
        self._ledger.end(plan, outcome, changes)
        if changes.first_block:
            # We stamp a request's times at the end of this step, which the device may not have reached.
            self.executor.wait()
        lost = {}
        for request_id in changes.finished:
            try:
                self._outputs[request_id] = self.executor.release(request_id)
            except ExecutorError as error:
                lost[request_id] = str(error)
        return changes.without(lost) if lost else changes

    def _fail(self, plan: StepPlan, reason: str) -> StepChanges:
        """Drop the requests of a step that could not run; the engine goes on with the others."""
        self.scheduler.fail(plan)
        lost = [item.request_id for item in plan.items]
        for request_id in lost:
            self._ledger.drop(request_id)
            with suppress(ExecutorError):  # we already report one reason
                self.executor.release(request_id)
        return StepChanges(failed=tuple((request_id, reason) for request_id in lost))

    def times(self) -> dict[int, DeviceTimes]:
        """Return step number -> device times, for steps since the last call whose records leave them open. Waits for the device."""
        times = {self._executed[execution]: taken for execution, taken in self.executor.times().items()}
        self._executed.clear()
        return times

    def close(self) -> None:
        """Give the executor's memory back, after a run that is over or has failed. May be called twice."""
        self.executor.close()

    def run(self) -> list[StepRecord]:
        """Step until everything submitted is finished."""
        records = list(iter(self.step, None))
        late_times = self.times()
        return [
            record._replace(outcome=record.outcome._replace(**late_times[record.step]._asdict()))
            if record.step in late_times
            else record
            for record in records
        ]
