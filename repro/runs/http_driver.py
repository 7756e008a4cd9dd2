"""Drives an endpoint over HTTP, open loop: requests are sent when due, whatever became of those before.

A conversation's next turn is due ``delay_s`` after the answer to the one before: a user, or a tool, needs that answer.
Nothing here knows HTTP: what sends a request is given, and time is the event loop's, real or virtual.
"""

import asyncio
import gc
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

from engines.machine import without_collection
from repro.runs.record import DriveProgress, OnProgress

Clock = Callable[[], float]
"""Seconds since the run began."""


@dataclass(kw_only=True)
class Reply:
    """One answer, filled in while it arrives; stamps are on the driver's clock."""

    chunks_s: list[float] = field(default_factory=list)
    """When each piece with content arrived."""
    chunk_tokens: list[int | None] = field(default_factory=list)
    """Tokens of each, as the endpoint tells them by their ids or by usage; None where it does not."""
    chunk_reads: list[int] = field(default_factory=list)
    """Number of the network read that brought each: pieces of one read came together, whenever they were made."""
    ended_s: float | None = None
    """When the last piece did, with content or without: tokens that say nothing are part of an answer."""
    finish_s: float | None = None
    """When the reason for its end did, with the last piece or behind it."""
    usage_s: float | None = None
    """When the last usage did."""
    closed_s: float | None = None
    """When the stream ended."""
    text: str = ""
    aside: str = ""
    """What is no part of the answer's own text: reasoning, calls of tools, a refusal."""
    first_text: str = ""
    """Text of the first piece."""
    token_ids: list[int] | None = None
    """None where the endpoint tells none."""
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    counted_by: str | None = None
    """What ``completion_tokens`` is by: usage, token_ids or tokenizer; None where nothing counted them."""
    first_tokens: int | None = None
    """Tokens of the first piece; None where nothing shows them."""
    first_by: str | None = None
    """What those are by: token_ids, usage, tokenizer, text (its share), one each, or one piece."""
    cached_tokens: int | None = None
    """Tokens of the prompt that were taken from a cache; None where the endpoint does not say."""
    finish_reason: str | None = None
    was_resent: bool = False
    """Sent once more, on another connection: the first was cut off before a byte of the answer came."""
    error: str | None = None
    """One sentence; None where the answer is whole."""

    @property
    def are_single(self) -> bool:
        """Whether every piece is known to be one token. An end of text may be counted and not sent."""
        if self.chunk_tokens and None not in self.chunk_tokens:
            return set(self.chunk_tokens) == {1}
        unsaid = 1 if self.finish_reason == "stop" else 0
        return self.completion_tokens is not None and len(self.chunks_s) >= self.completion_tokens - unsaid


Send = Callable[[Mapping[str, Any], Clock], Awaitable[Reply]]
"""Sends a body and waits for the end of its answer. Raises nothing a server can cause."""


@dataclass(frozen=True, kw_only=True)
class Ask:
    """The request of a turn."""

    body: Mapping[str, Any]
    prompt_len: int
    """Tokens of the prompt, as far as the client can tell."""
    asked_tokens: int


class Conversation(Protocol):
    """Turns, one after the other; a request by itself is a conversation of one."""

    @property
    def session_id(self) -> int: ...

    @property
    def arrival_s(self) -> float: ...

    @property
    def delays_s(self) -> Sequence[float]:
        """After each turn; their number is that of the turns."""

    def ask(self, turn: int, replies: Sequence[Reply]) -> Ask:
        """The next turn, after these answers."""


@dataclass(frozen=True, kw_only=True)
class Exchange:
    """A turn and its answer. None of the times of one that was never sent."""

    session_id: int
    turn: int
    due_s: float
    queued_s: float | None = None
    """When it was due by this process's own clockwork; then it waits for a place under ``max_concurrency``."""
    sent_s: float | None = None
    ended_s: float | None = None
    ask: Ask | None = None
    reply: Reply | None = None
    error: str | None = None


async def drive_http(
    conversations: Sequence[Conversation],
    send: Send,
    *,
    max_concurrency: int | None = None,
    on_progress: OnProgress | None = None,
) -> list[Exchange]:
    """Every turn of every conversation, in the order in which they were due. Each conversation has an id of its own.

    ``max_concurrency``, at least 1, holds back requests beyond it, which closes the loop: their wait is in their latency, and told
    apart. The turns behind one that failed are not sent.
    """
    ordered = sorted(conversations, key=lambda conversation: conversation.arrival_s)
    tasks = set()
    gc.collect()  # which stops the clockwork for tens of milliseconds
    with without_collection():
        driver = _Driver(ordered, send, max_concurrency, on_progress)
        try:
            for conversation in ordered:
                await driver.sleep_until(conversation.arrival_s)
                tasks.add(asyncio.create_task(driver.hold(conversation)))
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
    return sorted(driver.exchanges, key=lambda exchange: (exchange.due_s, exchange.session_id, exchange.turn))


class _Driver:
    def __init__(
        self,
        conversations: Sequence[Conversation],
        send: Send,
        max_concurrency: int | None,
        on_progress: OnProgress | None,
    ) -> None:
        loop = asyncio.get_running_loop()
        self._time, self._zero = loop.time, loop.time()
        self._send, self._on_progress = send, on_progress
        self._places: AbstractAsyncContextManager[Any] = (
            nullcontext() if max_concurrency is None else asyncio.Semaphore(max_concurrency)
        )
        self._num_total = sum(len(conversation.delays_s) for conversation in conversations)
        self._num_sent = 0
        self.exchanges: list[Exchange] = []

    def now(self) -> float:
        return self._time() - self._zero

    async def sleep_until(self, time_s: float) -> None:
        while (left := time_s - self.now()) > 0:
            await asyncio.sleep(left)

    async def hold(self, conversation: Conversation) -> None:
        """All turns of one conversation."""
        due_s = conversation.arrival_s
        replies: list[Reply] = []
        for turn, delay_s in enumerate(conversation.delays_s):
            await self.sleep_until(due_s)
            ask = conversation.ask(turn, replies)
            queued_s = self.now()
            async with self._places:
                sent_s = self.now()
                self._num_sent += 1
                reply = await self._send(ask.body, self.now)
            # Not what the endpoint says behind its answer.
            ended_s = reply.ended_s if reply.error is None and reply.ended_s is not None else self.now()
            exchange = Exchange(
                session_id=conversation.session_id,
                turn=turn,
                due_s=due_s,
                queued_s=queued_s,
                sent_s=sent_s,
                ended_s=ended_s,
                ask=ask,
                reply=reply,
                error=reply.error,
            )
            self._close(exchange)
            if reply.error is not None:
                reason = f"not sent: turn {turn} of its conversation failed"
                for later in range(turn + 1, len(conversation.delays_s)):
                    self._close(Exchange(session_id=conversation.session_id, turn=later, due_s=ended_s, error=reason))
                return
            replies.append(reply)
            # Not before the stream has ended: until then nobody knows that the answer is whole.
            due_s = max(ended_s + delay_s, self.now())

    def _close(self, exchange: Exchange) -> None:
        self.exchanges.append(exchange)
        if self._on_progress is not None:
            num_closed = len(self.exchanges)
            self._on_progress(
                DriveProgress(
                    now_s=self.now(),
                    num_total=self._num_total,
                    num_submitted=max(self._num_sent, num_closed),
                    num_closed=num_closed,
                )
            )
