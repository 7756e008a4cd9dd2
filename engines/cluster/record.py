"""The record of a run: plain tables, and the gaps between tokens as run lengths. And SLO attainment (AMPD §2, §7).

A row of a table is a slotted dataclass, whose fields are the columns. ``repro/families/cluster/columns.csv`` says what each means.

TTFT of a round, initial or incremental: the time of its first token at the decode worker minus its ready time. ITL: gaps between
consecutive tokens of one round; a round of one token has none. End-to-end latency of a session: the time of its last token minus its
arrival, including the environment's time. Undefined values are NaN. Percentiles are over tokens and interpolate linearly between order
statistics. p95-lower and p95-higher are the ones below and above: of the some thirty gaps of a round, these are the last two.

The paper does not say whose share SLO attainment is, nor which statistic it takes (§7.1). A reading of it has three parts:

- scope: the share of *rounds* that meet both objectives, or of *sessions* that do
- ttft: *every* TTFT in scope must meet the objective, or the *mean* TTFT of the session (a round is then judged by its session's mean)
- itl: the mean, a percentile or the maximum of the gaps between tokens in scope

A round without gaps meets any ITL objective. A round or session that did not finish meets none and stays in the denominator.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cache, cached_property
from itertools import accumulate, product
from operator import attrgetter
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import numpy.typing as npt

from engines.columns import Values
from engines.knobs import Checked
from engines.policies.views import Slo


class LazyTimes(Values):
    """``num`` times in seconds that ``make`` returns once somebody reads them."""

    __slots__ = ("make", "num")

    def __init__(self, num: int, make: Callable[[], npt.NDArray[np.float64]]) -> None:
        self.num, self.make, self.missing, self.names = num, make, math.nan, ()

    def __len__(self) -> int:
        return self.num

    def __reduce__(self) -> tuple[Any, ...]:
        return times_of, (self.values,)

    @property
    def values(self) -> npt.NDArray[np.float64]:  # type: ignore[override]
        return self.make()


def times_of(values: npt.NDArray[np.float64]) -> Values:
    """Returns a column of times in seconds, where NaN stands for an event that never came."""
    return Values(values, missing=math.nan)


def repeated(value: Any, num: int) -> Values:
    """One value ``num`` times."""
    return Values(np.broadcast_to(np.int8(0), num), names=(value,))


Table = dict[str, Sequence[Any]]
Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
ItlStat = Literal["mean", "p95", "p99", "max", "p95-lower", "p95-higher"]


def table_of(kind: type, rows: Sequence[Any]) -> Table:
    """Returns the columns of rows of one kind."""
    names = [column.name for column in fields(kind)]
    columns = map(list, zip(*map(attrgetter(*names), rows), strict=True)) if rows else ([] for _ in names)
    return dict(zip(names, columns, strict=True))


def rows_of(table: Table, *names: str) -> Iterator[tuple[Any, ...]]:
    """These columns, row by row."""
    return zip(*(table[name] for name in names), strict=True)


@dataclass(slots=True)
class SessionRow:
    """A session that arrived."""

    session_id: int
    arrival_s: float
    num_rounds: int
    """Rounds of the session, those never reached included."""
    prefill_tokens: int
    decode_tokens: int
    """Tokens to generate, over all rounds."""
    worker_id: int
    """The decode worker it is bound to."""
    finished_s: float | None = None
    """Time of the last token; null if the run was stopped before."""
    status: str = "unfinished"
    """ok, or unfinished."""


@dataclass(slots=True)
class RoundRow:
    """A round that became ready. TTFT is ``first_token_s`` - ``ready_s``; null if the first token never came."""

    session_id: int
    round: int
    ready_s: float
    history: int
    prefill_tokens: int
    decode_tokens: int
    first_token_s: float | None = None
    finished_s: float | None = None
    is_local: bool = False


@dataclass(slots=True)
class TaskRow:
    """A prefill: where it was routed and why."""

    task_id: int
    session_id: int
    round: int
    kind: str
    worker_id: int
    is_local: bool
    reason: str
    history: int
    tokens: int
    computed_tokens: int | None = None
    estimate_s: float = 0.0
    ready_s: float = 0.0
    started_s: float | None = None
    finished_s: float | None = None
    landed_s: float | None = None
    postponed: int = 0


@dataclass(slots=True)
class TransferRow:
    """K/V on its way between two workers."""

    task_id: int
    content: str
    source: int
    target: int
    link: str
    tokens: int
    bytes: int
    start_s: float
    end_s: float


@dataclass(slots=True)
class WorkerRow:
    """The work of a worker over the run."""

    worker_id: int
    role: str
    degree: int
    server: int
    busy_prefill_s: float = 0.0
    busy_decode_s: float = 0.0
    num_prefills: int = 0
    prefilled_tokens: int = 0
    kv_capacity: int | None = None
    kv_peak: int | None = None
    kv_evicted: int | None = None
    num_preemptions: int = 0


ROWS: Mapping[str, type] = {
    "session": SessionRow,
    "round": RoundRow,
    "task": TaskRow,
    "transfer": TransferRow,
    "worker": WorkerRow,
}


class Stay(NamedTuple):
    """A member's part of the log of a decode batch: its own first gap, and the gaps from ``start`` to ``end``."""

    row: int
    first_gap_s: float
    start: int
    end: int


