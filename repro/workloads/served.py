"""The sessions that a cell serves from a file or a user's own workload instead of a data set, and when they come.

A user's own workload is named as ``module:NAME``, or by an installed package's name for it. NAME is a class or function that makes an
object. Its method ``sessions(seed)`` yields ``TracedSession`` objects, which we serve like the rows of a file.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import cycle, islice
from typing import Annotated, Any

import numpy as np

from engines.cluster.sessions import Prefix, PrefixNames
from engines.errors import UserError, require
from engines.knobs import Checked, Knob, Range, knobs_of
from engines.policies.own import Kind, Plugin, knobs_of_policy
from repro.files import file_cache
from repro.workloads.card import Card, Local, Origin
from repro.workloads.draws import ArrivalConfig, Floats, arrival_times, shuffled
from repro.workloads.knobs import RequestKnobs, TraceKnobs, UntoldAnswers, named_after, place_of
from repro.workloads.rounds import (
    MOST_DELAY_S,
    MOST_ROWS,
    MOST_SECONDS,
    MOST_TOKENS,
    PlainSessions,
    RecordedRound,
    Trace,
    TracedSession,
    TraceFile,
    bad_field,
    block_of,
)

# -- a user's own workload ------------------------------------------------------------------------------------

WORKLOAD = Kind(name="workload", method="sessions", arguments=("seed",), offered=())


@dataclass(frozen=True, kw_only=True)
class _Yielded(Checked):
    """The types and ranges of a session's numbers."""

    prefill_tokens: Annotated[int, Range(1, MOST_TOKENS)]
    decode_tokens: Annotated[int, Range(1, MOST_TOKENS)]
    delay_s: Annotated[float, Range(0, MOST_DELAY_S)] | None
    arrival_s: Annotated[float, Range(0, MOST_SECONDS)] | None
    prompt: str | None


_NUMBERS = knobs_of(_Yielded)


