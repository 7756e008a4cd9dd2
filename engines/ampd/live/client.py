"""Sessions against a live coordinator: open loop, each round when its environment has answered."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence

from engines.ampd.live.coordinator import SETTLE_S, Coordinator
from engines.ar.session import Session
from engines.ar.torch.run import Prompts
from engines.errors import RunError

OnTurn = Callable[[int], None]


def serve(
    coordinator: Coordinator,
    sessions: Sequence[Session],
    prompts: Prompts,
    *,
    until_s: float,
    on_turn: OnTurn | None = None,
) -> float:
    """Serve them all; when the first could have come, on the store's clock.

    ``on_turn`` is called again and again with the number of sessions that ended. RunError after ``until_s``.
    """
    store = coordinator.store
    clock = store.clock
    began = clock.now()
    due = [(session.arrival_s, index, 0) for index, session in enumerate(sessions)]
    heapq.heapify(due)
    place = {session.session_id: index for index, session in enumerate(sessions)}
    told, num_ended, settled_s = store.follow("events"), 0, began
    while num_ended < len(sessions):
        now = clock.now() - began
        if now > until_s:
            raise RunError(
                f"{len(sessions) - num_ended} of {len(sessions)} sessions have not ended after {until_s:g} s"
            )
        while due and due[0][0] <= now:
            ready_s, index, number = heapq.heappop(due)
            session = sessions[index]
            if number == 0:
                coordinator.open(session.session_id)
            coordinator.begin(
                session.session_id,
                number,
                prompts(session, number),
                decode_tokens=session.rounds[number].decode_tokens,
                is_last=number == len(session.rounds) - 1,
                ready_s=began + ready_s,
            )
        if clock.now() - settled_s > SETTLE_S:
            coordinator.settle()
            settled_s = clock.now()
        wait_s = SETTLE_S if not due else min(SETTLE_S, max(0.0, due[0][0] - (clock.now() - began)))
        for event in told(wait_s):
            session_id = int(event["session"])
            if session_id not in place:
                continue  # of another client
            if event["what"] == "end":
                num_ended += 1
                continue
            index, over = place[session_id], int(event["round"])
            ended_s = float(event["at"]) - began
            heapq.heappush(due, (ended_s + sessions[index].rounds[over].delay_s, index, over + 1))
        if on_turn is not None:
            on_turn(num_ended)
    return began