@dataclass(slots=True)
class TokenLog:
    """Gaps between the tokens of a worker that decodes. All sequences that decode there at a time share its gaps."""

    gaps: list[float] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    """counts[i] consecutive gaps of gaps[i] seconds (their mean)."""
    stays: list[Stay] = field(default_factory=list)


class Gaps(NamedTuple):
    """Gaps between consecutive tokens of a round; run i is ``tokens[i]`` gaps of mean ``gap_s[i]``. Sorted by row."""

    row: npt.NDArray[np.int64]
    """Rows of the rounds table."""
    gap_s: npt.NDArray[np.float64]
    tokens: npt.NDArray[np.int64]


_BLOCK = 1 << 16
"""How many groups we process at once: the gaps of all groups would take some gigabytes."""


@dataclass(frozen=True, kw_only=True, eq=False)
class GapLog:
    """Gaps as workers log them, once for all sequences that decode at a time. Stay i of a round has its own first gap, and the gaps of the
    log from ``start[i]`` to ``end[i]``."""

    log_gap_s: Floats
    log_tokens: Ints
    stay_row: Ints
    start: Ints
    end: Ints
    first_gap_s: Floats

    def __iter__(self) -> Iterator[npt.NDArray[Any]]:
        return iter(self.all_gaps)

    @property
    def row(self) -> Ints:
        return self.all_gaps.row

    @property
    def gap_s(self) -> Floats:
        return self.all_gaps.gap_s

    @property
    def tokens(self) -> Ints:
        return self.all_gaps.tokens

    @cached_property
    def all_gaps(self) -> Gaps:
        return self._of_stays(np.arange(len(self.stay_row)))

    def of_rounds(self, which: npt.NDArray[np.bool_]) -> "GapLog":
        """The stays of these rounds, in the same log."""
        mask = which[self.stay_row]
        stays = {name: getattr(self, name)[mask] for name in ("stay_row", "start", "end", "first_gap_s")}
        return GapLog(log_gap_s=self.log_gap_s, log_tokens=self.log_tokens, **stays)

    def spread(self) -> tuple[Floats, Ints]:
        """Returns gaps [n] in s, and for how many tokens [n] each stands. A gap of the log comes once, however many stays share it."""
        num = len(self.log_gap_s)
        stays = np.cumsum(np.bincount(self.start, minlength=num + 1) - np.bincount(self.end, minlength=num + 1))[:num]
        is_used, ones = stays > 0, np.ones(len(self.first_gap_s), dtype=np.int64)
        tokens = (self.log_tokens * stays)[is_used]
        return np.concatenate([self.first_gap_s, self.log_gap_s[is_used]]), np.concatenate([ones, tokens])

    def num_gaps(self, num_rounds: int, limit_s: float = math.inf) -> Floats:
        """Number of gaps of at most ``limit_s``, by round [num_rounds]."""
        sums = np.concatenate([[0], np.cumsum(self.log_tokens * (self.log_gap_s <= limit_s))])
        of_stay = sums[self.end] - sums[self.start] + (self.first_gap_s <= limit_s)
        return np.asarray(np.bincount(self.stay_row, of_stay, num_rounds), dtype=np.float64)

    def stats(self, group: Ints, num_groups: int) -> dict[ItlStat, Floats]:
        """Like ``grouped_stats`` of all gaps; ``group`` holds the group of each round."""
        stay_group = group[self.stay_row]
        order = np.argsort(stay_group, kind="stable")
        blocks = list[dict[ItlStat, Floats]]()
        for low in range(0, max(1, num_groups), _BLOCK):
            high = min(low + _BLOCK, num_groups)
            first, last = np.searchsorted(stay_group, (low, high), sorter=order)
            gaps = self._of_stays(order[first:last])
            blocks.append(grouped_stats(group[gaps.row] - low, gaps.gap_s, gaps.tokens, high - low))
        return {name: np.concatenate([block[name] for block in blocks]) for name in blocks[0]}

    def _of_stays(self, stays: Ints) -> Gaps:
        stays = stays[np.argsort(self.stay_row[stays], kind="stable")]
        row, length = self.stay_row[stays], self.end[stays] - self.start[stays] + 1
        # Each stay's first gap, followed by its part of the log.
        first_index = np.cumsum(length) - length
        index = np.arange(length.sum()) + np.repeat(self.start[stays] - 1 - first_index, length)
        index[first_index] = 0
        rows, is_empty = np.repeat(row, length), not len(self.log_gap_s)
        gap_s = np.empty(len(index)) if is_empty else self.log_gap_s[index]
        tokens = np.empty(len(index), np.int64) if is_empty else self.log_tokens[index]
        gap_s[first_index], tokens[first_index] = self.first_gap_s[stays], 1
        if (row[1:] == row[:-1]).any():  # first gaps of a round stand before the others
            is_later = np.ones(len(index), dtype=np.bool_)
            is_later[first_index] = False
            order = np.lexsort((is_later, rows))
            rows, gap_s, tokens = rows[order], gap_s[order], tokens[order]
        return Gaps(rows, gap_s, tokens)