@dataclass(frozen=True, kw_only=True)
class OwnWorkload:
    """A user's own workload. Each seed has its own sessions, and always the same ones."""

    own: Plugin

    @property
    def where(self) -> str:
        return self.own.where

    def trace(self, seed: int) -> Trace:
        return _draw_trace(self, seed)

    def yielded(self, seed: int) -> tuple[TracedSession, ...]:
        """The sessions of a seed. Raises UserError for anything that is no session, and for errors in the user's code."""
        label = f"workload={self.where!r}"
        try:
            drawn = self.own.make_checked().sessions(seed)
            require(hasattr(drawn, "__iter__"), f"{label} gives {type(drawn).__name__} for its sessions: yield each")
            sessions = tuple(islice(self._checked(drawn), MOST_ROWS + 1))
        except (UserError, KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:
            message = " ".join(str(error).split())
            raise UserError(f"{label} fails ({type(error).__name__}: {message}): correct it") from error
        require(sessions != (), f"{label} yields no session: yield at least one")
        require(len(sessions) <= MOST_ROWS, f"{label} yields more than {MOST_ROWS:,} sessions: end it")
        sizes = sorted({session.prefix.block_tokens for session in sessions if session.prefix is not None})
        require(len(sizes) < 2, f"{label}: blocks of prefixes have {sizes} tokens: give all of them one size")
        odd = next((each for each in sessions if (each.arrival_s is None) != (sessions[0].arrival_s is None)), None)
        require(
            odd is None,
            f"{label}: some sessions have an arrival_s, and others, the first of which differs in {odd and odd.where}, "
            "have none: give all one, or none",
        )
        return sessions

    def _checked(self, sessions: Any) -> Iterator[TracedSession]:
        names = PrefixNames()
        for number, session in enumerate(sessions, start=1):
            location = f"{self.where}, session {number}"
            require(
                isinstance(session, TracedSession),
                f"{location} is of {type(session).__name__}: yield a TracedSession of repro.workloads.rounds",
            )
            rounds = session.rounds if isinstance(session.rounds, tuple | list) else ()
            require(
                bool(rounds) and all(isinstance(item, RecordedRound) for item in rounds),
                f"{location}: rounds={session.rounds!r:.60} must be RecordedRounds, at least one: write (RecordedRound(800, 60),)",
            )

            require(
                session.prompt is None or len(rounds) == 1,
                f"{location}: a prompt is the text of one round, and it has {len(rounds)}: leave it out",
            )

            def plain(name: str, value: object, prefix: str = f"{location}: ") -> Any:
                result = _NUMBERS[name].check(value, prefix=prefix)
                return int(result) if _NUMBERS[name].kind is int else result

            checked = tuple(
                RecordedRound(*(plain(name, value) for name, value in zip(RecordedRound._fields, item, strict=True)))
                for item in rounds
            )
            prefix = None if session.prefix is None else _common_prefix(session.prefix, checked, location, names)
            yield TracedSession(
                checked, plain("arrival_s", session.arrival_s), plain("prompt", session.prompt), location, prefix
            )


def _common_prefix(prefix: object, rounds: Sequence[RecordedRound], location: str, names: PrefixNames) -> Prefix:
    """The prefix with block names that are common to all sessions."""
    if isinstance(prefix, Prefix) and len(prefix.rounds) == len(rounds):
        numbers = [prefix.block_tokens, *(number for ids in prefix.rounds for number in ids)]
        if all(type(number) is int for number in numbers) and numbers[0] >= 1 and prefix.fits(rounds):
            return Prefix(numbers[0], tuple(map(names.of, prefix.rounds)))
    raise UserError(
        f"{location}: prefix={prefix!r:.60} must be a Prefix of engines.cluster.sessions, for each round a number for every block of its "
        "prompt with its history: leave it out, or write Prefix(16, ((0, 1, 2),))"
    )


@file_cache(maxsize=16)
def _draw_trace(workload: OwnWorkload, seed: int) -> Trace:
    sessions = workload.yielded(seed)
    require(
        sessions == workload.yielded(seed),
        f"workload={workload.where!r} yields other sessions whenever it is asked for those of seed {seed}: draw them from "
        "random.Random(seed)",
    )
    knobs = ", ".join(f"{name}={value}" for name, value in workload.own.given)
    names = ("rounds", "arrival_s", "prompt")
    columns = {name: name for name in names if any(getattr(session, name) is not None for session in sessions)}
    return Trace(
        name=named_after(workload.where),
        origin=Origin(
            source="local", location=f"{workload.where} with {knobs}" if knobs else workload.where, revision=None
        ),
        sessions=sessions,
        columns=columns,
        noun="workload",
        unit="session",
        time=columns.get("arrival_s"),
    )


Traced = TraceFile | OwnWorkload
"""A source of sessions. Its ``where`` is the name that a user gave."""


def trace_source(dataset: str, knobs: TraceKnobs, requested: Mapping[str, Any]) -> Traced | None:
    """The source that a cell serves instead of a data set, if any. The cell is named after it. ``requested`` are all of its knobs."""
    workload = knobs.workload
    options: dict[str, object] = {"columns": knobs.columns, "time_unit": knobs.time_unit, "sort": knobs.sort or None}
    if workload is None:
        has_file = isinstance(knobs, RequestKnobs) and knobs.dataset_path is not None
        options |= {"time_unit": None} if has_file else {}
        options |= {"gen_length": knobs.gen_length} if isinstance(knobs, UntoldAnswers) else {}
        unused = _knobs_text(options)
        require(unused == "", f"{unused} has no effect without a workload: leave it out")
        return None
    for name in ("dataset_path", "dataset_source"):
        value = getattr(knobs, name, None)
        require(
            value in (None, "auto"), f"{name}={value!r} has no effect with workload={workload!r}: leave one of them out"
        )
    require(
        dataset == named_after(workload),
        f"dataset={dataset!r} has no effect with workload={workload!r}, after which the run is named: leave it out",
    )
    if (plugin := _own_plugin(requested)) is None:
        return TraceFile(
            where=workload,
            columns=knobs.columns,
            time_unit=knobs.time_unit,
            sort=knobs.sort,
            gen_length=requested.get("gen_length"),
        )
    unused = _knobs_text({**options, "gen_length": requested.get("gen_length")})
    require(unused == "", f"{unused} has no effect with workload={workload!r}, which is no file: leave it out")
    return OwnWorkload(own=plugin)


def _knobs_text(knobs: Mapping[str, object]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in knobs.items() if value is not None)


def workload_knobs(requested: Mapping[str, Any]) -> Mapping[str, Knob]:
    """The knobs of a user's own workload. A file has none."""
    plugin = _own_plugin(requested)
    return {} if plugin is None else plugin.knobs


def _own_plugin(requested: Mapping[str, Any]) -> Plugin | None:
    """A user's own workload with only its own knobs, so that all systems of a comparison serve the same."""
    spec = place_of(str(requested.get("workload") or ""))
    if spec is None:
        return None
    knobs = knobs_of_policy(Plugin(kind=WORKLOAD, where=spec).target)
    values = tuple((name, requested[name]) for name in knobs if requested.get(name) is not None)
    return Plugin(kind=WORKLOAD, where=spec, given=values)


# -- which sessions come, and when ---------------------------------------------------------------------------

MOST_SERVED = 10**6
PREFIXES_UNUSED = "hash_ids not used: every prompt counts as its own"


@dataclass(frozen=True, kw_only=True)
class Served:
    """Sessions of a recorded set with their arrival times, in seconds from the first one."""

    trace: Trace
    sessions: Sequence[TracedSession]
    arrival_s: tuple[float, ...]
    description: str
    """A description of the set and of how we used it."""
    repeated: str
    """A clause if sessions or turns are repeated, else empty."""


def trace_of(source: Traced, seed: int) -> Trace:
    """The recorded set of a file, which is the same for every seed, or of a user's own workload. Only a file imports readers of files."""
    if isinstance(source, OwnWorkload):
        return source.trace(seed)
    from repro.workloads.table import read_trace

    return read_trace(source)


def local_trace(card: Card, local: Local[Any], sessions: Sequence[TracedSession]) -> Trace:
    """The recorded set of a user's file for a card."""
    time = "arrival_s" if any(session.arrival_s is not None for session in sessions) else None
    return Trace(name=card.name, origin=local.origin, sessions=sessions, columns={}, unit="session", time=time)


def take_from(
    source: Traced,
    arrivals: ArrivalConfig | None,
    seed: int,
    *,
    num: int | None = None,
    in_rounds: bool = False,
    keep: Sequence[TracedSession] | None = None,
    is_sample: bool = False,
    with_prefixes: bool = False,
) -> Served:
    """Take ``num`` sessions of a source, as ``take`` does; None takes as many as there are. Raises UserError for options of times that
    have no effect, except for a sample to plan by, which arrives at other times than the run. Without ``with_prefixes`` the sessions do
    not know which tokens they share."""
    trace = trace_of(source, seed)
    if isinstance(source, TraceFile) and not is_sample and (arrivals is None or arrivals.kind != "trace"):
        fix = "has no effect where a file's times are not used: leave it out, or give --arrivals trace"
        require(source.time_unit is None or trace.uses_times, f"time_unit={source.time_unit!r} {fix}")
        require(not source.sort or trace.num_rounds > len(trace.sessions), f"sort {fix}")
    available = _size(trace.sessions if keep is None else keep, in_rounds=in_rounds)
    require(
        (available if num is None else num) <= MOST_SERVED,
        f"workload={source.where!r} has {available:,}, more than the {MOST_SERVED:,} that a run may have: give num_prompts",
    )
    chosen = take(trace, arrivals, seed, num=available if num is None else num, in_rounds=in_rounds, keep=keep)
    if block_of(chosen.sessions) is None:
        return chosen
    if with_prefixes:
        return replace(chosen, sessions=_with_own_blocks(chosen.sessions, len(trace.sessions)))
    bare = tuple(session._replace(prefix=None) for session in chosen.sessions)
    return replace(chosen, sessions=bare, description=f"{chosen.description}; {PREFIXES_UNUSED}")


def _with_own_blocks(sessions: Sequence[TracedSession], num: int) -> Sequence[TracedSession]:
    """Give repeated sessions (after each ``num``) block names of their own, because no cache has seen a repeat's prompt."""
    if len(sessions) <= num:
        return sessions
    prefixes = [session.prefix for session in sessions if session.prefix is not None]
    stride = 1 + max((max(names, default=0) for prefix in prefixes for names in prefix.rounds), default=0)
    distinct = list(sessions[:num])
    for index, session in enumerate(sessions[num:], start=num):
        if (prefix := session.prefix) is not None:
            shift = stride * (index // num)
            rounds = tuple(tuple(name + shift for name in names) for names in prefix.rounds)
            session = session._replace(prefix=prefix._replace(rounds=rounds))
        distinct.append(session)
    return distinct


def take(
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
    """Take ``num`` sessions of a recorded set, or with ``in_rounds`` as many sessions as have ``num`` rounds.

    If the set's own times are replayed, sessions come in its order, each once unless ``comes_once`` is False. Otherwise they come in
    random order, and again if there are too few. ``keep`` replaces the set's sessions. ``stream`` and ``step`` name the random stream
    that shuffles. Without ``arrivals`` all times are 0.
    """
    source = trace.sessions if keep is None else keep
    is_replayed = arrivals is not None and arrivals.kind == "trace"
    available = _size(source, in_rounds=in_rounds)
    require(
        not (is_replayed and comes_once) or num <= available,
        f"num_prompts={num} is more than the {available} of {trace.origin.location}, which come once at arrivals='trace': ask for "
        f"{available} (--num-prompts {available}), or for other arrivals",
    )
    stamps = _stamps(trace, source) if is_replayed else None
    sessions: Sequence[TracedSession]
    if is_replayed and comes_once and isinstance(source, PlainSessions):
        sessions = source[:num]
    else:
        order = cycle(range(len(source))) if is_replayed else shuffled(len(source), seed, *stream, step=step)
        sessions = tuple(_until((source[index] for index in order), num, in_rounds=in_rounds))
    times = [0.0] * len(sessions)
    if arrivals is not None:
        times = arrival_times(arrivals, len(sessions), seed, trace_s=stamps).tolist()
    num_served = _size(sessions, in_rounds=in_rounds)
    unit, repeated = "turn" if in_rounds else trace.unit, ""
    if num_served > available:
        repeated = f"; {num_served - available} of {num_served} {unit}s repeat one of the {trace.noun}'s {available}"
    return Served(
        trace=trace,
        sessions=sessions,
        arrival_s=tuple(times),
        description=_description(trace, arrivals, times) + repeated,
        repeated=repeated,
    )


def _size(sessions: Sequence[TracedSession], *, in_rounds: bool) -> int:
    return sum(len(session.rounds) for session in sessions) if in_rounds else len(sessions)


def _until(sessions: Iterable[TracedSession], num: int, *, in_rounds: bool) -> Iterator[TracedSession]:
    if not in_rounds:
        yield from islice(sessions, num)
        return
    for session in sessions:
        yield session
        num -= len(session.rounds)
        if num <= 0:
            return


def _stamps(trace: Trace, sessions: Sequence[TracedSession]) -> Floats:
    """Return the set's own times. Raises UserError if they fall: an unsorted file may be two files, or change its unit halfway."""
    column, location = trace.time, trace.origin.location
    require(trace.unclear is None, trace.unclear or "")
    if column is None and (trace.noun == "workload" or not trace.columns):
        raise UserError(
            f"arrivals='trace': {location} has no arrival_s for its sessions: give each one, or use other arrivals"
        )
    if column is None:
        raise UserError(
            f"arrivals='trace': {location} has no column of times among {', '.join(trace.columns.values())}: name one "
            "with --columns arrival_s=..., or use other arrivals"
        )
    if isinstance(sessions, PlainSessions) and sessions.arrival_s is not None:
        return sessions.arrival_s
    untimed = next((session for session in sessions if session.arrival_s is None), None)
    if untimed is not None:
        raise bad_field(
            untimed.where, column, None, "the first row of a session has no time: give it one, or use other arrivals"
        )
    stamps = np.array([session.arrival_s for session in sessions], dtype=np.float64)
    if (falls := np.flatnonzero(np.diff(stamps) < 0)).size:
        index = int(falls[0]) + 1
        previous, current = float(stamps[index - 1]), float(stamps[index])
        fix = (
            "sort the file, or give --sort" if trace.noun == "file" else "sort the workload by it for arrivals='trace'"
        )
        raise bad_field(sessions[index].where, column, current, f"earlier than {previous} before it: {fix}")
    return stamps


def _description(trace: Trace, arrivals: ArrivalConfig | None, times: list[float]) -> str:
    columns = ", ".join(name if name == column else f"{name}={column}" for name, column in trace.columns.items())
    content = "sessions" if trace.noun == "workload" else f"rows or sessions, columns {columns}"
    num = trace.num_rounds
    if num > len(trace.sessions):
        content = f"{content}, {num} rounds"
    parts = [f"{trace.origin.location}: {len(trace.sessions)} {content}"]
    if trace.num_dropped:
        parts.append(f"{trace.num_dropped} rows without a prompt or an answer left out")
    parts += trace.remarks
    if arrivals is not None and arrivals.kind == "trace":
        how = f"as {trace.how}" if arrivals.rate is None else f"stretched to {arrivals.rate:g} a second"
        if arrivals.time_scale not in (None, 1):
            how = f"divided by {arrivals.time_scale:g}"
        span_s = times[-1] - times[0]
        rate = f", {(len(times) - 1) / span_s:,.3g} a second" if span_s > 0 else ""
        unit = "" if trace.time_unit is None else f", {trace.time} in {trace.time_unit}"
        begin = f" begin in {times[-1]:g} s" if trace.uses_times else f" in {times[-1]:g} s"
        rows = f", all rows in {trace.span_s:g} s" if trace.uses_times and trace.span_s is not None else ""
        parts.append(f"times {how}, {len(times)}{begin}{rate}{unit}{rows}")
    elif trace.time is not None:
        parts.append(f"times of the {trace.noun} not used")
    return "; ".join(parts)
