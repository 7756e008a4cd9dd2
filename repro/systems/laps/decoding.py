"""Runs in which answers are decoded: on other GPUs, or on the prefill instances between their steps (LAPS Figure 8, Table 2).

They are simulated on the workers of the AR cluster; batching policies and costs are those of prefill instances. Policies of
several instances are not: a conversation stays with one instance, or its turns go where the fewest tokens are queued.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from engines.ar.cluster.decode_worker import DecodeWorker
from engines.ar.cluster.prefill_worker import PrefillWorker
from engines.ar.cluster.record import ClusterRun
from engines.ar.cluster.simulation import Simulation, StopRule
from engines.ar.cluster.sink import Sink
from engines.ar.table import table_of
from engines.errors import require
from engines.laps.cluster import PrefillCluster
from engines.laps.cost import PrefillCost
from engines.laps.record import InstanceRow, MoveRow, PrefillRun, RequestRow, StepRow
from engines.policies.binding import FewestSessions
from engines.policies.instances import LengthClass
from engines.policies.routing import Decision, Local
from engines.policies.task import PrefillTask
from engines.policies.views import DecodeView, PrefillView
from repro.systems.laps.workload import PrefillWorkload


@dataclass(frozen=True, kw_only=True)
class FewestTokens:
    """A router of turns among instances that only prefill."""

    reason: str = "fewest tokens"

    def route(self, task: PrefillTask, home: DecodeView, prefills: Sequence[PrefillView], now: float) -> Decision:
        chosen = min(prefills, key=lambda each: (each.backlog_tokens, each.worker_id))
        return Decision(chosen.worker_id, False, self.reason)


def simulate_with_decode(
    cluster: PrefillCluster,
    cost: PrefillCost,
    workload: PrefillWorkload,
    decode: str,
    kv_capacity: int,
    *,
    until_s: float = math.inf,
) -> PrefillRun:
    """``decode`` apart or mixed; ``kv_capacity`` tokens fit a GPU beside the weights."""
    system, num = cluster.system, cluster.num_instances
    (arrivals,) = workload.arrivals
    (stream,) = workload.config.streams
    clients = stream.clients or 1
    if decode == "mixed":
        simulation = Simulation(binder=FewestSessions(), router=Local(), stop=StopRule(until_s=until_s))
        for index in range(num):
            simulation.add_home(
                DecodeWorker(
                    simulation,
                    worker_id=index,
                    degree=1,
                    cost=cost,
                    queue=system.make_queue(),
                    batching=system.make_batching(),
                    kv_capacity=kv_capacity,
                )
            )
    else:
        simulation = Simulation(binder=FewestSessions(), router=FewestTokens(), stop=StopRule(until_s=until_s))
        simulation.add_home(Sink(simulation, worker_id=0, itl_s=pace_s(cost, workload, clients / num, kv_capacity)))
        for index in range(num):
            simulation.add_prefill(
                PrefillWorker(
                    simulation,
                    worker_id=1 + index,
                    degree=1,
                    cost=cost,
                    queue=system.make_queue(),
                    batching=system.make_batching(),
                    overlaps=False,
                )
            )
    return _record(cluster, simulation.run(arrivals))  # type: ignore[arg-type]


def pace_s(cost: PrefillCost, workload: PrefillWorkload, sequences: float, kv_capacity: int) -> float:
    """Time of a decode step of so many sequences, all clients', at their mean context."""
    (conversations,) = workload.streams
    turns = [turn for session in conversations.sessions for turn in session.rounds]
    context = sum(session.context_tokens for session in conversations.sessions) / len(conversations.sessions) / 2
    batch = max(1, round(sequences))
    require(
        batch * context <= kv_capacity,
        f"clients: {batch} conversations a GPU of {context:.0f} tokens need more than the {kv_capacity} it holds: ask for fewer",
    )
    assert turns
    base_s, slope_s, floor_s = cost.decode_line(batch)
    return max(base_s + slope_s * batch * context, floor_s)


def _record(cluster: PrefillCluster, run: ClusterRun) -> PrefillRun:
    """Rounds as requests; their steps are not recorded."""
    first: dict[tuple[int, int], tuple[float | None, int]] = {}
    tasks = run.tasks
    for session, index, kind, started_s, worker in zip(
        *(tasks[name] for name in ("session_id", "round", "kind", "started_s", "worker_id")), strict=True
    ):
        if kind != "recompute":
            first[session, index] = started_s, worker
    rows = []
    rounds = run.rounds
    for place, (session, index, ready_s, history, tokens, token_s) in enumerate(
        zip(
            *(rounds[n] for n in ("session_id", "round", "ready_s", "history", "prefill_tokens", "first_token_s")),
            strict=True,
        )
    ):
        started_s, worker = first[session, index]
        deadline_s = None if cluster.slo_s is None else ready_s + cluster.slo_s
        late = None if token_s is None or deadline_s is None else token_s > deadline_s
        length_class: LengthClass = "short" if tokens < cluster.boundary else "long"
        rows.append(
            RequestRow(
                place,
                session,
                index,
                length_class,
                history,
                tokens,
                ready_s,
                started_s,
                token_s,
                worker,
                deadline_s,
                late,
            )
        )
    busy = [
        InstanceRow(worker, None, prefill_s + decode_s, 0, num, tokens, tokens)
        for worker, role, prefill_s, decode_s, num, tokens in zip(
            *(
                run.workers[name]
                for name in ("worker_id", "role", "busy_prefill_s", "busy_decode_s", "num_prefills", "prefilled_tokens")
            ),
            strict=True,
        )
        if role != "sink"
    ]
    return PrefillRun(
        requests=table_of(RequestRow, rows),
        steps=table_of(StepRow, []),
        moves=table_of(MoveRow, []),
        instances=table_of(InstanceRow, busy),
        facts={"end_s": run.facts["end_s"], "num_events": run.facts["num_events"]},
    )