@dataclass(frozen=True, kw_only=True)
class ClusterRun:
    sessions: Table
    rounds: Table
    tasks: Table
    transfers: Table
    workers: Table
    gaps: Gaps | GapLog
    facts: Mapping[str, Any]
    """num_events, end_s; ``stop_reason`` if the run was given up, and
    ``overload_reason`` if its arrivals asked for more prefill than the workers can do (``prefill_load`` above 1)."""

    @property
    def num_sessions(self) -> int:
        return len(self.sessions["session_id"])


def join_logs(logs: Sequence[TokenLog]) -> GapLog:
    """Joins the logs of several workers."""
    offsets = accumulate((len(log.gaps) for log in logs), initial=0)
    stays = [(offset, stay) for log, offset in zip(logs, offsets, strict=False) for stay in log.stays]
    positions = np.array([(stay.row, offset + stay.start, offset + stay.end) for offset, stay in stays], dtype=np.int64)
    row, start, end = positions.reshape(-1, 3).T
    return GapLog(
        log_gap_s=np.array([gap_s for log in logs for gap_s in log.gaps], dtype=np.float64),
        log_tokens=np.array([count for log in logs for count in log.counts], dtype=np.int64),
        stay_row=row,
        start=start,
        end=end,
        first_gap_s=np.array([stay.first_gap_s for _, stay in stays], dtype=np.float64),
    )


def prefill_load(workers: Iterable[tuple[str, float]], span_s: float) -> dict[str, Any]:
    """Returns the facts about load: seconds of prefill that arrived per second of arrivals and worker, in the busier pool.
    ``workers`` holds the role and the busy seconds of each worker."""
    busy: dict[str, list[float]] = {}
    for role, busy_s in workers:
        busy.setdefault(role, []).append(busy_s)
    load = max(math.fsum(seconds) / len(seconds) for seconds in busy.values()) / span_s if span_s > 0 else None
    reason = None
    if load is not None and load > 1:
        reason = (
            f"prefills take {load:.2f} times what the workers had time for while sessions arrived: "
            "latencies grow with the length of the run"
        )
    return {"prefill_load": load, "overload_reason": reason}


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
    """Rounds of each session, including those never reached."""
    e2el_s: Floats
    is_local: npt.NDArray[np.bool_]
    """Whether the round's first prefill was routed to its own decode worker."""


