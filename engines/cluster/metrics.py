"""TTFT, ITL and end-to-end latency of rounds and sessions, from one run (AMPD §2, §7), and who of them met their objectives.

TTFT of a round, initial or incremental: its first token with the decode worker minus when it was ready.
ITL: gaps between consecutive tokens of one round; a round of one token has none. End-to-end latency of a
session: its last token minus its arrival, the environment's time included. Undefined values are NaN.
Percentiles are over tokens and not runs. They interpolate linearly between order statistics (numpy's default); p95-lower and
p95-higher are the order statistics below and above. A round has some thirty gaps, so that the last two of them are meant.

The paper says neither of what SLO attainment is the share, nor of which statistic (§7.1). A reading of it has three parts:

- scope: the share of *rounds* that meet both objectives, or of *sessions* that do
- ttft: *every* TTFT in scope must meet the objective, or the *mean* TTFT of the session (a round is then
  judged by its session's mean)
- itl: the mean, a percentile or the maximum of the gaps between tokens in scope

A round without gaps meets any ITL objective. What did not finish meets none and stays in the denominator.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt

from engines.cluster.record import ClusterRun, Table
from engines.knobs import Checked
from engines.policies.task import Slo

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
ItlStat = Literal["mean", "p95", "p99", "max", "p95-lower", "p95-higher"]
Scope = Literal["round", "session"]
TtftRule = Literal["every", "mean"]
_QUANTILES: dict[ItlStat, float] = {"p95": 0.95, "p99": 0.99}


@dataclass(frozen=True, kw_only=True)
class Observed:
    """One run, by round (in table order) and by session (in order of arrival)."""

    round_session: Ints
    """Index of each round's session."""
    round_index: Ints
    ttft_s: Floats
    round_done: npt.NDArray[np.bool_]
    round_itl_s: dict[ItlStat, Floats]
    session_itl_s: dict[ItlStat, Floats]
    """Over all tokens of the session; not the mean of its rounds."""
    session_done: npt.NDArray[np.bool_]
    session_rounds: Ints
    """Rounds it has, those never reached included."""
    e2el_s: Floats
    is_local: npt.NDArray[np.bool_]
    """Whether the round's first prefill was routed to its own decode worker."""


def observe(run: ClusterRun) -> Observed:
    row, gap_s, tokens = run.gaps
    ids = run.sessions["session_id"]
    session = sessions_of_rounds(ids, run.rounds)
    round_itl_s = grouped_stats(row, gap_s, tokens, len(session))
    return observed(
        run.sessions, run.rounds, session, round_itl_s, grouped_stats(session[row], gap_s, tokens, len(ids))
    )


def observed(
    sessions: Table,
    rounds: Table,
    round_session: Ints,
    round_itl_s: dict[ItlStat, Floats],
    session_itl_s: dict[ItlStat, Floats],
) -> Observed:
    """What two tables and the statistics of their gaps say."""
    ready_s, first_token_s, round_end_s = (
        np.asarray(rounds[name], dtype=np.float64) for name in ("ready_s", "first_token_s", "finished_s")
    )
    arrival_s, end_s = (np.asarray(sessions[name], dtype=np.float64) for name in ("arrival_s", "finished_s"))
    return Observed(
        round_session=round_session,
        round_index=np.asarray(rounds["round"], dtype=np.int64),
        ttft_s=first_token_s - ready_s,
        round_done=~np.isnan(round_end_s),
        round_itl_s=round_itl_s,
        session_itl_s=session_itl_s,
        session_done=np.asarray([status == "ok" for status in sessions["status"]], dtype=np.bool_),
        session_rounds=np.asarray(sessions["num_rounds"], dtype=np.int64),
        e2el_s=end_s - arrival_s,
        is_local=np.asarray(rounds["is_local"], dtype=np.bool_),
    )


def sessions_of_rounds(session_ids: Sequence[int], rounds: Table) -> Ints:
    """The index of each round's session."""
    ids = np.asarray(session_ids, dtype=np.int64)
    by_id = np.argsort(ids, kind="stable")
    return by_id[np.searchsorted(ids, rounds["session_id"], sorter=by_id)]


def grouped_stats(group: Ints, value: Floats, count: Ints, num_groups: int) -> dict[ItlStat, Floats]:
    """Mean, percentiles and maximum of ``value`` (each ``count`` times) by group; NaN for a group without any."""
    total = np.bincount(group, weights=count, minlength=num_groups)
    stats: dict[ItlStat, Floats] = {name: np.full(num_groups, np.nan) for name in get_args(ItlStat)}
    if not len(group):
        return stats
    known = total > 0
    stats["mean"][known] = np.bincount(group, weights=value * count, minlength=num_groups)[known] / total[known]
    order = np.lexsort((value, group))
    value, ends = value[order], np.cumsum(count[order])
    last = np.cumsum(total[known])
    # Order statistic k of a group is where the running count passes its tokens before plus k.
    stats["max"][known] = value[np.searchsorted(ends, last - 1, side="right")]
    for name, quantile in _QUANTILES.items():
        position = (total[known] - 1) * quantile
        below = np.floor(position)
        low = value[np.searchsorted(ends, last - total[known] + below, side="right")]
        above = np.minimum(below + 1, total[known] - 1)
        high = value[np.searchsorted(ends, last - total[known] + above, side="right")]
        stats[name][known] = low + (high - low) * (position - below)
        if name == "p95":
            stats["p95-lower"][known], stats["p95-higher"][known] = low, np.where(position > below, high, low)
    return stats


@dataclass(frozen=True, kw_only=True)
class Reading(Checked):
    scope: Scope
    ttft: TtftRule
    itl: ItlStat

    def __str__(self) -> str:
        return f"{self.scope}/{self.ttft}/{self.itl}"


READINGS: tuple[Reading, ...] = tuple(
    Reading(scope=scope, ttft=ttft, itl=itl)
    for scope, ttft, itl in product(get_args(Scope), get_args(TtftRule), get_args(ItlStat))
)


def attainment(observed: Observed, slo: Slo, reading: Reading) -> float:
    """Share in [0, 1]; NaN for a run without sessions."""
    return attainments(observed, slo, (reading,))[reading]


def attainments(observed: Observed, slo: Slo, readings: Sequence[Reading] = READINGS) -> dict[Reading, float]:
    """All readings of one run."""
    session, num_sessions = observed.round_session, len(observed.e2el_s)
    if not num_sessions:
        return dict.fromkeys(readings, math.nan)
    reached = np.bincount(session, minlength=num_sessions)
    total_s = np.bincount(session, weights=observed.ttft_s, minlength=num_sessions)
    found = {}
    with np.errstate(invalid="ignore"):  # NaN, a token that never came, meets nothing
        each = observed.ttft_s <= slo.ttft_s
        mean = total_s / np.maximum(reached, 1) <= slo.ttft_s
        every = np.bincount(session, weights=each, minlength=num_sessions) == observed.session_rounds
        for reading in readings:
            if reading.scope == "round":
                quick = each if reading.ttft == "every" else mean[session]
                done, itl_s, num = observed.round_done, observed.round_itl_s, int(observed.session_rounds.sum())
            else:
                quick = every if reading.ttft == "every" else mean
                done, itl_s, num = observed.session_done, observed.session_itl_s, num_sessions
            gaps_s = itl_s[reading.itl]
            good = quick & done & (np.isnan(gaps_s) | (gaps_s <= slo.itl_s))
            found[reading] = float(good.sum()) / num
    return found
