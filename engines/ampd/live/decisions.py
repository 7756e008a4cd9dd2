"""Decisions as they are logged, inputs and outcome, and made again from the log by policy objects (AMPD §4)."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from typing import Any, NamedTuple

from engines.errors import RunError
from engines.named import asked
from engines.policies.routing import Binder, Decision, Router
from engines.policies.task import PrefillQueue, PrefillTask
from engines.policies.views import WorkerSnapshot


class Choice(NamedTuple):
    """What leaves a queue, and the queue behind it."""

    taken: PrefillTask
    rest: list[PrefillTask]


def choose(queue: PrefillQueue, tasks: Iterable[PrefillTask], now: float) -> Choice:
    """What an empty ``queue`` that is given ``tasks`` does at ``now``; RunError where it loses one, or fails."""
    given = list(tasks)
    for task in given:
        asked(queue.push, task)
    choice = Choice(asked(queue.take, now), list(queue))
    if sorted(task.task_id for task in given) != sorted(task.task_id for task in (choice.taken, *choice.rest)):
        raise RunError(f"queue {type(queue).__name__} gives back other tasks than it was given: correct it")
    return choice


def bind_line(now: float, session_id: int, workers: Sequence[WorkerSnapshot], chosen: int) -> str:
    return _line("bind", now, session=session_id, workers=[asdict(each) for each in workers], chosen=chosen)


def route_line(
    now: float, task: PrefillTask, home: WorkerSnapshot, prefills: Sequence[WorkerSnapshot], decision: Decision
) -> str:
    views = {"home": asdict(home), "prefills": [asdict(each) for each in prefills]}
    return _line("route", now, task=asdict(task), **views, decision=list(decision))


def order_line(now: float, worker_id: int, tasks: Sequence[dict[str, Any]], choice: Choice) -> str:
    """``tasks`` is the queue before, as a policy may change the tasks it is given."""
    return _line("order", now, worker=worker_id, queue=list(tasks), outcome=_outcome(choice))


class Mismatch(NamedTuple):
    place: int
    """In the log."""
    kind: str
    logged: Any
    made: Any


class Replay(NamedTuple):
    decisions: dict[str, int]
    """By kind: how many were made again."""
    mismatches: list[Mismatch]


def replay(
    lines: Iterable[str], *, binder: Binder, router: Router, make_queue: Callable[[int], PrefillQueue]
) -> Replay:
    """Ask policies of the same settings and seed what the log says was asked. ``make_queue`` is told the worker.

    Decisions that came too late to take effect were made all the same, so a router's random numbers went to them.
    """
    counts, found = {"bind": 0, "route": 0, "order": 0}, []
    for place, line in enumerate(lines):
        entry = json.loads(line[1:])
        kind, now = entry["kind"], entry["now"]
        counts[kind] += 1
        logged: Any
        made: Any
        if kind == "bind":
            logged, made = entry["chosen"], binder.bind([WorkerSnapshot(**each) for each in entry["workers"]], now)
        elif kind == "route":
            prefills = [WorkerSnapshot(**each) for each in entry["prefills"]]
            logged = entry["decision"]
            made = list(router.route(PrefillTask(**entry["task"]), WorkerSnapshot(**entry["home"]), prefills, now))
        else:
            tasks = [PrefillTask(**each) for each in entry["queue"]]
            logged, made = entry["outcome"], _outcome(choose(make_queue(entry["worker"]), tasks, now))
        if logged != made:
            found.append(Mismatch(place, kind, logged, made))
    return Replay(counts, found)


def _outcome(choice: Choice) -> list[list[int]]:
    """[task, times postponed] of what was taken and of what is left, in order."""
    return [[task.task_id, task.postponed] for task in (choice.taken, *choice.rest)]


def _line(kind: str, now: float, **parts: Any) -> str:
    return json.dumps({"kind": kind, "now": now, **parts}, separators=(",", ":"))
