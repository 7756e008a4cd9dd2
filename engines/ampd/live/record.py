"""Reads a live run from the store into the tables of a simulated one (``ClusterRun``). Times count from the run's begin."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from engines.ampd.live.store import Store, from_hash
from engines.cluster.record import ClusterRun, Gaps, RoundRow, SessionRow, TaskRow, TransferRow, WorkerRow, table_of
from engines.cluster.sessions import Session

_LINK = "tcp"
_TIMES = ("ready_s", "started_s", "finished_s", "landed_s")
_BUSY = ("busy_prefill_s", "busy_decode_s")


@dataclass(frozen=True, kw_only=True)
class Mark:
    """The begin of a run in the store, which may hold earlier runs: its first task and decision, and the busy times until then."""

    task: int = 0
    decision: int = 0
    busy_s: Mapping[int, tuple[float, ...]] = field(default_factory=dict)

    @staticmethod
    def of(store: Store, workers: Iterable[int]) -> "Mark":
        return Mark(
            task=int(store.fields("run").get("next_task", 0)),
            decision=len(store.log()),
            busy_s={worker: _busy(store.fields("worker", worker)) for worker in workers},
        )


START = Mark()


def collect(
    store: Store,
    sessions: Sequence[Session],
    began: float,
    roles: Mapping[int, str],
    facts: Mapping[str, Any],
    *,
    since: Mark = START,
) -> ClusterRun:
    """Return the tables of a run. ``roles`` holds the role of every worker that there was."""
    end_task = int(store.fields("run").get("next_task", 0))
    numbers = range(since.task, end_task)
    tasks = [_task_row(store.fields("task", number), number - since.task, began) for number in numbers]
    first = {(task.session_id, task.round): task for task in tasks if task.kind != "recompute"}
    session_rows: list[SessionRow] = []
    round_rows: list[RoundRow] = []
    gap_rows: list[tuple[int, float]] = []
    for session in sessions:
        state = store.fields("session", session.session_id)
        times = np.frombuffer(store.read("times", session.session_id), dtype=np.float64) - began
        is_done, offset, context = state.get("state") == "done", 0, 0
        for index, (prefill, decode, _) in enumerate(session.rounds):
            task = first.get((session.session_id, index))
            if task is None:
                break
            token_s = times[offset : offset + decode]
            round_number = len(round_rows)
            ends = (float(token_s[0]) if len(token_s) else None, float(token_s[-1]) if len(token_s) == decode else None)
            round_rows.append(
                RoundRow(session.session_id, index, task.ready_s, context, prefill, decode, *ends, task.is_local)
            )
            gap_rows += [(round_number, gap) for gap in np.diff(token_s).tolist()]
            offset, context = offset + decode, context + prefill + decode
        size = len(session.rounds), session.prefill_tokens, session.decode_tokens
        row = SessionRow(session.session_id, session.arrival_s, *size, int(state.get("home") or -1))
        if is_done:
            row.finished_s, row.status = float(times[-1]), "ok"
        session_rows.append(row)
    return ClusterRun(
        sessions=table_of(SessionRow, session_rows),
        rounds=table_of(RoundRow, round_rows),
        tasks=table_of(TaskRow, tasks),
        transfers=table_of(TransferRow, _transfers(store, began, since.task)),
        workers=table_of(
            WorkerRow, [_worker_row(store, worker, role, tasks, since) for worker, role in sorted(roles.items())]
        ),
        gaps=Gaps(
            np.array([row for row, _ in gap_rows], dtype=np.int64),
            np.array([gap for _, gap in gap_rows], dtype=np.float64),
            np.ones(len(gap_rows), dtype=np.int64),
        ),
        facts={"end_s": store.clock.now() - began, "stop_reason": None, **facts},
    )


def answers(store: Store, session: Session) -> list[list[int]]:
    """The generated ids of the session's rounds."""
    ids = store.ids(session.session_id)
    answer_ids, offset = [], 0
    for prefill, decode, _ in session.rounds:
        offset += prefill
        answer_ids.append(ids[offset : offset + decode])
        offset += decode
    return answer_ids


def _task_row(words: Mapping[str, str], number: int, began: float) -> TaskRow:
    extra = {"task_id": str(number), "round": words["round_index"], "worker_id": words["worker"] or "-1"}
    row = from_hash(TaskRow, {**words, **extra})
    for name in _TIMES:
        if (time_s := getattr(row, name)) is not None:
            setattr(row, name, time_s - began)
    return row


def _transfers(store: Store, began: float, first: int) -> list[TransferRow]:
    """Rows of the transfers that reached the other side. A prefill that was done twice has both."""
    rows = []
    for line in store.retry(lambda: store.client.lrange(store.key("transfers"), 0, -1)):
        task, content, source, target, tokens, num_bytes, start_s, end_s = json.loads(line)
        if task < first:
            continue
        rows.append(
            TransferRow(task - first, content, source, target, _LINK, tokens, num_bytes, start_s - began, end_s - began)
        )
    return rows


def _busy(fields: Mapping[str, str]) -> tuple[float, ...]:
    return tuple(float(fields.get(name, 0.0)) for name in _BUSY)


def _worker_row(store: Store, worker_id: int, role: str, tasks: Sequence[TaskRow], since: Mark) -> WorkerRow:
    fields = store.fields("worker", worker_id)
    busy_before_s = since.busy_s.get(worker_id, (0.0, 0.0))
    landed = [task for task in tasks if task.worker_id == worker_id and task.landed_s is not None]
    prefill_s, decode_s = (max(now - before_s, 0.0) for now, before_s in zip(_busy(fields), busy_before_s, strict=True))
    row = WorkerRow(worker_id, role, 1, 0, prefill_s, decode_s, num_preemptions=int(fields.get("preemptions", 0)))
    row.num_prefills, row.prefilled_tokens = len(landed), sum(task.computed_tokens or 0 for task in landed)
    if role == "decode":
        row.kv_capacity, row.kv_peak = int(fields["kv_capacity"]), int(fields.get("kv_peak", 0))
        row.kv_evicted = int(fields.get("kv_evicted", 0))
    return row
