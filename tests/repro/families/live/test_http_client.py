"""What a client over HTTP asks, and the run at its times."""

from typing import Any

import numpy as np
import pytest

from engines.cluster.record import ClusterRun, Gaps, RoundRow, SessionRow, observe, table_of
from engines.cluster.sessions import Round, Session
from engines.errors import RunError
from repro.families.live.over_dynamo import SessionConversation, seen_by_client
from repro.runs.http_driver import Exchange, Reply

SESSION = Session(4, 1.0, (Round(3, 3, 0.5), Round(2, 1)))
IDS = [1, 2, 3, 7, 8, 9, 5, 6, 4]
"""Tokens of the session, answers included."""


class Ids:
    """A store."""

    def ids(self, session_id: int, start: int, end: int) -> list[int]:
        assert session_id == 4
        return IDS[start:end]


def run_in_store() -> ClusterRun:
    rounds = [RoundRow(4, 0, 1.01, 0, 3, 3, 1.2, 1.4, False), RoundRow(4, 1, 1.95, 6, 2, 1, 2.1, 2.1, True)]
    return ClusterRun(
        sessions=table_of(SessionRow, [SessionRow(4, 1.0, 2, 5, 4, 0, 2.1, "ok")]),
        rounds=table_of(RoundRow, rounds),
        tasks={},
        transfers={},
        workers={},
        gaps=Gaps(np.array([0, 0]), np.array([0.1, 0.1]), np.array([1, 1])),
        facts={},
    )


def exchanges(first: Reply) -> list[Exchange]:
    second = Reply(chunks_s=[2.3], token_ids=[4], completion_tokens=1)
    return [
        Exchange(session_id=4, turn=0, due_s=1.0, sent_s=1.0, reply=first),
        Exchange(session_id=4, turn=1, due_s=1.9, sent_s=1.9, reply=second),
    ]


def saw(first: Reply) -> tuple[ClusterRun, Any]:
    store: Any = Ids()
    return seen_by_client(exchanges(first), run_in_store(), store)


def test_a_turn_repeats_what_was_before_in_the_session_s_name():
    def prompts(session: Session, number: int) -> Any:
        return np.array([[1, 2, 3], [5, 6]][number])

    conversation = SessionConversation(session=SESSION, prompts=prompts)
    first = conversation.ask(0, [])
    assert (first.body["prompt"], first.body["max_tokens"], first.prompt_len) == ([1, 2, 3], 3, 3)
    assert first.body["extra_headers"] == {"x-dynamo-session-id": "4"}
    last = conversation.ask(1, [Reply(token_ids=[7, 8, 9])])
    assert last.body["prompt"] == IDS[:8]
    assert last.body["extra_headers"] == {"x-dynamo-session-id": "4", "x-dynamo-session-final": "true"}
    assert list(conversation.delays_s) == [0.5, 0.0]


def test_times_are_the_client_s_and_what_lies_between_is_told():
    run, facts = saw(Reply(chunks_s=[1.3, 1.35, 1.55], token_ids=[7, 8, 9], completion_tokens=3))
    seen = observe(run)
    assert seen.ttft_s == pytest.approx([0.3, 0.4])
    assert seen.round_itl_s["mean"][0] == pytest.approx(0.125)
    assert seen.round_itl_s["max"][0] == pytest.approx(0.2)
    assert seen.e2el_s == pytest.approx([1.3])
    # In the store: 0.19 and 0.15 to the first token, gaps of 0.1.
    added = facts["added"]["ttft_s"]
    assert (added["n"], added["p90"]) == (2, None), "of two there is none"
    assert [added[name] for name in ("mean", "p50", "max")] == pytest.approx([0.18, 0.18, 0.25])
    assert facts["added"]["itl_s"]["mean"] == pytest.approx(0.025)


def test_tokens_that_came_as_one_piece_have_its_mean_gap():
    run, _ = saw(Reply(chunks_s=[1.3, 1.5], token_ids=[7, 8, 9], completion_tokens=3))
    assert observe(run).round_itl_s["max"][0] == pytest.approx(0.1)
    assert run.gaps.tokens.tolist() == [2]


@pytest.mark.parametrize("ids", [[7, 8], [7, 8, 8], None])
def test_other_tokens_than_the_workers_made_fail_the_run(ids):
    with pytest.raises(RunError, match="session 4, round 0: the client got other tokens than the workers made"):
        saw(Reply(chunks_s=[1.3, 1.4, 1.5], token_ids=ids, completion_tokens=3))
