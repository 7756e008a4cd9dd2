"""A session workload: sessions with arrivals and delays, and where they came from.

Lengths, arrivals and delays have streams of their own: at another rate the same sessions arrive in the same
pattern, stretched.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Literal

import numpy as np

from engines.ar.session import OpenLoop, Round, Session
from engines.errors import UserError, require
from repro.workloads.arrivals import ArrivalConfig, arrival_times
from repro.workloads.data_dir import DATA_DIR_VARIABLE, file_digest, find_data_dir
from repro.workloads.seed import derive_seed
from repro.workloads.sessions.card import (
    Lengths,
    LengthTotals,
    SessionCard,
    SessionFile,
    check_delay,
    load_session_card,
)
from repro.workloads.sessions.generator import Ints, apportion_within, draw_lengths, draw_rounds
from repro.workloads.sessions.traces import RecordedRound, RecordedSession, read_sessions, repeats

Source = Literal["embedded", "local"]


@dataclass(frozen=True, kw_only=True)
class SessionWorkloadConfig:
    """None takes the card's value.

    ``source`` local reads the card's file from the data directory, or ``trace_path``. ``meets_totals`` scales what
    it holds to the card's means; False keeps the recorded lengths.
    """

    trace: str
    num_sessions: int
    seed: int
    arrivals: ArrivalConfig
    source: Source = "embedded"
    trace_path: str | None = None
    meets_totals: bool = True
    counted: Lengths | None = None
    delay_mean_s: float | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "trace", self.trace.lower())
        require(self.num_sessions >= 1, f"num_sessions={self.num_sessions} must be at least 1")
        require(self.seed >= 0, f"seed={self.seed} must not be negative")
        if self.source not in ("embedded", "local"):
            raise UserError(f"source={self.source!r} is unknown: use embedded or local")
        if self.source == "embedded":
            require(self.trace_path is None, f"trace_path={self.trace_path!r} has no effect with source='embedded'")
            require(self.meets_totals, "meets_totals=False has no effect with source='embedded': it always meets them")
        if self.delay_mean_s is not None:
            check_delay("delay_mean_s", self.delay_mean_s)


@dataclass(frozen=True, kw_only=True)
class SessionProvenance:
    source: Source
    location: str
    revision: str | None
    """``sha256:...`` of a local file."""
    description: str
    checksum: str
    means: dict[str, float]
    """Rounds, prefill_tokens and decode_tokens per session, of this sample."""


@dataclass(frozen=True, kw_only=True)
class SessionWorkload:
    name: str
    sessions: tuple[Session, ...]
    provenance: SessionProvenance

    @cached_property
    def longest_tokens(self) -> int:
        return max(session.context_tokens for session in self.sessions)

    @property
    def arrivals(self) -> OpenLoop:
        return OpenLoop(sessions=self.sessions)


def build_sessions(config: SessionWorkloadConfig, *, data_dir: Path | None = None) -> SessionWorkload:
    card = load_session_card(config.trace)
    totals = card.lengths if config.counted is None else replace(card.lengths, counted=config.counted)
    location, revision = f"datasets/sessions/{card.name}.yaml", None
    description = _describe(card, totals.counted, config)
    recorded: tuple[RecordedSession, ...] = ()
    if config.source == "local":
        path, entry, location = _local_file(card, config, data_dir)
        held = read_sessions(path, entry.format)
        require(
            config.arrivals.kind != "trace" or config.num_sessions <= len(held),
            f"num_prompts={config.num_sessions} is more than the sessions of {path.name}, which come once at "
            f"arrivals='trace': use --num-prompts {len(held)}, or other arrivals",
        )
        recorded, revision = _sampled(held, config), file_digest(path)
        description += repeats(len(recorded), len(held), "session")
        rounds = np.array([len(session.rounds) for session in recorded], dtype=np.int64)
    else:
        rounds = draw_rounds(card.rounds, config.num_sessions, config.seed)
    prefill, decode = _lengths(config, totals, recorded, rounds)
    delays = _delays(config, card, recorded, int(rounds.sum()))
    times = _arrivals(config, recorded)

    sessions = []
    start = 0
    for index, count in enumerate(rounds.tolist()):
        part = slice(start, start + count)
        entries = map(Round, prefill[part].tolist(), decode[part].tolist(), delays[part].tolist())
        sessions.append(Session(index, times[index], tuple(entries)))
        start += count
    means = {
        "rounds": float(rounds.mean()),
        "prefill_tokens": float(prefill.sum() / len(rounds)),
        "decode_tokens": float(decode.sum() / len(rounds)),
    }
    return SessionWorkload(
        name=card.name,
        sessions=tuple(sessions),
        provenance=SessionProvenance(
            source=config.source,
            location=location,
            revision=revision,
            description=description,
            checksum=_checksum(sessions),
            means=means,
        ),
    )


def _local_file(
    card: SessionCard, config: SessionWorkloadConfig, data_dir: Path | None
) -> tuple[Path, SessionFile, str]:
    if config.trace_path is not None:
        path = Path(config.trace_path)
        known = (entry for entry in card.local if Path(entry.path).name == path.name)
        return path, next(known, SessionFile(path=path.name, format="sessions_jsonl")), path.name
    directory = find_data_dir(data_dir)
    for entry in card.local:
        if directory is not None and (directory / entry.path).is_file():
            return directory / entry.path, entry, entry.path
    accepted = ", ".join(entry.path for entry in card.local) or "none, give trace_path"
    raise UserError(
        f"source='local': no file for trace {card.name!r} in {repr(str(directory)) if directory else 'any data directory'}: "
        f"set {DATA_DIR_VARIABLE} to a folder with one of {accepted}"
    )


def _sampled(recorded: tuple[RecordedSession, ...], config: SessionWorkloadConfig) -> tuple[RecordedSession, ...]:
    """In file order where the trace's own times are replayed, else in random order, again and again as needed."""
    order: list[int] = []
    while len(order) < config.num_sessions:
        if config.arrivals.kind == "trace":
            order.extend(range(len(recorded)))
        else:
            rng = np.random.default_rng(derive_seed(config.seed, "sample", len(order)))
            order.extend(rng.permutation(len(recorded)).tolist())
    return tuple(recorded[index] for index in order[: config.num_sessions])


