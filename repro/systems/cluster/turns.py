"""The turns of a run: closed loops of conversations, turns at times of their own, or conversations at a file's."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace

import numpy as np

from engines.cluster.sessions import ClosedLoop, OpenLoop, Round, Session
from engines.errors import require
from engines.laps.cluster import OpenTurns, PrefillArrivals, Turn
from repro.files import kept
from repro.workloads.conversations import ConversationConfig, ConversationProvenance, Conversations, draw_conversations
from repro.workloads.draws import ArrivalConfig, arrival_times, derive_seed

LANES = 256
"""Conversations that go on side by side in an open loop, where there are as many."""


@dataclass(frozen=True, kw_only=True)
class Stream:
    conversations: ConversationConfig
    clients: int | None
    """None: at a rate."""


@dataclass(frozen=True, kw_only=True)
class PrefillWorkloadConfig:
    streams: tuple[Stream, ...]
    arrivals: ArrivalConfig | None
    """None: closed loops."""
    think_s: float = 0.0
    length_scale: float = 1.0
    """Factor on prompts and answers after they are drawn: ``low`` and ``high`` are the data set's tokens."""

    @property
    def is_replayed(self) -> bool:
        """Whether conversations come at a file's own times."""
        return self.arrivals is not None and self.arrivals.kind == "trace"


@dataclass(frozen=True, kw_only=True)
class PrefillWorkload:
    config: PrefillWorkloadConfig
    streams: tuple[Conversations, ...]
    """Session ids are unique over all."""
    provenance: ConversationProvenance

    @property
    def arrivals(self) -> tuple[PrefillArrivals, ...]:
        config = self.config
        if config.is_replayed:
            return tuple(OpenLoop(sessions=each.sessions) for each in self.streams)
        if config.arrivals is not None:
            seed = config.streams[0].conversations.seed
            return tuple(open_turns(each, config.arrivals, seed) for each in self.streams)
        return tuple(
            ClosedLoop(sessions=each.sessions, num_clients=stream.clients or 1, think_s=config.think_s)
            for each, stream in zip(self.streams, config.streams, strict=True)
        )


_conversations = kept(maxsize=256)(draw_conversations)
"""Runs at other rates and with other clients have the same ones."""


@kept(maxsize=256)
def draw_workload(config: PrefillWorkloadConfig) -> PrefillWorkload:
    """The systems of a comparison serve the same turns."""
    streams = []
    first_id = 0
    for stream in config.streams:
        drawn = _conversations(stream.conversations)
        require(
            stream.clients is None or len(drawn.sessions) > stream.clients,
            f"num_prompts={stream.conversations.num_turns} makes {len(drawn.sessions)} conversations for {stream.clients} clients: give more",
        )
        if config.length_scale != 1:
            drawn = scaled(drawn, config.length_scale)
        sessions = drawn.sessions
        if first_id:
            sessions = tuple(replace(session, session_id=first_id + session.session_id) for session in sessions)
        first_id += len(sessions)
        streams.append(replace(drawn, sessions=sessions))
    provenance = streams[0].provenance
    if len(streams) > 1:
        checksum = hashlib.sha256(" ".join(each.provenance.checksum for each in streams).encode()).hexdigest()
        text = "; ".join(dict.fromkeys(each.provenance.description for each in streams))
        provenance = replace(provenance, checksum=checksum, description=text)
    return PrefillWorkload(config=config, streams=tuple(streams), provenance=provenance)


def open_turns(conversations: Conversations, arrivals: ArrivalConfig, seed: int) -> OpenTurns:
    """Puts every turn at a time of its own, Poisson's for one, whatever became of the turn before it.

    The turns of all conversations, one behind the other, are cut into lanes of equal length; which lane has its turn is
    random. So any part of the run has first and later turns in their right shares, histories as long as they get, and turns of
    a conversation in order. What a cut divides counts as conversations of their own.
    """
    flat = []
    for session in conversations.sessions:
        history = answered = 0
        for index, (prefill, decode, _) in enumerate(session.rounds):
            flat.append(Turn(0.0, session.session_id, index, history, prefill, answered))
            history, answered = history + prefill + decode, decode
    cuts = np.linspace(0, len(flat), min(LANES, len(flat)) + 1).astype(np.int64)
    rng = np.random.default_rng(derive_seed(seed, "conversations", "lanes"))
    lanes = rng.permutation(np.repeat(np.arange(len(cuts) - 1), np.diff(cuts))).tolist()
    times = arrival_times(arrivals, len(flat), seed).tolist()
    places = cuts[:-1].tolist()
    cut = [flat[place].session_id if flat[place].turn > 0 else None for place in places]
    turns = []
    for lane, arrival_s in zip(lanes, times, strict=True):
        turn = flat[places[lane]]
        places[lane] += 1
        is_rest = turn.session_id == cut[lane]
        session_id = len(conversations.sessions) + lane if is_rest else turn.session_id
        turns.append(turn._replace(arrival_s=arrival_s, session_id=session_id))
    return OpenTurns(turns=turns)


def scaled(drawn: Conversations, scale: float) -> Conversations:
    """At least a token is left of each; the published shares, of unscaled lengths, stay."""

    def tokens(count: int) -> int:
        return max(1, round(scale * count))

    sessions = tuple(
        Session(
            session.session_id,
            session.arrival_s,
            tuple(
                Round(tokens(each.prefill_tokens), tokens(each.decode_tokens), each.delay_s) for each in session.rounds
            ),
        )
        for session in drawn.sessions
    )
    provenance = replace(
        drawn.provenance,
        description=f"{drawn.provenance.description}; lengths x {scale:g}",
        checksum=hashlib.sha256(f"{drawn.provenance.checksum} x {scale!r}".encode()).hexdigest(),
    )
    return replace(drawn, sessions=sessions, provenance=provenance)
