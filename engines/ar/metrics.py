"""TTFT, ITL and end-to-end latency of rounds and sessions, from one run (AMPD §2, §7).

TTFT of a round, initial or incremental: its first token with the decode worker minus when it was ready.
ITL: gaps between consecutive tokens of one round; a round of one token has none. End-to-end latency of a
session: its last token minus its arrival, the environment's time included. Undefined values are NaN.
Percentiles interpolate linearly between order statistics (numpy's default), over tokens and not runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from engines.ar.cluster.record import ClusterRun
from engines.ar.table import Table

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
ItlStat = Literal["mean", "p95", "p99", "max"]
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

    @property
    def num_sessions(self) -> int:
        return len(self.e2el_s)


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
    return Observed(
        round_session=round_session,
        round_index=np.asarray(rounds["round"], dtype=np.int64),
        ttft_s=_floats(rounds["first_token_s"]) - _floats(rounds["ready_s"]),
        round_done=~np.isnan(_floats(rounds["finished_s"])),
        round_itl_s=round_itl_s,
        session_itl_s=session_itl_s,
        session_done=np.asarray([status == "ok" for status in sessions["status"]], dtype=np.bool_),
        session_rounds=np.asarray(sessions["num_rounds"], dtype=np.int64),
        e2el_s=_floats(sessions["finished_s"]) - _floats(sessions["arrival_s"]),
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
    stats: dict[ItlStat, Floats] = {name: np.full(num_groups, np.nan) for name in ("mean", "p95", "p99", "max")}
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
    return stats


def _floats(column: Sequence[Any]) -> Floats:
    return np.asarray(column, dtype=np.float64)