def _lengths(
    config: SessionWorkloadConfig, totals: LengthTotals, recorded: tuple[RecordedSession, ...], rounds: Ints
) -> tuple[Ints, Ints]:
    """Of every round, all sessions one after the other. Nothing is drawn for a file that is served as it is."""
    flat = [entry for session in recorded for entry in session.rounds]
    if flat and not config.meets_totals and all(entry.decode_tokens is not None for entry in flat):
        require(
            config.counted is None,
            f"counted={config.counted!r} has no effect on recorded sessions that are served as they are: leave it out",
        )
        prefill, decode, _ = zip(*flat, strict=True)
        return np.array(prefill, dtype=np.int64), np.array(decode, dtype=np.int64)
    drawn = draw_lengths(totals, rounds, config.seed)
    return _recorded_lengths(flat, *drawn, scaled=config.meets_totals) if flat else drawn


def _recorded_lengths(
    flat: list[RecordedRound], drawn_prefill: Ints, drawn_decode: Ints, *, scaled: bool
) -> tuple[Ints, Ints]:
    """Recorded lengths, decode lengths nobody recorded as drawn. ``scaled``: to the sums that were drawn."""
    prefill = np.array([entry.prefill_tokens for entry in flat], dtype=np.int64)
    decode = np.array(
        [
            drawn if entry.decode_tokens is None else entry.decode_tokens
            for entry, drawn in zip(flat, drawn_decode.tolist(), strict=True)
        ],
        dtype=np.int64,
    )
    if not scaled:
        return prefill, decode
    whole = np.array([len(prefill)])
    return (
        1 + apportion_within(prefill.astype(np.float64), np.array([drawn_prefill.sum() - len(prefill)]), whole),
        1 + apportion_within(decode.astype(np.float64), np.array([drawn_decode.sum() - len(decode)]), whole),
    )


def _delays(
    config: SessionWorkloadConfig, card: SessionCard, recorded: tuple[RecordedSession, ...], num: int
) -> np.ndarray:
    """Recorded delays where there are any; drawn from an exponential else."""
    mean_s = card.environment.delay_mean_s if config.delay_mean_s is None else config.delay_mean_s
    rng = np.random.default_rng(derive_seed(config.seed, "delays"))
    drawn = np.round(-np.log1p(-rng.random(num)) * mean_s, 6)
    known = [entry.delay_s for session in recorded for entry in session.rounds]
    for index, delay_s in enumerate(known):
        if delay_s is not None and config.delay_mean_s is None:
            drawn[index] = delay_s
    return drawn


def _arrivals(config: SessionWorkloadConfig, recorded: tuple[RecordedSession, ...]) -> list[float]:
    trace_s = None
    if config.arrivals.kind == "trace":
        stamps = [session.arrival_s for session in recorded]
        if not stamps or None in stamps:
            raise UserError("arrivals='trace' needs a local file with an arrival_s for every session: use 'poisson'")
        trace_s = np.array(stamps, dtype=np.float64)
        if (np.diff(trace_s) < 0).any():
            raise UserError(
                f"{config.trace_path or config.trace}: arrival_s must rise from line to line: sort the file"
            )
    return [float(time) for time in arrival_times(config.arrivals, config.num_sessions, config.seed, trace_s=trace_s)]


def _describe(card: SessionCard, counted: Lengths, config: SessionWorkloadConfig) -> str:
    unit = "session" if counted == "per_session" else "round"
    if config.source == "embedded":
        return f"{card.title}: embedded generator, means per {unit} met by construction, spread assumed"
    kept = "scaled to the card's means" if config.meets_totals else "as recorded"
    return f"{card.title}: recorded sessions, lengths {kept}; lengths the file lacks are drawn"


def _checksum(sessions: list[Session]) -> str:
    digest = hashlib.sha256()
    for session in sessions:
        digest.update(f"{session.session_id}|{session.arrival_s:.6f}|{session.rounds}\n".encode())
    return digest.hexdigest()
