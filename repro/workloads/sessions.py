"""A session workload: sessions with arrivals and delays, their origin, and the card from which we draw them, read from
``datasets/sessions/<name>.yaml``.

Lengths, arrivals and delays have random streams of their own. So at another rate the same sessions arrive in the same
pattern, stretched.

We draw sessions so that a sample meets its card's means exactly: a mean such as 703.79 is that of one trace of 99 sessions.
Rounds, prefill and decode tokens sum to the mean times the number of sessions, rounded to a whole number. Only their spread over
sessions and rounds is random. So the first n sessions of a longer sample are not a shorter sample.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import islice
from pathlib import Path
from typing import Annotated, Generic, Literal

import numpy as np

from engines.cluster.sessions import Prefix, PrefixNames, Round, Session, SessionColumns, contexts_of
from engines.errors import UserError, require
from engines.knobs import Checked, Range, Seed
from repro.paths import DATASETS
from repro.workloads.card import (
    LocalFile,
    Origin,
    Provenance,
    ProvenanceOf,
    Section,
    SourcedCard,
    checksum,
    chosen_file,
    embedded_origin,
    known_cards,
    load,
)
from repro.workloads.draws import ArrivalConfig, Floats, Ints, arrival_times, derive_seed
from repro.workloads.rounds import MOST_DELAY_S, PlainSessions, RecordedRound, SessionFormat, TracedSession
from repro.workloads.served import Traced, local_trace, take, take_from

Lengths = Literal["per_session", "per_round"]
"""Whether the table's prefill and decode lengths are means over sessions (all tokens of a session) or over rounds."""
Delay = Annotated[float, Range(0, MOST_DELAY_S)]
Mean = Annotated[float, Range(above=0, most=1e9)]
Sigma = Annotated[float, Range(0, 100)]


@dataclass(frozen=True, kw_only=True)
class RoundCounts(Section):
    """The number of rounds of a session: 1 + a random count whose mean is ``mean`` - 1, or always the same number."""

    kind: Literal["fixed", "poisson", "negative_binomial"]
    mean: Annotated[float, Range(1, 1e6)]
    shape: Mean | None = None
    """The shape of a negative binomial; a smaller one spreads more."""


@dataclass(frozen=True, kw_only=True)
class LengthTotals(Section):
    """The means of Table 1, and how sessions and rounds scatter around them (log-normal, sigma of the logarithm)."""

    counted: Lengths
    prefill_tokens: Mean
    decode_tokens: Mean
    session_sigma: Sigma
    round_sigma: Sigma
    first_round_weight: Mean = 1.0
    """The expected share of the first prompt in a session's prefill tokens, relative to a later round's share."""
    grows_with_rounds: bool
    """Whether a session of more rounds has more tokens (agents) or the same number (a fixed number of retrievals)."""


@dataclass(frozen=True, kw_only=True)
class Environment(Section):
    """The time between the rounds of a session, exponentially distributed."""

    delay_mean_s: Delay


@dataclass(frozen=True, kw_only=True)
class SessionFile(LocalFile):
    format: SessionFormat


@dataclass(frozen=True, kw_only=True)
class SessionCard(SourcedCard):
    folder = "sessions"
    rounds: RoundCounts
    lengths: LengthTotals
    environment: Environment
    local: tuple[SessionFile, ...]
    num_gpus: Annotated[int, Range(1, 10**6)]
    """How many GPUs the paper's run used."""
    paper_sessions: Annotated[int, Range(1, 10**6)]


def known_session_cards() -> tuple[str, ...]:
    return known_cards(DATASETS / SessionCard.folder)


@cache
def load_session_card(name: str) -> SessionCard:
    return load(SessionCard, name, unknown=f"trace={name!r} is unknown")


Source = Literal["embedded", "local"]


@dataclass(frozen=True, kw_only=True)
class SessionWorkloadConfig(Checked):
    """The sessions to make. None takes the card's value.

    ``source`` local reads the card's file from the data directory, or ``trace_path``. ``meets_totals`` scales its lengths
    to the card's means; False keeps the recorded lengths. ``file`` is served instead of a trace, without a card.
    """

    trace: str
    num_sessions: Annotated[int, Range(1, 10**6)]
    seed: Seed
    arrivals: ArrivalConfig
    source: Source = "embedded"
    trace_path: str | None = None
    meets_totals: bool = True
    counted: Lengths | None = None
    delay_mean_s: Delay | None = None
    file: Traced | None = None
    is_sample: bool = False
    """Whether these sessions are a sample by which policies plan, at a rate of their own."""
    with_prefixes: bool = False
    """Whether sessions know which tokens they share."""
    system_prompts: int | None = None
    """How many system prompts there are, of ``system_tokens`` each. Every session begins with one of them."""
    system_tokens: int = 0