def observe(run: ClusterRun) -> Observed:
    of_rounds, of_sessions = gap_stats(run)
    session = sessions_of_rounds(run.sessions["session_id"], run.rounds)
    return observation(run.sessions, run.rounds, session, of_rounds(), of_sessions())


def gap_stats(run: ClusterRun) -> tuple[Callable[[], dict[ItlStat, Floats]], Callable[[], dict[ItlStat, Floats]]]:
    """Functions that return the statistics of gaps by round and by session, and compute them at their first call."""
    ids = run.sessions["session_id"]
    session = sessions_of_rounds(ids, run.rounds)
    rows = np.arange(len(session))
    of_rounds = cache(lambda: _stats(run.gaps, rows, len(rows)))
    if len(rows) == len(ids) and (session == rows).all():
        return of_rounds, of_rounds
    return of_rounds, cache(lambda: _stats(run.gaps, session, len(ids)))


def _stats(gaps: Gaps | GapLog, group: Ints, num_groups: int) -> dict[ItlStat, Floats]:
    if isinstance(gaps, GapLog):
        return gaps.stats(group, num_groups)
    return grouped_stats(group[gaps.row], gaps.gap_s, gaps.tokens, num_groups)


def observation(
    sessions: Table,
    rounds: Table,
    round_session: Ints,
    round_itl_s: dict[ItlStat, Floats],
    session_itl_s: dict[ItlStat, Floats],
) -> Observed:
    """Builds ``Observed`` from two tables and the statistics of their gaps."""
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
    filled = total > 0
    stats["mean"][filled] = np.bincount(group, weights=value * count, minlength=num_groups)[filled] / total[filled]
    order = np.lexsort((value, group))
    value, ends = value[order], np.cumsum(count[order])
    last = np.cumsum(total[filled])
    # Order statistic k of a group is the value at which the running count passes k plus the counts of all groups before.
    stats["max"][filled] = value[np.searchsorted(ends, last - 1, side="right")]
    for name, quantile in _QUANTILES.items():
        position = (total[filled] - 1) * quantile
        below = np.floor(position)
        low = value[np.searchsorted(ends, last - total[filled] + below, side="right")]
        above = np.minimum(below + 1, total[filled] - 1)
        high = value[np.searchsorted(ends, last - total[filled] + above, side="right")]
        stats[name][filled] = low + (high - low) * (position - below)
        if name == "p95":
            stats["p95-lower"][filled], stats["p95-higher"][filled] = low, np.where(position > below, high, low)
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


def attainments(observed: Observed, slo: Slo, readings: Sequence[Reading] = READINGS) -> dict[Reading, float]:
    """SLO attainment by reading: shares in [0, 1]; NaN for a run without sessions."""
    session, num_sessions = observed.round_session, len(observed.e2el_s)
    if not num_sessions:
        return dict.fromkeys(readings, math.nan)
    num_rounds = np.bincount(session, minlength=num_sessions)
    total_s = np.bincount(session, weights=observed.ttft_s, minlength=num_sessions)
    shares = {}
    with np.errstate(invalid="ignore"):  # NaN, a token that never came, meets nothing
        round_met = observed.ttft_s <= slo.ttft_s
        mean_met = total_s / np.maximum(num_rounds, 1) <= slo.ttft_s
        all_met = np.bincount(session, weights=round_met, minlength=num_sessions) == observed.session_rounds
        for reading in readings:
            if reading.scope == "round":
                ttft_met = round_met if reading.ttft == "every" else mean_met[session]
                done, itl_s, num = observed.round_done, observed.round_itl_s, int(observed.session_rounds.sum())
            else:
                ttft_met = all_met if reading.ttft == "every" else mean_met
                done, itl_s, num = observed.session_done, observed.session_itl_s, num_sessions
            gaps_s = itl_s[reading.itl]
            is_met = ttft_met & done & (np.isnan(gaps_s) | (gaps_s <= slo.itl_s))
            shares[reading] = float(is_met.sum()) / num
    return shares
