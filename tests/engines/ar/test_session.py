import math

import pytest
from support.clusters import session

from engines.ar.session import EventLoop, OpenArrivals, OpenLoop, Round, Session
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
