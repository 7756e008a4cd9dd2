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
    sessions, rounds = run.sessions, run.rounds
    ids = np.asarray(sessions["session_id"], dtype=np.int64)
    by_id = np.argsort(ids, kind="stable")
    round_session = by_id[np.searchsorted(ids, rounds["session_id"], sorter=by_id)]
    row, gap_s, tokens = run.gaps
    finished = _floats(rounds["finished_s"])
    return Observed(
        round_session=round_session,
        round_index=np.asarray(rounds["round"], dtype=np.int64),
        ttft_s=_floats(rounds["first_token_s"]) - _floats(rounds["ready_s"]),
        round_done=~np.isnan(finished),
        round_itl_s=grouped_stats(row, gap_s, tokens, len(finished)),
        session_itl_s=grouped_stats(round_session[row], gap_s, tokens, len(ids)),
        session_done=np.asarray([status == "ok" for status in sessions["status"]], dtype=np.bool_),
        session_rounds=np.asarray(sessions["num_rounds"], dtype=np.int64),
        e2el_s=_floats(sessions["finished_s"]) - _floats(sessions["arrival_s"]),
        is_local=np.asarray(rounds["is_local"], dtype=np.bool_),
    )


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


def summary(observed: Observed) -> dict[str, float]:
    """The bars of AMPD Figure 4's bottom row, Figure 5's local share and Figure 8, in seconds and shares."""
    initial = observed.round_index == 0
    return {
        "ttft_initial_s": _mean(observed.ttft_s[initial]),
        "ttft_incremental_s": _mean(observed.ttft_s[~initial]),
        "itl_s": _mean(observed.session_itl_s["mean"]),
        "e2el_s": _mean(observed.e2el_s),
        "local_share": _mean(observed.is_local.astype(np.float64)),
    }


def _mean(values: Floats) -> float:
    known = values[~np.isnan(values)]
    return float(known.mean()) if len(known) else float("nan")


def _floats(column: Sequence[Any]) -> Floats:
    return np.asarray(column, dtype=np.float64)
