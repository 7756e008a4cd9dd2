"""What of a file of requests or sessions, or of a workload of one's own, is served, in which order, and when."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice

import numpy as np

from engines.errors import UserError, require
from repro.workloads.draws import ArrivalConfig, arrival_times, shuffled
from repro.workloads.own import Traced
from repro.workloads.rounds import TracedSession, repeats
from repro.workloads.rows import bad_field
from repro.workloads.table import Trace, TraceFile

MOST_SERVED = 10**5


@dataclass(frozen=True, kw_only=True)
class Served:
    trace: Trace
    sessions: tuple[TracedSession, ...]
    arrival_s: tuple[float, ...]
    description: str


def served(
    source: Traced,
    arrivals: ArrivalConfig | None,
    seed: int,
    *,
    num: int | None = None,
    in_rounds: bool = False,
    keep: Iterable[TracedSession] | None = None,
    is_sample: bool = False,
) -> Served:
    """Sessions in the file's order at its own times where these are replayed, each once; else in random order, and again where there
    are too few. ``num`` of them, or of their rounds if ``in_rounds``; None for as many as the file has. ``keep`` takes the place of
    the file's. Without ``arrivals`` times are left to who serves them. Options of times that have no effect are refused, but of a sample
    to plan by, which comes at other times than the run."""
    trace = source.trace(seed)
    is_replayed = arrivals is not None and arrivals.kind == "trace"
    if isinstance(source, TraceFile) and not is_replayed and not is_sample:
        fix = "has no effect where a file's times are not used: leave it out, or give --arrivals trace"
        require(source.time_unit is None or trace.uses_times, f"time_unit={source.time_unit!r} {fix}")
        require(not source.sort or trace.num_rounds > len(trace.sessions), f"sort {fix}")
    held = trace.sessions if keep is None else tuple(keep)
    has = sum(len(each.rounds) for each in held) if in_rounds else len(held)
    require(
        not is_replayed or num is None or num <= has,
        f"num_prompts={num} is more than the {has} of {trace.origin.location}, which come once at arrivals='trace': ask for "
        f"{has}, or for other arrivals",
    )
    wanted = has if num is None else num
    require(
        wanted <= MOST_SERVED,
        f"workload={source.where!r} has {has:,}, more than the {MOST_SERVED:,} that a run may have: give num_prompts",
    )
    stamps = _stamps(trace, held) if is_replayed else None
    order = range(len(held)) if is_replayed else shuffled(len(held), seed, "rows")
    sessions = tuple(_up_to((held[index] for index in order), wanted, in_rounds=in_rounds))
    times = [0.0] * len(sessions)
    if arrivals is not None:
        times = arrival_times(arrivals, len(sessions), seed, trace_s=stamps).tolist()
    num_served = sum(len(each.rounds) for each in sessions) if in_rounds else len(sessions)
    return Served(
        trace=trace,
        sessions=sessions,
        arrival_s=tuple(times),
        description=_described(trace, arrivals, times)
        + repeats(num_served, has, "turn" if in_rounds else trace.unit, trace.noun),
    )


def _up_to(sessions: Iterable[TracedSession], num: int, *, in_rounds: bool) -> Iterator[TracedSession]:
    if not in_rounds:
        yield from islice(sessions, num)
        return
    for session in sessions:
        yield session
        num -= len(session.rounds)
        if num <= 0:
            return


def _stamps(trace: Trace, held: tuple[TracedSession, ...]) -> np.ndarray:
    """The file's own times, which may not fall: a file that is not sorted may be two, or have another unit halfway."""
    column = trace.time
    require(trace.unclear is None, trace.unclear or "")
    if column is None and trace.noun == "workload":
        raise UserError(
            f"arrivals='trace': {trace.origin.location} yields no arrival_s: give its sessions one, or use other arrivals"
        )
    if column is None:
        raise UserError(
            f"arrivals='trace': {trace.origin.location} has no column of times among {', '.join(trace.columns.values())}: name one "
            "with --columns arrival_s=..., or use other arrivals"
        )
    bare = next((each for each in held if each.arrival_s is None), None)
    if bare is not None:
        raise bad_field(
            bare.where, column, None, "the first row of a session has no time: give it one, or use other arrivals"
        )
    stamps = np.array([each.arrival_s for each in held], dtype=np.float64)
    if (falls := np.flatnonzero(np.diff(stamps) < 0)).size:
        place = int(falls[0]) + 1
        before, late = float(stamps[place - 1]), float(stamps[place])
        raise bad_field(
            held[place].where,
            column,
            late,
            f"earlier than {before} before it: "
            + (
                "sort the file, or give --sort"
                if trace.noun == "file"
                else "sort the workload by it for arrivals='trace'"
            ),
        )
    return stamps


def _described(trace: Trace, arrivals: ArrivalConfig | None, times: list[float]) -> str:
    columns = ", ".join(name if name == column else f"{name}={column}" for name, column in trace.columns.items())
    what = "sessions" if trace.noun == "workload" else f"rows or sessions, columns {columns}"
    num = trace.num_rounds
    if num > len(trace.sessions):
        what = f"{what}, {num} rounds"
    said = [f"{trace.origin.location}: {len(trace.sessions)} {what}"]
    if trace.num_dropped:
        said.append(f"{trace.num_dropped} rows without a prompt or an answer left out")
    said += trace.remarks
    if arrivals is not None and arrivals.kind == "trace":
        how = f"as {trace.how}" if arrivals.rate is None else f"stretched to {arrivals.rate:g} a second"
        if arrivals.time_scale not in (None, 1):
            how = f"divided by {arrivals.time_scale:g}"
        span_s = times[-1] - times[0]
        rate = f", {(len(times) - 1) / span_s:,.3g} a second" if span_s > 0 else ""
        unit = "" if trace.time_unit is None else f", {trace.time} in {trace.time_unit}"
        begin = f" begin in {times[-1]:g} s" if trace.uses_times else f" in {times[-1]:g} s"
        rows = f", all rows in {trace.span_s:g} s" if trace.uses_times and trace.span_s is not None else ""
        said.append(f"times {how}, {len(times)}{begin}{rate}{unit}{rows}")
    elif trace.time is not None:
        said.append(f"times of the {trace.noun} not used")
    return "; ".join(said)
