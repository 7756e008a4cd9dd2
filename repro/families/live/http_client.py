"""Sessions over HTTP as Dynamo's frontend takes them: what is asked, and the run at the times the client saw."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from baselines.servers.launch import SERVED_NAME
from engines.ampd.live.store import Store
from engines.cluster.sessions import Session
from engines.errors import RunError
from repro.families.http.endpoint import EXTRA_HEADERS, Endpoint
from repro.runs.family import distribution
from repro.runs.http_driver import Ask, Clock, Exchange, Reply, Send, drive_http

if TYPE_CHECKING:
    from engines.ampd.live.coordinator import Prompts
    from engines.cluster.record import ClusterRun

_LOOK_S = 0.25
"""How often is looked whether the workers are well."""


@dataclass(frozen=True, kw_only=True)
class SessionConversation:
    """A ``Conversation``: each turn repeats the ids of all before, answers included, and is asked in the session's name."""

    session: Session
    prompts: Prompts

    @property
    def session_id(self) -> int:
        return self.session.session_id

    @property
    def arrival_s(self) -> float:
        return self.session.arrival_s

    @property
    def delays_s(self) -> Sequence[float]:
        return [each.delay_s for each in self.session.rounds]

    def ask(self, turn: int, replies: Sequence[Reply]) -> Ask:
        ids: list[int] = []
        for past in range(turn):
            ids += self.prompts(self.session, past).tolist()
            ids += replies[past].token_ids or []
        ids += self.prompts(self.session, turn).tolist()
        asked = self.session.rounds[turn].decode_tokens
        headers = {"x-dynamo-session-id": str(self.session_id)}
        if turn == len(self.session.rounds) - 1:
            headers["x-dynamo-session-final"] = "true"
        return Ask(body={**body_of(ids, asked), EXTRA_HEADERS: headers}, prompt_len=len(ids), asked_tokens=asked)


def body_of(ids: Sequence[int], max_tokens: int) -> dict[str, Any]:
    return {
        "model": SERVED_NAME,
        "prompt": list(ids),
        "max_tokens": max_tokens,
        "temperature": 0.0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        "nvext": {"extra_fields": ["completion_token_ids"]},
    }


class Driving:
    def __init__(self, endpoint: Endpoint, sessions: Sequence[Session], prompts: Prompts) -> None:
        self._endpoint, self._sessions, self._prompts = endpoint, sessions, prompts
        self.zero_s = 0.0
        """When the first session could have come, on this machine's monotonic clock."""

    async def warm_up(self, check: Callable[[], None]) -> None:
        """A request of no session: a first one takes longer than any other."""
        longest = max(self._sessions, key=lambda each: each.rounds[0].prefill_tokens)
        async with self._endpoint.sending() as send:
            ids = self._prompts(longest, 0).tolist()
            (reply,) = await _minding(asyncio.gather(send(body_of(ids, 2), time.monotonic)), check)
        if reply.error is not None:
            raise RunError(f"frontend='dynamo': the request that warms up failed: {reply.error}")

    async def run(self, check: Callable[[], None]) -> list[Exchange]:
        conversations = [SessionConversation(session=each, prompts=self._prompts) for each in self._sessions]
        async with self._endpoint.sending() as send:
            exchanges = await _minding(asyncio.ensure_future(drive_http(conversations, self._timed(send))), check)
        wrong = [each.error for each in exchanges if each.error is not None]
        if wrong:
            raise RunError(f"{len(wrong)} of {len(exchanges)} requests failed, the first with: {wrong[0]}")
        return exchanges

    def _timed(self, send: Send) -> Send:
        """Finds out where the driver's clock begins."""

        async def sending(body: Mapping[str, Any], clock: Clock) -> Reply:
            if not self.zero_s:
                self.zero_s = time.monotonic() - clock()
            return await send(body, clock)

        return sending


async def _minding(work: asyncio.Future[Any], check: Callable[[], None]) -> Any:
    """Its result, unless a worker fails before."""
    try:
        while not work.done():
            await asyncio.wait((work,), timeout=_LOOK_S)
            check()
        return work.result()
    finally:
        work.cancel()


class HttpClient:
    """Who the answers went to."""

    def __init__(self, exchanges: Sequence[Exchange]) -> None:
        self._by_round = {(each.session_id, each.turn): each for each in exchanges}

    def saw(self, run: ClusterRun, store: Store) -> tuple[ClusterRun, Mapping[str, Any]]:
        """The run at the client's times, and facts of what lies in between. RunError where it got other tokens than the
        workers made."""
        from engines.cluster.record import observe

        replies = []
        for row, key in enumerate(self._keys(run)):
            reply, tokens = self._by_round[key].reply, run.rounds["decode_tokens"][row]
            assert reply is not None
            place = run.rounds["history"][row] + run.rounds["prefill_tokens"][row]
            if reply.token_ids != store.ids(key[0], place, place + tokens):
                raise RunError(f"session {key[0]}, round {key[1]}: the client got other tokens than the workers made")
            replies.append(reply)
        at_client = _at(run, [self._by_round[key].due_s for key in self._keys(run)], replies)
        seen, inside = observe(at_client), observe(run)
        added = {"ttft_s": seen.ttft_s - inside.ttft_s, "itl_s": seen.round_itl_s["mean"] - inside.round_itl_s["mean"]}
        return at_client, {"added": {name: distribution(values[np.isfinite(values)]) for name, values in added.items()}}

    @staticmethod
    def _keys(run: ClusterRun) -> Iterator[tuple[int, int]]:
        return zip(run.rounds["session_id"], run.rounds["round"], strict=True)


def _at(run: ClusterRun, due_s: Sequence[float], replies: Sequence[Reply]) -> ClusterRun:
    """The run at the times of the client."""
    from engines.cluster.record import Gaps

    ends = [each.chunks_s[-1] for each in replies]
    rounds = {
        **run.rounds,
        "ready_s": list(due_s),
        "first_token_s": [each.chunks_s[0] for each in replies],
        "finished_s": ends,
    }
    last: dict[int, float] = {}
    for session, end_s in zip(run.rounds["session_id"], ends, strict=True):
        last[session] = max(end_s, last.get(session, 0.0))
    sessions = {**run.sessions, "finished_s": [last[each] for each in run.sessions["session_id"]]}
    gaps: list[tuple[int, float, int]] = []
    for row, reply in enumerate(replies):
        stamps, num_gaps = reply.chunks_s, (reply.completion_tokens or 0) - 1
        if len(stamps) == num_gaps + 1:
            gaps += [(row, gap, 1) for gap in np.diff(stamps).tolist()]
        elif num_gaps > 0:  # several tokens came as one piece
            gaps.append((row, (stamps[-1] - stamps[0]) / num_gaps, num_gaps))
    found = Gaps(
        np.array([row for row, _, _ in gaps], dtype=np.int64),
        np.array([gap for _, gap, _ in gaps], dtype=np.float64),
        np.array([count for _, _, count in gaps], dtype=np.int64),
    )
    return replace(run, rounds=rounds, sessions=sessions, gaps=found)