@dataclass(frozen=True, kw_only=True)
class SessionProvenance(Provenance):
    means: dict[str, float]
    """The mean rounds, prefill_tokens and decode_tokens per session of this sample."""


@dataclass(frozen=True, kw_only=True)
class SessionWorkload(Generic[ProvenanceOf]):
    """Sessions to serve. Conversations have ``arrival_s`` 0 unless a file is replayed, because their family decides when they come."""

    name: str
    sessions: Sequence[Session]
    provenance: ProvenanceOf

    @property
    def num_turns(self) -> int:
        """The number of rounds of all sessions."""
        return sum(len(session.rounds) for session in self.sessions)

    @cached_property
    def longest_tokens(self) -> int:
        return int(contexts_of(self.sessions).max())


def build_sessions(
    config: SessionWorkloadConfig, *, data_dir: Path | None = None
) -> SessionWorkload[SessionProvenance]:
    """Make the sessions of ``config``: those of a file as they are, recorded ones of a trace, or drawn ones."""
    if config.file is not None:
        return _file_workload(config, config.file)
    card = load_session_card(config.trace)
    num, totals, chosen = config.num_sessions, card.lengths, None
    if config.counted is not None:
        totals = replace(totals, counted=config.counted)
    local = chosen_file(card, config.source, config.trace_path, data_dir)
    if local is not None:
        from repro.workloads.recorded import read_sessions

        trace = local_trace(card, local, read_sessions(local.paths[0], local.entry and local.entry.format))
        chosen = take(trace, config.arrivals, config.seed, num=num, stream=("sample",), step=len(trace.sessions))
        lengths = "scaled to the card's means" if config.meets_totals else "as recorded"
        origin = trace.origin
        description = (
            f"{card.title}: recorded sessions, lengths {lengths}; lengths the file lacks are drawn{chosen.repeated}"
        )
        rounds, arrival_s = np.array([len(each.rounds) for each in chosen.sessions], dtype=np.int64), chosen.arrival_s
    else:
        require(config.meets_totals, "meets_totals=False has no effect with source='embedded': it always meets them")
        require(
            config.arrivals.kind != "trace",
            "arrivals='trace' needs a local file with an arrival_s for every session: use 'poisson'",
        )
        unit = "session" if totals.counted == "per_session" else "round"
        origin = embedded_origin(card)
        description = f"{card.title}: embedded generator, means per {unit} met by construction, spread assumed"
        rounds = draw_rounds(card.rounds, num, config.seed)
        arrival_s = tuple(arrival_times(config.arrivals, num, config.seed).tolist())
    recorded = [entry for session in chosen.sessions for entry in session.rounds] if chosen is not None else []
    prefill, decode = _lengths(config, totals, recorded, rounds)
    delays = _delays(config, card, recorded, int(rounds.sum()))
    entries = map(Round, prefill.tolist(), decode.tolist(), delays.tolist())
    session_rounds = [tuple(islice(entries, count)) for count in rounds.tolist()]
    prefixes: list[Prefix | None] = [None] * num
    if config.system_prompts is not None:
        session_rounds, prefixes = _with_system_prompts(config, config.system_prompts, session_rounds)
        description += (
            f"; each begins with one of {config.system_prompts} system prompts of {config.system_tokens} tokens"
        )
    return _workload(card.name, _objects(arrival_s, session_rounds, prefixes), origin, description)


def _objects(
    arrival_s: Sequence[float], rounds: Sequence[tuple[Round, ...]], prefixes: Sequence[Prefix | None]
) -> tuple[Session, ...]:
    return tuple(map(Session, range(len(rounds)), arrival_s, rounds, prefixes))


SYSTEM_BLOCK = 16
"""Tokens in each block, for sessions with system prompts."""


