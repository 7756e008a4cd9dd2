"""Logs decisions with their inputs and outcomes, and repeats them from the log with policy objects (AMPD §4)."""

import json
from collections.abc import Callable, Iterable, Sequence
from copy import deepcopy
from dataclasses import asdict
from functools import partial
from typing import Any, NamedTuple

from engines.data import ask
from engines.errors import RunError
from engines.policies.routing import Binder, Decision, Router
from engines.policies.views import OpenQueue, PrefillQueue, PrefillTask, WorkerSnapshot


class Dequeued(NamedTuple):
    """The task that a queue gives, and the queue after that."""

    taken: PrefillTask
    rest: list[PrefillTask]
    queue: PrefillQueue
    """The policy's object as this choice leaves it, for the next choice."""


def choose(
    make: Callable[[], PrefillQueue], last: PrefillQueue | None, tasks: Iterable[PrefillTask], now: float
) -> Dequeued:
    """Return what a worker's queue takes at ``now`` while ``tasks`` wait. Raises RunError if the queue loses a task, or fails.

    ``last`` is the queue as the choice before left it, and is not changed, because this choice may come too late. A copy gets the tasks
    that came since, in order, so it sees each push and take of a simulated worker's queue. ``make`` makes the first queue. Tasks that were
    withdrawn since (their client left, their lease ran out) are pulled from an OpenQueue; any other queue is made anew without them.
    """
    by_id = {task.task_id: task for task in tasks}
    queue = make() if last is None else _copy_queue(last)
    enqueued_s = {task.task_id: task.enqueued_s for task in by_id.values()}
    # A task that was queued here again has been withdrawn before.
    withdrawn = [task for task in queue if enqueued_s.get(task.task_id) != task.enqueued_s]
    if isinstance(queue, OpenQueue):
        for task in withdrawn:
            ask(queue.pull, task)
    elif withdrawn:
        queue = make()
    queued_ids = {task.task_id for task in queue}
    for task in by_id.values():
        if task.task_id not in queued_ids:
            ask(queue.push, task)
    choice = Dequeued(ask(queue.take, now), list(queue), queue)
    if sorted(by_id) != sorted(task.task_id for task in (choice.taken, *choice.rest)):
        raise RunError(f"queue {type(queue).__name__} gives back other tasks than it was given: correct it")
    return choice


def _copy_queue(queue: PrefillQueue) -> PrefillQueue:
    try:
        return deepcopy(queue)
    except Exception as error:
        name = type(queue).__name__
        raise RunError(f"queue {name} cannot be copied ({type(error).__name__}: {error}): keep plain data") from error


def bind_line(now: float, session_id: int, workers: Sequence[WorkerSnapshot], worker_id: int) -> str:
    return _line("bind", now, session=session_id, workers=[asdict(worker) for worker in workers], chosen=worker_id)


def route_line(
    now: float, task: PrefillTask, home: WorkerSnapshot, prefills: Sequence[WorkerSnapshot], decision: Decision
) -> str:
    views = {"home": asdict(home), "prefills": [asdict(worker) for worker in prefills]}
    return _line("route", now, task=asdict(task), **views, decision=list(decision))


def order_line(
    now: float, worker_id: int, tasks: Sequence[dict[str, Any]], choice: Dequeued, *, is_first: bool = False
) -> str:
    """``tasks`` is the queue before the choice, as a policy may change the tasks it gets. ``is_first``: the policy's object is new."""
    return _line("order", now, worker=worker_id, first=is_first, queue=list(tasks), outcome=_outcome(choice))


class Mismatch(NamedTuple):
    place: int
    """Index of the decision in the log."""
    kind: str
    logged: Any
    made: Any


class Replay(NamedTuple):
    decisions: dict[str, int]
    """How many decisions were repeated, by kind."""
    mismatches: list[Mismatch]


def replay(
    lines: Iterable[str], *, binder: Binder, router: Router, make_queue: Callable[[int], PrefillQueue]
) -> Replay:
    """Repeat the decisions of a log with policies of the same settings and seed. ``make_queue`` gets the worker's id.

    Decisions that came too late to take effect are repeated too, because they used random numbers of the router.
    """
    counts, mismatches = {"bind": 0, "route": 0, "order": 0}, []
    queues: dict[int, PrefillQueue] = {}
    for index, line in enumerate(lines):
        entry = json.loads(line[1:])
        kind, now = entry["kind"], entry["now"]
        counts[kind] += 1
        logged: Any
        replayed: Any
        if kind == "bind":
            logged, replayed = entry["chosen"], binder.bind([WorkerSnapshot(**data) for data in entry["workers"]], now)
        elif kind == "route":
            prefills = [WorkerSnapshot(**data) for data in entry["prefills"]]
            logged = entry["decision"]
            replayed = list(router.route(PrefillTask(**entry["task"]), WorkerSnapshot(**entry["home"]), prefills, now))
        else:
            worker, tasks = entry["worker"], [PrefillTask(**data) for data in entry["queue"]]
            last_queue = None if entry["first"] else queues.get(worker)
            choice = choose(partial(make_queue, worker), last_queue, tasks, now)
            logged, replayed, queues[worker] = entry["outcome"], _outcome(choice), choice.queue
        if logged != replayed:
            mismatches.append(Mismatch(index, kind, logged, replayed))
    return Replay(counts, mismatches)


def _outcome(choice: Dequeued) -> list[list[int]]:
    """[task, times postponed] of what was taken and of what is left, in order."""
    return [[task.task_id, task.postponed] for task in (choice.taken, *choice.rest)]


def _line(kind: str, now: float, **parts: Any) -> str:
    return json.dumps({"kind": kind, "now": now, **parts}, separators=(",", ":"))
