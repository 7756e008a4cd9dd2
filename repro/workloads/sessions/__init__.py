"""Multi-round sessions: agents and iterative retrieval, with lengths that meet published totals."""

from repro.workloads.sessions.card import SessionCard, known_session_cards, load_session_card
from repro.workloads.sessions.workload import SessionWorkload, SessionWorkloadConfig, build_sessions

__all__ = [
    "SessionCard",
    "SessionWorkload",
    "SessionWorkloadConfig",
    "build_sessions",
    "known_session_cards",
    "load_session_card",
]
