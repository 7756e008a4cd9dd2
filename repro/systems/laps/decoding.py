"""Runs in which answers are decoded: on other GPUs, or on the prefill instances between their steps (LAPS Figure 8, Table 2).

They are simulated on the workers of the AR cluster; batching policies and costs are those of prefill instances. Policies of
several instances are not: a conversation stays with one instance, or its turns go where the fewest tokens are queued.
"""

from __future__ import annotations

from engines.ar.cluster.cluster import Simulation, StopRule
from engines.ar.cluster.decode_worker import DecodeWorker, Sink
from engines.ar.cluster.worker import Parts, PrefillWorker
from engines.ar.record import ClusterRun, rows_of, table_of
from engines.errors import require
from engines.laps.cluster import PrefillCluster
from engines.laps.cost import PrefillCost
from engines.laps.record import InstanceRow, MoveRow, PrefillRun, RequestRow, StepRow
from engines.policies.routing import FewestSessions, Local, RemoteOnly
from repro.systems.laps.turns import PrefillWorkload


def simulate_with_decode(
    cluster: PrefillCluster, workload: PrefillWorkload, decode: str, kv_capacity: int, *, until_s: float | None = None
) -> PrefillRun:
    """``decode`` apart or mixed; ``kv_capacity`` tokens fit a GPU beside the weights."""
    system, num, cost = cluster.system, cluster.num_instances, cluster.cost
    assert isinstance(cost, PrefillCost), "answers are decoded in a simulation alone"
    (arrivals,) = workload.arrivals
    (stream,) = workload.config.streams
    clients = stream.clients or 1
    stop = StopRule(until_s=until_s)

    def parts(worker_id: int) -> Parts:
        return Parts(worker_id=worker_id, cost=cost, queue=system.make_queue(), batching=system.make_batching())

    if decode == "mixed":
        simulation = Simulation(binder=FewestSessions(), router=Local(), stop=stop)
        for index in range(num):
            simulation.add(DecodeWorker(simulation, kv_capacity=kv_capacity, **parts(index)))
    else:
        # A turn goes where the fewest tokens are.
        simulation = Simulation(binder=FewestSessions(), router=RemoteOnly("shared"), stop=stop)
        simulation.add(Sink(simulation, worker_id=0, itl_s=_pace_s(cost, workload, clients / num, kv_capacity)))
        for index in range(num):
            simulation.add(PrefillWorker(simulation, overlaps=False, **parts(1 + index)))
    return _record(cluster, simulation.run(arrivals))  # type: ignore[arg-type]


def _pace_s(cost: PrefillCost, workload: PrefillWorkload, sequences: float, kv_capacity: int) -> float:
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
    tasks = rows_of(run.tasks, "session_id", "round", "kind", "started_s", "worker_id")
    first = {
        (session, index): (started_s, worker)
        for session, index, kind, started_s, worker in tasks
        if kind != "recompute"
    }
    rounds = rows_of(run.rounds, "session_id", "round", "history", "prefill_tokens", "ready_s", "first_token_s")
    requests = []
    for place, (session, index, history, tokens, ready_s, token_s) in enumerate(rounds):
        row = RequestRow(place, session, index, cluster.class_of(tokens), history, tokens, ready_s)
        row.started_s, row.instance = first[session, index]
        row.finished_s = token_s
        if cluster.slo_s is not None:
            row.deadline_s = ready_s + cluster.slo_s
            row.violated = None if token_s is None else token_s > row.deadline_s
        requests.append(row)
    workers = rows_of(
        run.workers, "worker_id", "role", "busy_prefill_s", "busy_decode_s", "num_prefills", "prefilled_tokens"
    )
    return PrefillRun(
        requests=table_of(RequestRow, requests),
        steps=table_of(StepRow, []),
        moves=table_of(MoveRow, []),
        instances=table_of(
            InstanceRow,
            [
                InstanceRow(worker, None, prefill_s + decode_s, 0, num, tokens, tokens)
                for worker, role, prefill_s, decode_s, num, tokens in workers
                if role != "sink"
            ],
        ),
        facts={"end_s": run.facts["end_s"], "num_events": run.facts["num_events"]},
    )
