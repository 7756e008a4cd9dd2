"""When turns come that wait for no answer: at times of their own."""

from __future__ import annotations

import numpy as np

from engines.laps.turns import OpenTurns, Turn
from repro.workloads.arrivals import ArrivalConfig, arrival_times
from repro.workloads.conversations.workload import Conversations
from repro.workloads.seed import derive_seed

LANES = 256
"""Conversations that go on side by side in an open loop, where there are as many."""


def open_turns(conversations: Conversations, arrivals: ArrivalConfig, seed: int) -> OpenTurns:
    """Puts every turn at a time of its own, Poisson's for one, whatever became of the turn before it.

    The turns of all conversations, one behind the other, are cut into lanes of equal length; which lane has its turn is
    random. So any part of the run has first and later turns in their right shares, histories as long as they get, and turns of
    a conversation in order. What a cut divides counts as conversations of their own.
    """
    flat = _flat(conversations)
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


def _flat(conversations: Conversations) -> list[Turn]:
    """Lists all turns, one behind the other; none has come yet."""
    found = []
    for session in conversations.sessions:
        history = answered = 0
        for index, turn in enumerate(session.rounds):
            found.append(Turn(0.0, session.session_id, index, history, turn.prefill_tokens, answered))
            history += turn.prefill_tokens + turn.decode_tokens
            answered = turn.decode_tokens
    return found
