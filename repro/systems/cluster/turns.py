"""The turns of a run: closed loops of conversations, turns at times of their own, or conversations at a file's."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace

from engines.ar.session import ClosedLoop, OpenLoop
from engines.errors import require
from engines.laps.cluster import PrefillArrivals
from repro.files import kept
from repro.workloads.conversations import (
    ConversationConfig,
    ConversationProvenance,
    Conversations,
    draw_conversations,
    open_turns,
    scaled,
)
from repro.workloads.draws import ArrivalConfig


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
