"""What a cell serves in place of a data set: a file's rows, or the sessions that a workload of a user's own yields.

A workload is named as ``module:NAME``, or as an installed package names it. NAME is a class, or a function, that gives an object with
``sessions(seed)``, which yields a ``TracedSession`` each: from there on it is served as the rows of a file are.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Annotated, Any

from engines.errors import UserError, require
from engines.knobs import Checked, Knob, Range, knobs_of
from engines.policies.own import Kind, Plugin, own_knobs
from repro.files import kept
from repro.workloads.card import Origin
from repro.workloads.knobs import RequestKnobs, TraceKnobs, UntoldAnswers, named_after, place_of
from repro.workloads.rounds import MOST_DELAY_S, RecordedRound, TracedSession
from repro.workloads.rows import MOST_SECONDS, MOST_TOKENS
from repro.workloads.table import MOST_ROWS, Trace, TraceFile

WORKLOAD = Kind(name="workload", method="sessions", arguments=("seed",), offered=())


@dataclass(frozen=True, kw_only=True)
class _Yielded(Checked):
    """What the numbers of a session may be."""

    prefill_tokens: Annotated[int, Range(1, MOST_TOKENS)]
    decode_tokens: Annotated[int, Range(1, MOST_TOKENS)]
    delay_s: Annotated[float, Range(0, MOST_DELAY_S)] | None
    arrival_s: Annotated[float, Range(0, MOST_SECONDS)] | None
    prompt: str | None


_NUMBERS = knobs_of(_Yielded)


@dataclass(frozen=True, kw_only=True)
class OwnWorkload:
    """Sessions are drawn anew for every seed, and of one seed they are always the same."""

    own: Plugin

    @property
    def where(self) -> str:
        return self.own.where

    def trace(self, seed: int) -> Trace:
        return _drawn(self, seed)

    def yielded(self, seed: int) -> tuple[TracedSession, ...]:
        """Raise UserError, in a sentence, for whatever is no session, and for what its code raises."""
        said = f"workload={self.where!r}"
        try:
            given = self.own.checked().sessions(seed)
            require(hasattr(given, "__iter__"), f"{said} gives {type(given).__name__} for its sessions: yield each")
            found = tuple(islice(self._checked(given), MOST_ROWS + 1))
        except (UserError, KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:
            told = " ".join(str(error).split())
            raise UserError(f"{said} fails ({type(error).__name__}: {told}): correct it") from error
        require(found != (), f"{said} yields no session: yield at least one")
        require(len(found) <= MOST_ROWS, f"{said} yields more than {MOST_ROWS:,} sessions: end it")
        bare = next((each for each in found if (each.arrival_s is None) != (found[0].arrival_s is None)), None)
        require(
            bare is None,
            f"{said}: some sessions have an arrival_s, and others, the first of which differs in {bare and bare.where}, "
            "have none: give all one, or none",
        )
        return found

    def _checked(self, given: Any) -> Iterator[TracedSession]:
        for number, each in enumerate(given, start=1):
            where = f"{self.where}, session {number}"
            require(
                isinstance(each, TracedSession),
                f"{where} is of {type(each).__name__}: yield a TracedSession of repro.workloads.rounds",
            )
            rounds = each.rounds if isinstance(each.rounds, tuple | list) else ()
            require(
                bool(rounds) and all(isinstance(one, RecordedRound) for one in rounds),
                f"{where}: rounds={each.rounds!r:.60} must be RecordedRounds, at least one: write (RecordedRound(800, 60),)",
            )

            require(
                each.prompt is None or len(rounds) == 1,
                f"{where}: a prompt is the text of one round, and it has {len(rounds)}: leave it out",
            )

            def plain(name: str, value: object, prefix: str = f"{where}: ") -> Any:
                found = _NUMBERS[name].check(value, prefix=prefix)
                return int(found) if _NUMBERS[name].kind is int else found

            checked = tuple(
                RecordedRound(*(plain(name, value) for name, value in zip(RecordedRound._fields, one, strict=True)))
                for one in rounds
            )
            yield TracedSession(checked, plain("arrival_s", each.arrival_s), plain("prompt", each.prompt), where)


@kept(maxsize=16)
def _drawn(workload: OwnWorkload, seed: int) -> Trace:
    sessions = workload.yielded(seed)
    require(
        sessions == workload.yielded(seed),
        f"workload={workload.where!r} yields other sessions whenever it is asked for those of seed {seed}: draw them from "
        "random.Random(seed)",
    )
    names = ("rounds", "arrival_s", "prompt")
    columns = {name: name for name in names if any(getattr(each, name) is not None for each in sessions)}
    return Trace(
        name=named_after(workload.where),
        origin=Origin(source="local", location=_told(workload.own), revision=None),
        sessions=sessions,
        columns=columns,
        noun="workload",
        unit="session",
        time=columns.get("arrival_s"),
    )


def _told(own: Plugin) -> str:
    knobs = ", ".join(f"{name}={value}" for name, value in own.given)
    return f"{own.where} with {knobs}" if knobs else own.where


Traced = TraceFile | OwnWorkload
"""Has ``where``, as a user names it, and ``trace(seed)``."""


def trace_asked(dataset: str, knobs: TraceKnobs, given: Mapping[str, Any]) -> Traced | None:
    """What a cell serves in place of a data set, if anything; the cell is named after it. ``given`` are all of its knobs."""
    workload = knobs.workload
    of_file: dict[str, object] = {"columns": knobs.columns, "time_unit": knobs.time_unit, "sort": knobs.sort or None}
    said = {name: value for name, value in of_file.items() if value is not None}
    if workload is None:
        if isinstance(knobs, RequestKnobs) and knobs.dataset_path is not None:
            said.pop("time_unit", None)
        if isinstance(knobs, UntoldAnswers) and knobs.gen_length is not None:
            said["gen_length"] = knobs.gen_length
        given_alone = ", ".join(f"{name}={value!r}" for name, value in said.items())
        require(not said, f"{given_alone} has no effect without a workload: leave it out")
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
    if (own := _own(given)) is None:
        return TraceFile(
            where=workload,
            columns=knobs.columns,
            time_unit=knobs.time_unit,
            sort=knobs.sort,
            gen_length=given.get("gen_length"),
        )
    said |= {"gen_length": given["gen_length"]} if given.get("gen_length") is not None else {}
    of_none = ", ".join(f"{name}={value!r}" for name, value in said.items())
    require(not said, f"{of_none} has no effect with workload={workload!r}, which is no file: leave it out")
    return OwnWorkload(own=own)


def workload_knobs(given: Mapping[str, Any]) -> Mapping[str, Knob]:
    """Knobs of the workload of a user's own among those that are given; none of a file."""
    own = _own(given)
    return {} if own is None else own.knobs


def _own(given: Mapping[str, Any]) -> Plugin | None:
    """With its own knobs alone: systems that are compared serve the same."""
    where = place_of(str(given.get("workload") or ""))
    if where is None:
        return None
    knobs = own_knobs(Plugin(kind=WORKLOAD, where=where).named)
    told = tuple((name, given[name]) for name in knobs if given.get(name) is not None)
    return Plugin(kind=WORKLOAD, where=where, given=told)
