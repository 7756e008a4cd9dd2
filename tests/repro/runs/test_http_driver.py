"""Open-loop driving in virtual time: every stamp is known beforehand, to the last bit."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.virtual_time import run_virtually

from repro.runs.http_driver import Ask, Clock, Exchange, Reply, drive_http
from repro.runs.record import DriveProgress


@dataclass(frozen=True)
class Talk:
    session_id: int
    arrival_s: float
    delays_s: tuple[float, ...] = (0.0,)

    def ask(self, turn: int, replies: Sequence[Reply]) -> Ask:
        assert len(replies) == turn
        body = {"session": self.session_id, "turn": turn, "heard": [reply.text for reply in replies]}
        return Ask(body=body, prompt_len=1, asked_tokens=1)


@dataclass
class Server:
    """Answers in two pieces, after 0.5 s and ``service_s``, as many at once as come."""

    service_s: float = 1.0
    failing: tuple[tuple[int, int], ...] = ()
    under_way: int = 0
    most: int = 0

    async def send(self, body: Mapping[str, Any], clock: Clock) -> Reply:
        self.under_way += 1
        self.most = max(self.most, self.under_way)
        reply = Reply()
        await asyncio.sleep(0.5)
        reply.chunks_s.append(clock())
        await asyncio.sleep(self.service_s - 0.5)
        reply.chunks_s.append(clock())
        reply.ended_s = clock()
        reply.text = f"{body['session']}.{body['turn']}"
        # What an endpoint says behind its answer is in no latency.
        await asyncio.sleep(0.25)
        self.under_way -= 1
        if (body["session"], body["turn"]) in self.failing:
            reply.error = "no"
        return reply


def drive(talks: Sequence[Talk], server: Server, **options: Any) -> list[Exchange]:
    return run_virtually(drive_http(talks, server.send, **options))


def test_requests_are_sent_when_due_whatever_is_under_way():
    server = Server()
    exchanges = drive([Talk(0, 1.0), Talk(2, 1.5), Talk(1, 1.25)], server)
    assert [(e.session_id, e.due_s, e.sent_s, e.ended_s) for e in exchanges] == [
        (0, 1.0, 1.0, 2.0),
        (1, 1.25, 1.25, 2.25),
        (2, 1.5, 1.5, 2.5),
    ]
    assert [e.reply.chunks_s for e in exchanges if e.reply] == [[1.5, 2.0], [1.75, 2.25], [2.0, 2.5]]
    assert server.most == 3


def test_a_cap_holds_requests_back_in_order_and_tells_their_wait():
    server = Server()
    exchanges = drive([Talk(i, 0.25 * i) for i in range(4)], server, max_concurrency=2)
    assert server.most == 2
    # A place is free once the whole answer is in, what comes behind it included.
    assert [(e.queued_s, e.sent_s) for e in exchanges] == [(0.0, 0.0), (0.25, 0.25), (0.5, 1.25), (0.75, 1.5)]
    assert [e.due_s for e in exchanges] == [0.0, 0.25, 0.5, 0.75]


def test_turns_of_a_conversation_follow_its_answers():
    exchanges = drive([Talk(0, 1.0, (2.0, 0.5, 9.0)), Talk(1, 1.0)], Server())
    turns = [e for e in exchanges if e.session_id == 0]
    assert [(e.turn, e.due_s, e.ended_s) for e in turns] == [(0, 1.0, 2.0), (1, 4.0, 5.0), (2, 5.5, 6.5)]
    assert turns[2].ask is not None
    assert turns[2].ask.body["heard"] == ["0.0", "0.1"]


def test_turns_behind_a_failure_are_not_sent_and_not_lost():
    exchanges = drive([Talk(0, 0.0, (1.0, 1.0, 1.0)), Talk(1, 0.0)], Server(failing=((0, 1),)))
    assert [(e.session_id, e.turn, e.error) for e in exchanges] == [
        (0, 0, None),
        (1, 0, None),
        (0, 1, "no"),
        (0, 2, "not sent: turn 1 of its conversation failed"),
    ]
    assert exchanges[-1].sent_s is None


def test_progress_counts_every_turn():
    told: list[DriveProgress] = []
    drive([Talk(0, 0.0, (0.0, 0.0)), Talk(1, 0.0)], Server(), on_progress=told.append)
    assert [p.num_closed for p in told] == [1, 2, 3]
    assert {p.num_total for p in told} == {3}


def test_an_error_of_the_client_ends_the_run_and_its_tasks():
    async def send(body: Mapping[str, Any], clock: Clock) -> Reply:
        await asyncio.sleep(0.5 if body["session"] else 0.25)
        raise ValueError("a fault")

    with pytest.raises(ValueError, match="a fault"):
        run_virtually(drive_http([Talk(0, 0.0), Talk(1, 0.0)], send))


@settings(max_examples=25)
@given(
    arrivals=st.lists(st.integers(0, 40), min_size=1, max_size=12),
    turns=st.integers(1, 3),
    cap=st.none() | st.integers(1, 4),
)
def test_every_turn_is_answered_once_and_never_early(arrivals, turns, cap):
    server = Server()
    talks = [Talk(i, time / 8, (0.125,) * turns) for i, time in enumerate(arrivals)]
    exchanges = drive(talks, server, max_concurrency=cap)
    assert sorted((e.session_id, e.turn) for e in exchanges) == [
        (i, k) for i in range(len(talks)) for k in range(turns)
    ]
    for exchange in exchanges:
        assert exchange.sent_s is not None
        assert exchange.queued_s is not None
        assert exchange.due_s == exchange.queued_s <= exchange.sent_s
        if cap is None:
            assert exchange.sent_s == exchange.due_s
    assert server.most <= (cap or len(talks))
