"""What is read off rounds, prefills and workers of a cluster (AMPD §7). Shares are in [0, 1]; times count from when a
round was ready. A run's reading of SLO attainment and its objectives are among its facts."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from engines.ar.metrics import READINGS, Floats, Reading, attainments
from engines.policies.task import Slo
from repro.runs.metrics import Metric, distribution
from repro.runs.record import RunRecord
from repro.systems.ar.columns import ROUNDS, TASKS, WORKERS
from repro.systems.ar.log import observed_of
from repro.systems.simulated import column, known


def attainment_by_reading(record: RunRecord) -> dict[str, float | None]:
    """Every reading of the paper's words, by its name ``scope/ttft/itl``."""
    found = attainments(observed_of(record), _slo_of(record))
    return {str(reading): _defined(share) for reading, share in found.items()}


def slo_attainment(record: RunRecord) -> float | None:
    reading = reading_of(record)
    return _defined(attainments(observed_of(record), _slo_of(record), (reading,))[reading])


def _slo_of(record: RunRecord) -> Slo:
    slo: Mapping[str, float] = record.facts["slo"]
    return Slo(ttft_s=slo["ttft_s"], itl_s=slo["itl_s"])


def reading_of(record: RunRecord) -> Reading:
    name = record.facts["attainment_reading"]
    return next(reading for reading in READINGS if str(reading) == name)


def round_ttft_s(record: RunRecord) -> Floats:
    """By round, from when it was ready; NaN where its first token never came."""
    return column(record, "first_token_s", ROUNDS) - column(record, "ready_s", ROUNDS)


def ttft_s(record: RunRecord, *, initial: bool) -> dict[str, Any]:
    of_kind = (np.asarray(record.tables[ROUNDS]["round"]) == 0) == initial
    return distribution(known(round_ttft_s(record)[of_kind]))


def ttft_longest_s(record: RunRecord) -> float | None:
    times = known(round_ttft_s(record))
    return float(times.max()) if times.size else None


def round_itl_s(record: RunRecord, stat: str) -> dict[str, Any]:
    return distribution(known(column(record, f"itl_{stat}_s", ROUNDS)))


def local_share(record: RunRecord) -> float | None:
    """Share of the rounds' prefills that run locally; recomputations after a preemption are not counted."""
    local = record.tables[ROUNDS]["is_local"]
    return sum(local) / len(local) if local else None


def prefills_by_reason(record: RunRecord) -> dict[str, int]:
    reasons = record.tables[TASKS]["reason"]
    return {reason: reasons.count(reason) for reason in sorted(set(reasons))}


def most_postponed(record: RunRecord) -> int:
    """By Algorithm 2's counter: later in an ordering than in the queue."""
    return max(record.tables[TASKS]["postponed"], default=0)


def busy_share(record: RunRecord) -> dict[str, float | None]:
    """By role, prefill and decode steps apart."""
    end_s, workers = record.facts["end_s"], record.tables[WORKERS]
    found: dict[str, float | None] = {}
    for role in ("prefill", "decode"):
        rows = [index for index, each in enumerate(workers["role"]) if each == role]
        for part in ("busy_prefill_s", "busy_decode_s"):
            name = f"{role}_workers_{part.removeprefix('busy_').removesuffix('_s')}"
            busy = math.fsum(workers[part][row] for row in rows)
            found[name] = busy / (end_s * len(rows)) if rows and end_s else None
    return found


def _sum(column: str) -> Any:
    return lambda record: sum(value or 0 for value in record.tables[WORKERS][column])


def _defined(value: float) -> float | None:
    return None if math.isnan(value) else value


_NO_ROUND = "per entry: no round that has it; pQ below 100 / (100 - Q) of them"

AR_METRICS: tuple[Metric, ...] = (
    Metric(
        "slo_attainment",
        "share",
        "rounds or sessions that meet both objectives / all, in the reading of the run's facts",
        "no sessions",
        slo_attainment,
    ),
    Metric("attainment_by_reading", "share", "the same in each of the readings", "no sessions", attainment_by_reading),
    Metric(
        "ttft_initial_s",
        "s",
        "distribution over initial rounds of first token - ready",
        _NO_ROUND,
        lambda r: ttft_s(r, initial=True),
    ),
    Metric(
        "ttft_incremental_s",
        "s",
        "distribution over later rounds of first token - ready",
        _NO_ROUND,
        lambda r: ttft_s(r, initial=False),
    ),
    Metric("ttft_longest_s", "s", "largest first token - ready of a round", "no round has one", ttft_longest_s),
    Metric("itl_s", "s", "distribution over rounds of their mean gap", _NO_ROUND, lambda r: round_itl_s(r, "mean")),
    Metric(
        "itl_p95_s",
        "s",
        "distribution over rounds of the 95th percentile of their gaps",
        _NO_ROUND,
        lambda r: round_itl_s(r, "p95"),
    ),
    Metric("local_share", "share", "rounds prefilled on their decode worker / rounds", "no rounds", local_share),
    Metric("prefills_by_reason", "prefills", "by the router's rule", "never", prefills_by_reason),
    Metric("most_postponed", "times", "the most that one prefill was put back", "never: 0 of none", most_postponed),
    Metric("busy_share", "share", "busy time / (end of the run x workers)", "no worker of the role", busy_share),
    Metric(
        "prefill_load",
        "share",
        "prefill time asked for / (workers x time of arrivals), in the busier pool",
        "arrivals all at once",
        lambda r: r.facts["prefill_load"],
    ),
    Metric("kv_evicted", "tokens", "idle prefixes given up, over workers", "never", _sum("kv_evicted")),
    Metric("num_preemptions", "sequences", "K/V of decoding sequences given up", "never", _sum("num_preemptions")),
)
