"""Sessions that are served: which of a recorded set, in which order, and when; drawn ones are given theirs by their generators."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle, islice

import numpy as np

from engines.errors import UserError, require
from repro.workloads.draws import ArrivalConfig, Floats, arrival_times, shuffled
from repro.workloads.own import Traced
from repro.workloads.rounds import TracedSession
from repro.workloads.rows import bad_field
from repro.workloads.table import Trace, TraceFile

MOST_SERVED = 10**5


@dataclass(frozen=True, kw_only=True)
class Served:
    """Sessions of a recorded set with their times in seconds from the first one."""

    trace: Trace
    sessions: tuple[TracedSession, ...]
    arrival_s: tuple[float, ...]
    description: str
    """What is said of the set, and of what came of it."""
    repeated: str
    """A clause where sessions or turns come round again; else nothing."""


def served(
    source: Traced,
    arrivals: ArrivalConfig | None,
    seed: int,
    *,
    num: int | None = None,
    in_rounds: bool = False,
    keep: Sequence[TracedSession] | None = None,
    is_sample: bool = False,
) -> Served:
    """Takes ``num`` sessions of a file or of a user's own workload, as ``taken`` does; None for as many as there are. Options of times
    that have no effect are refused, but of a sample to plan by, which comes at other times than the run."""
    trace = source.trace(seed)
    if isinstance(source, TraceFile) and not is_sample and (arrivals is None or arrivals.kind != "trace"):
        fix = "has no effect where a file's times are not used: leave it out, or give --arrivals trace"
        require(source.time_unit is None or trace.uses_times, f"time_unit={source.time_unit!r} {fix}")
        require(not source.sort or trace.num_rounds > len(trace.sessions), f"sort {fix}")
    has = _size(trace.sessions if keep is None else keep, in_rounds=in_rounds)
    require(
        (has if num is None else num) <= MOST_SERVED,
        f"workload={source.where!r} has {has:,}, more than the {MOST_SERVED:,} that a run may have: give num_prompts",
    )
    return taken(trace, arrivals, seed, num=has if num is None else num, in_rounds=in_rounds, keep=keep)


def taken(
    trace: Trace,
    arrivals: ArrivalConfig | None,
    seed: int,
    *,
    num: int,
    in_rounds: bool = False,
    keep: Sequence[TracedSession] | None = None,
    stream: Sequence[str] = ("rows",),
    step: int = 1,
    comes_once: bool = True,
) -> Served:
    """Takes ``num`` sessions of a recorded set, or as many as have ``num`` rounds where it counts ``in_rounds``.

    They come in the set's order at its own times where these are replayed, each once unless ``comes_once`` is False; else in random
    order, and again where there are too few. ``keep`` takes the place of the set's sessions; ``stream`` and ``step`` name the stream that
    shuffles. Without ``arrivals`` all times are 0.
    """
    held = trace.sessions if keep is None else keep
    is_replayed = arrivals is not None and arrivals.kind == "trace"
    has = _size(held, in_rounds=in_rounds)
    require(
        not (is_replayed and comes_once) or num <= has,
        f"num_prompts={num} is more than the {has} of {trace.origin.location}, which come once at arrivals='trace': ask for "
        f"{has} (--num-prompts {has}), or for other arrivals",
    )
    stamps = _stamps(trace, held) if is_replayed else None
    order = cycle(range(len(held))) if is_replayed else shuffled(len(held), seed, *stream, step=step)
    sessions = tuple(_up_to((held[index] for index in order), num, in_rounds=in_rounds))
    times = [0.0] * len(sessions)
    if arrivals is not None:
        times = arrival_times(arrivals, len(sessions), seed, trace_s=stamps).tolist()
    num_served = _size(sessions, in_rounds=in_rounds)
    unit, repeated = "turn" if in_rounds else trace.unit, ""
    if num_served > has:
        repeated = f"; {num_served - has} of {num_served} {unit}s repeat one of the {trace.noun}'s {has}"
    return Served(
        trace=trace,
        sessions=sessions,
        arrival_s=tuple(times),
        description=_described(trace, arrivals, times) + repeated,
        repeated=repeated,
    )


def _size(sessions: Sequence[TracedSession], *, in_rounds: bool) -> int:
    return sum(len(each.rounds) for each in sessions) if in_rounds else len(sessions)


def _up_to(sessions: Iterable[TracedSession], num: int, *, in_rounds: bool) -> Iterator[TracedSession]:
    if not in_rounds:
        yield from islice(sessions, num)
        return
    for session in sessions:
        yield session
        num -= len(session.rounds)
        if num <= 0:
            return


def _stamps(trace: Trace, held: Sequence[TracedSession]) -> Floats:
    """Returns the set's own times, which may not fall: a file that is not sorted may be two, or have another unit halfway."""
    column, where = trace.time, trace.origin.location
    require(trace.unclear is None, trace.unclear or "")
    if column is None and (trace.noun == "workload" or not trace.columns):
        raise UserError(
            f"arrivals='trace': {where} has no arrival_s for its sessions: give each one, or use other arrivals"
        )
    if column is None:
        raise UserError(
            f"arrivals='trace': {where} has no column of times among {', '.join(trace.columns.values())}: name one "
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
        fix = (
            "sort the file, or give --sort" if trace.noun == "file" else "sort the workload by it for arrivals='trace'"
        )
        raise bad_field(held[place].where, column, late, f"earlier than {before} before it: {fix}")
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
