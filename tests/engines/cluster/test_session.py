"""Sessions, and when each of them comes: what is drawn by then, and when none is to come any more."""

import math
from collections.abc import Iterator

import pytest
from support.clusters import session

from engines.cluster.sessions import Clients, ClosedLoop, EventLoop, OpenArrivals, OpenLoop, Round, Session
from engines.errors import UserError


def test_totals():
    agent = session(3, 1.5, (100, 20), (30, 5, 0.5))
    assert (agent.prefill_tokens, agent.decode_tokens, agent.context_tokens) == (130, 25, 155)


@pytest.mark.parametrize(
    "entry", [Round(0, 5), Round(5, 0), Round(-1, 5), Round(5, -2), Round(5, 5, -0.1), Round(5, 5, math.inf)]
)
def test_impossible_round_is_refused_by_name(entry):
    with pytest.raises(UserError, match=r"session 7 round 1: prefill_tokens="):
        Session(7, 0.0, (Round(1, 1), entry))


def test_open_loop_wants_sessions_in_order():
    loop = EventLoop()
    unsorted = OpenLoop(sessions=(session(0, 2.0, (1, 1)), session(1, 1.0, (1, 1))))
    OpenArrivals(loop, unsorted.sessions, print)
    with pytest.raises(UserError, match=r"session 1: arrival_s=1.0 is before 2.0"):
        loop.run()


def test_an_open_arrival_is_drawn_when_the_one_before_it_comes():
    drawn: list[int] = []
    come: list[tuple[float, int, int, bool]] = []
    loop = EventLoop()

    def sessions() -> Iterator[Session]:
        for index in range(3):
            drawn.append(index)
            yield session(index, 0.5 * index, (10, 1))

    def arrive(each: Session) -> None:
        come.append((loop.now, each.session_id, len(drawn), arrivals.is_over))

    arrivals = OpenArrivals(loop, sessions(), arrive)
    assert drawn == [0]
    loop.run()
    assert come == [(0.0, 0, 2, False), (0.5, 1, 3, False), (1.0, 2, 3, True)]


def test_a_client_thinks_between_two_sessions_and_the_last_one_has_none_to_go_on_with():
    come: list[tuple[float, int]] = []
    loop = EventLoop()
    closed = ClosedLoop(sessions=[session(index, 9.9, (10, 1)) for index in range(3)], num_clients=2, think_s=0.25)
    clients = Clients(loop, closed, lambda each: come.append((loop.now, each.session_id)))
    assert clients.num_thinking == 2
    loop.run()
    assert come == [(0.0, 0), (0.0, 1)]
    assert not clients.is_over  # the third has not begun
    assert clients.go_on(1.0)
    assert (clients.num_thinking, clients.is_over) == (1, False)  # its client thinks
    assert not clients.go_on(1.1)
    loop.run()
    assert come[2:] == [(1.25, 2)]
    assert clients.is_over
    few = Clients(loop, ClosedLoop(sessions=closed.sessions[:1], num_clients=5), come.append)
    assert few.num_thinking == 1


def test_events_of_one_time_run_in_the_order_they_were_scheduled():
    """Also those that are scheduled while others of that time run: they come last."""
    seen: list[str] = []
    loop = EventLoop()
    loop.at(1.0, lambda: (seen.append("first"), loop.at(1.0, seen.append, "later")))
    loop.at(0.5, seen.append, "early")
    loop.at(1.0, seen.append, "second")
    loop.run()
    assert seen == ["early", "first", "second", "later"]
