"""The family of autoregressive systems on a cluster: a run's tables, the metrics of rounds, prefills and workers (AMPD §7), and its
checks.

A request is a session. Rounds, prefills, transfers and workers have tables of their own. Shares are in [0, 1], and times count from
when a round was ready. The facts of a run hold its objectives and its reading of SLO attainment.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import get_args

import numpy as np

from engines.cluster.record import (
    READINGS,
    ClusterRun,
    Floats,
    ItlStat,
    LazyTimes,
    Observed,
    Reading,
    attainments,
    gap_stats,
    observation,
    rows_of,
    sessions_of_rounds,
    times_of,
)
from engines.columns import Values
from engines.policies.views import NO_OBJECTIVE_S, Slo
from repro.families.cluster.system import request_table
from repro.runs.family import Compute, column, distribution, family_in, without_nan
from repro.runs.record import REQUESTS, RunRecord, Table

ROUNDS, TASKS, TRANSFERS, WORKERS = "rounds", "tasks", "transfers", "workers"
_ITL_STATS: tuple[ItlStat, ...] = get_args(ItlStat)


def _itl_column(stat: ItlStat) -> str:
    return f"itl_{stat.replace('-', '_')}_s"


def tables_of(run: ClusterRun) -> dict[str, Table]:
    (of_rounds, of_sessions), sessions = gap_stats(run), run.sessions
    ids = sessions["session_id"]
    requests = request_table(
        request_id=ids,
        arrival_s=sessions["arrival_s"],
        admitted_s=_first_values(ids, run.tasks, "started_s"),
        first_output_s=_first_values(ids, run.rounds, "first_token_s"),
        finished_s=sessions["finished_s"],
        prompt_len=sessions["prefill_tokens"],
        output_len=sessions["decode_tokens"],
        status=sessions["status"],
        num_rounds=sessions["num_rounds"],
        decode_tokens=sessions["decode_tokens"],
        worker_id=sessions["worker_id"],
        **_itl_columns(len(ids), of_sessions),
    )
    rounds = {**run.rounds, **_itl_columns(len(run.rounds["round"]), of_rounds)}
    return {REQUESTS: requests, ROUNDS: rounds, TASKS: run.tasks, TRANSFERS: run.transfers, WORKERS: run.workers}


def _first_values(ids: Sequence[int], table: Table, name: str) -> Values:
    """For each session, the value in the first row of its first round, or a missing value if it has none."""
    is_first = np.flatnonzero(np.asarray(table["round"]) == 0)
    values = np.asarray(table[name], dtype=np.float64)[is_first]
    unique_ids, first_rows = np.unique(np.asarray(table["session_id"], dtype=np.int64)[is_first], return_index=True)
    wanted = np.asarray(ids, dtype=np.int64)
    index = np.minimum(np.searchsorted(unique_ids, wanted), max(0, len(unique_ids) - 1))
    if not len(unique_ids):
        return times_of(np.full(len(wanted), np.nan))
    return times_of(np.where(unique_ids[index] == wanted, values[first_rows[index]], np.nan))


def observed_of(record: RunRecord, readings: Sequence[Reading] = READINGS) -> Observed:
    """Like ``engines.cluster.record.observe``, but reads the run from its record, with the gap statistics that ``readings`` need."""
    sessions, rounds = record.requests, record.tables[ROUNDS]
    round_itl_s, session_itl_s = (
        {reading.itl: column(record, _itl_column(reading.itl), table) for reading in readings if reading.scope == scope}
        for scope, table in (("round", ROUNDS), ("session", REQUESTS))
    )
    session = sessions_of_rounds(sessions["request_id"], rounds)
    return observation(sessions, rounds, session, round_itl_s, session_itl_s)


def _itl_columns(num: int, stats: Callable[[], Mapping[ItlStat, Floats]]) -> dict[str, Values]:
    return {_itl_column(name): LazyTimes(num, lambda name=name: stats()[name]) for name in _ITL_STATS}  # type: ignore[misc]


# ---- metrics, each under the name that it has in metrics.csv ----------------------------------------------


def attainment_by_reading(record: RunRecord, readings: Sequence[Reading] = READINGS) -> dict[str, float | None]:
    """SLO attainment under each reading of the paper's words, by the reading's name ``scope/ttft/itl``."""
    limits = record.facts["slo"]
    if not any(limits.values()):
        return {str(reading): None for reading in readings}
    slo = Slo(**{name: NO_OBJECTIVE_S if limit_s is None else limit_s for name, limit_s in limits.items()})
    attained = attainments(observed_of(record, readings), slo, readings)
    return {str(reading): None if math.isnan(share) else share for reading, share in attained.items()}


def slo_attainment(record: RunRecord) -> float | None:
    readings = [reading for reading in READINGS if str(reading) == record.facts["attainment_reading"]]
    (attainment,) = attainment_by_reading(record, readings).values()
    return attainment


def round_ttft_s(record: RunRecord) -> Floats:
    """TTFT of each round, from when it was ready. NaN if its first token never came."""
    return column(record, "first_token_s", ROUNDS) - column(record, "ready_s", ROUNDS)


def ttft_longest_s(record: RunRecord) -> float | None:
    times = without_nan(round_ttft_s(record))
    return float(times.max()) if times.size else None


def local_share(record: RunRecord) -> float | None:
    """The share of rounds that were prefilled locally. Recomputations after a preemption do not count."""
    local = record.tables[ROUNDS]["is_local"]
    return sum(local) / len(local) if local else None


def prefills_by_reason(record: RunRecord) -> dict[str, int]:
    reasons = record.tables[TASKS]["reason"]
    return {reason: reasons.count(reason) for reason in sorted(set(reasons))}


def busy_share(record: RunRecord) -> dict[str, float | None]:
    """The busy share of the workers of each role, separately for prefill and decode steps."""
    end_s, workers = record.facts["end_s"], record.tables[WORKERS]
    shares: dict[str, float | None] = {}
    for role in ("prefill", "decode"):
        rows = [index for index, worker_role in enumerate(workers["role"]) if worker_role == role]
        for part in ("prefill", "decode"):
            busy = math.fsum(workers[f"busy_{part}_s"][row] for row in rows)
            shares[f"{role}_workers_{part}"] = busy / (end_s * len(rows)) if rows and end_s else None
    return shares


def _over_rounds(values: Callable[[RunRecord], Floats]) -> Compute:
    return lambda record: distribution(without_nan(values(record)))


def _sum(column: str) -> Compute:
    return lambda record: sum(value or 0 for value in record.tables[WORKERS][column])


def most_postponed(record: RunRecord) -> int:
    return max(record.tables[TASKS]["postponed"], default=0)


ttft_initial_s = _over_rounds(lambda record: round_ttft_s(record)[column(record, "round", ROUNDS) == 0])
ttft_incremental_s = _over_rounds(lambda record: round_ttft_s(record)[column(record, "round", ROUNDS) != 0])
ttft_rounds_s = _over_rounds(round_ttft_s)
itl_s = _over_rounds(lambda record: column(record, "itl_mean_s", ROUNDS))
itl_p95_s = _over_rounds(lambda record: column(record, "itl_p95_s", ROUNDS))
kv_evicted, num_preemptions = _sum("kv_evicted"), _sum("num_preemptions")

# ---- checks: that a run ended, that it could have gone on, and that nothing was lost ------------------------------


def _drained(record: RunRecord) -> Iterator[str]:
    facts = record.facts
    if (reason := facts["stop_reason"]) is not None:
        yield f"it was given up: {reason}"
    if (reason := facts["overload_reason"]) is not None and not facts["is_transient"]:
        yield f"the rate never drains: {reason}; lower it, or set transient=true to read this number of sessions alone"


def _rounds_are_whole(record: RunRecord) -> Iterator[str]:
    """Finished sessions have all their rounds and tokens."""
    rounds, sessions = record.tables[ROUNDS], record.requests
    ids = sessions["request_id"]
    rows = sessions_of_rounds(ids, rounds)
    ok = np.array([status == "ok" for status in sessions["status"]], dtype=np.bool_)
    for part, round_column, session_column in (
        ("rounds", None, "num_rounds"),
        ("prefill", "prefill_tokens", "prompt_len"),
        ("decode", "decode_tokens", "decode_tokens"),
    ):
        weights = None if round_column is None else np.asarray(rounds[round_column], dtype=np.float64)
        counted = np.bincount(rows, weights=weights, minlength=len(ids))
        if num_wrong := int(((counted != np.asarray(sessions[session_column])) & ok).sum()):
            yield f"{num_wrong} finished sessions do not have the {part} they asked for"


def _transfers_match(record: RunRecord) -> Iterator[str]:
    """A remote prefill sends back exactly the tokens that it computed: the asked ones and any history computed again. With a prefix
    cache of its own it sends all that the home lacks, at least the asked tokens. If blocks are shared, the home may lack less."""
    transfers = rows_of(record.tables[TRANSFERS], "task_id", "content", "tokens")
    tasks = rows_of(record.tables[TASKS], "task_id", "is_local", "history", "tokens", "computed_tokens")
    sent = {task: tokens for task, content, tokens in transfers if content == "increment"}
    is_shared = record.facts.get("prefix_cache", {}).get("is_used", False)
    has_own = is_shared or record.facts.get("options", {}).get("history_read") == "own-cache"
    num_wrong = 0
    for task, is_local, history, prompt, computed in tasks:
        if not is_local and computed is not None:
            low, high = (1 if is_shared else prompt, history + prompt) if has_own else (computed, computed)
            num_wrong += not low <= sent.get(task, -1) <= high
    if num_wrong:
        yield f"{num_wrong} remote prefills sent back other K/V than they computed"


def _memory_held(record: RunRecord) -> Iterator[str]:
    pairs = rows_of(record.tables[WORKERS], "kv_peak", "kv_capacity")
    if num_wrong := sum(peak is not None and peak > capacity for peak, capacity in pairs):
        yield f"{num_wrong} workers held more K/V than they have memory for"


def score(record: RunRecord) -> tuple[float, ...]:
    """The score of a trial, where less is better: SLO attainment, then mean session time, infinite if a session never ends."""
    durations = column(record, "finished_s") - column(record, "arrival_s")
    all_ended = durations.size and not np.isnan(durations).any()
    return -(slo_attainment(record) or 0.0), float(durations.mean()) if all_ended else math.inf


AR = family_in(
    Path(__file__).parent,
    "ar",
    globals(),
    unit="sessions",
    checks=(_drained, _rounds_are_whole, _transfers_match, _memory_held),
    score=score,
)