def _with_system_prompts(
    config: SessionWorkloadConfig, num: int, rounds: Sequence[tuple[Round, ...]]
) -> tuple[list[tuple[Round, ...]], list[Prefix | None]]:
    """Put a drawn system prompt in front of each session, and name the blocks of its growing conversation."""
    rng = np.random.default_rng(derive_seed(config.seed, "system prompts"))
    names, num_shared = PrefixNames(), config.system_tokens // SYSTEM_BLOCK
    longer, prefixes = list[tuple[Round, ...]](), list[Prefix | None]()
    for index, (turns, drawn) in enumerate(zip(rounds, rng.integers(num, size=len(rounds)).tolist(), strict=True)):
        first = turns[0]._replace(prefill_tokens=turns[0].prefill_tokens + config.system_tokens)
        longer.append((first, *turns[1:]))
        ends, context = [], 0
        for prefill, decode, _ in longer[-1]:
            ends.append(-(-(context + prefill) // SYSTEM_BLOCK))
            context += prefill + decode
        blocks = names.of([drawn] * num_shared + [num + index] * (ends[-1] - num_shared))
        prefixes.append(Prefix(SYSTEM_BLOCK, tuple(blocks[:end] for end in ends)))
    return longer, prefixes if config.with_prefixes else [None] * len(rounds)


def _workload(
    name: str, sessions: Sequence[Session], origin: Origin, description: str
) -> SessionWorkload[SessionProvenance]:
    num = len(sessions)
    if isinstance(sessions, SessionColumns):
        totals = num, int(sessions.prefill.sum()), int(sessions.decode.sum())
    else:
        turns = [turn for session in sessions for turn in session.rounds]
        totals = len(turns), sum(turn.prefill_tokens for turn in turns), sum(turn.decode_tokens for turn in turns)
    return SessionWorkload(
        name=name,
        sessions=sessions,
        provenance=SessionProvenance(
            **vars(origin),
            description=description,
            checksum=checksum(_lines(sessions)),
            means=dict(
                zip(("rounds", "prefill_tokens", "decode_tokens"), (total / num for total in totals), strict=True)
            ),
        ),
    )


def _lines(sessions: Sequence[Session]) -> Iterator[str]:
    """Yield the lines over which a workload's checksum is taken."""
    if isinstance(sessions, SessionColumns):
        columns = sessions.arrival_s.tolist(), sessions.prefill.tolist(), sessions.decode.tolist()
        for index, (arrival_s, prefill, decode) in enumerate(zip(*columns, strict=True)):
            yield f"{index}|{arrival_s:.6f}|(Round(prefill_tokens={prefill}, decode_tokens={decode}, delay_s=0.0),)"
        return
    for session in sessions:
        yield f"{session.session_id}|{session.arrival_s:.6f}|{session.rounds}"
        if session.prefix is not None:
            yield repr(tuple(session.prefix))


def _file_workload(config: SessionWorkloadConfig, file: Traced) -> SessionWorkload[SessionProvenance]:
    """Make sessions of a file's rows as they are. We draw nothing except delays that are asked for."""
    chosen = take_from(
        file,
        config.arrivals,
        config.seed,
        num=config.num_sessions,
        is_sample=config.is_sample,
        with_prefixes=config.with_prefixes,
    )
    mean_s, drawn, plain = config.delay_mean_s, iter([0.0]), chosen.sessions
    if isinstance(plain, PlainSessions) and mean_s is None:
        times = np.array(chosen.arrival_s)
        columns = SessionColumns(times, plain.prefill, plain.decode)
        text = f"{chosen.description}; {chosen.trace.how} sessions, lengths as {chosen.trace.how}"
        return _workload(chosen.trace.name, columns, chosen.trace.origin, text)
    if mean_s is not None:
        num = sum(len(session.rounds) for session in chosen.sessions)
        drawn = iter(_exponential(mean_s, num, config.seed).tolist())

    def rounds_of(session: TracedSession) -> Iterator[Round]:
        for prefill, decode, delay_s in session.rounds:
            if decode is None:
                raise UserError(
                    f"{session.where}: a turn has no answer, whose tokens are served here: give --gen-length, or take the row out"
                )
            yield Round(prefill, decode, (delay_s or 0.0) if mean_s is None else next(drawn))

    rounds = [tuple(rounds_of(session)) for session in chosen.sessions]
    delays = "" if mean_s is None else f"; delays between rounds drawn, {mean_s:g} s on the mean"
    if mean_s is None and any(entry.delay_s is None for session in chosen.sessions for entry in session.rounds[:-1]):
        delays = "; rounds without a delay follow at once"
    how = chosen.trace.how
    description = f"{chosen.description}; {how} sessions, lengths as {how}{delays}"
    prefixes = [session.prefix for session in chosen.sessions]
    return _workload(chosen.trace.name, _objects(chosen.arrival_s, rounds, prefixes), chosen.trace.origin, description)


def _lengths(
    config: SessionWorkloadConfig, totals: LengthTotals, recorded: Sequence[RecordedRound], rounds: Ints
) -> tuple[Ints, Ints]:
    """Return the prefill and decode tokens of every round, for all sessions one after the other.

    With ``meets_totals`` we scale recorded lengths to the drawn sums. We draw lengths that were not recorded. A file that is served as it
    is needs no draws.
    """
    is_whole = bool(recorded) and all(entry.decode_tokens is not None for entry in recorded)
    if is_whole and not config.meets_totals:
        require(
            config.counted is None,
            f"counted={config.counted!r} has no effect on recorded sessions that are served as they are: leave it out",
        )
        whole = np.array([entry[:2] for entry in recorded], dtype=np.int64)
        return whole[:, 0], whole[:, 1]
    drawn_prefill, drawn_decode = draw_lengths(totals, rounds, config.seed)
    if not recorded:
        return drawn_prefill, drawn_decode
    prefill = [entry.prefill_tokens for entry in recorded]
    pairs = zip(recorded, drawn_decode.tolist(), strict=True)
    decode = [drawn if entry.decode_tokens is None else entry.decode_tokens for entry, drawn in pairs]
    if not config.meets_totals:
        return np.array(prefill, dtype=np.int64), np.array(decode, dtype=np.int64)
    return _scaled(prefill, int(drawn_prefill.sum())), _scaled(decode, int(drawn_decode.sum()))


def _scaled(tokens: list[int], total: int) -> Ints:
    return 1 + apportion(np.array(tokens, dtype=np.int64).astype(np.float64), total - len(tokens))


def _delays(config: SessionWorkloadConfig, card: SessionCard, recorded: Sequence[RecordedRound], num: int) -> Floats:
    """Return the delays of all rounds: recorded ones if there are any, else draws from an exponential distribution."""
    mean_s = card.environment.delay_mean_s if config.delay_mean_s is None else config.delay_mean_s
    drawn = _exponential(mean_s, num, config.seed)
    for index, entry in enumerate(recorded if config.delay_mean_s is None else ()):
        if entry.delay_s is not None:
            drawn[index] = entry.delay_s
    return drawn


def _exponential(mean_s: float, num: int, seed: int) -> Floats:
    rng = np.random.default_rng(derive_seed(seed, "delays"))
    return np.round(-np.log1p(-rng.random(num)) * mean_s, 6)


def draw_rounds(counts: RoundCounts, num: int, seed: int) -> Ints:
    """Draw the number of rounds of each session, at least 1. Their sum is the mean times ``num``."""
    if counts.kind == "fixed":
        return np.full(num, int(counts.mean), dtype=np.int64)
    rng = np.random.default_rng(derive_seed(seed, "rounds"))
    extra = counts.mean - 1
    if counts.kind == "poisson":
        drawn = rng.poisson(extra, num)
    else:
        assert counts.shape is not None
        drawn = rng.negative_binomial(counts.shape, counts.shape / (counts.shape + extra), num)
    return 1 + apportion(drawn.astype(np.float64) + 1e-9, round(extra * num))


def draw_lengths(totals: LengthTotals, rounds: Ints, seed: int) -> tuple[Ints, Ints]:
    """Draw the prefill and decode tokens of every round, at least 1 each, for all sessions one after the other."""
    sizes = []
    for name, mean in (("prefill", totals.prefill_tokens), ("decode", totals.decode_tokens)):
        rng = np.random.default_rng(derive_seed(seed, name))
        per_session = np.exp(totals.session_sigma * rng.standard_normal(len(rounds)))
        weight = np.exp(totals.round_sigma * rng.standard_normal(int(rounds.sum())))
        if name == "prefill":
            first = np.cumsum(rounds) - rounds
            weight[first] *= totals.first_round_weight
        num = len(rounds) if totals.counted == "per_session" else int(rounds.sum())
        # With means per round, a session of more rounds has more tokens, whatever the card says.
        if totals.grows_with_rounds or totals.counted == "per_round":
            per_session = per_session * rounds
        total = round(mean * num)
        require(
            total >= rounds.sum(),
            f"{name}_tokens={mean}: {num} of them are fewer than the {rounds.sum()} rounds, which need a token each",
        )
        spare = apportion(per_session, total - int(rounds.sum()))
        sizes.append(1 + apportion(weight, spare, rounds))
    return sizes[0], sizes[1]


def apportion(weight: Floats, totals: Ints | int, sizes: Ints | None = None) -> Ints:
    """Return whole numbers proportional to ``weight`` that sum to ``totals`` (largest remainders). Groups lie one after the other:
    group g has ``sizes[g]`` weights and sums to ``totals[g]``. Without ``sizes`` all weights are one group."""
    totals, sizes = np.atleast_1d(totals), np.array([len(weight)]) if sizes is None else sizes
    group = np.repeat(np.arange(len(sizes)), sizes)
    sums = np.bincount(group, weights=weight, minlength=len(sizes))
    exact = weight * (totals / sums)[group]
    floors = np.floor(exact).astype(np.int64)
    remaining = totals - np.bincount(group, weights=floors, minlength=len(sizes)).astype(np.int64)
    order = np.lexsort((floors - exact, group))  # the largest remainder of each group first
    rank = np.empty(len(weight), dtype=np.int64)
    rank[order] = np.arange(len(weight)) - (np.cumsum(sizes) - sizes)[group]
    return floors + (rank < remaining[group])
