"""Drives an endpoint over HTTP, open loop: requests are sent when due, even if earlier ones are unanswered.

A conversation's next turn is due ``delay_s`` after the previous answer, because a user, or a tool, needs that answer. This module knows
nothing of HTTP: the caller gives a function that sends a request. Time is the event loop's, real or virtual.
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
    """Arrival time of each piece with content."""
    chunk_tokens: list[int | None] = field(default_factory=list)
    """Tokens of each piece, as the endpoint reports them by ids or by usage; None if it does not."""
    chunk_reads: list[int] = field(default_factory=list)
    """Number of the network read that brought each piece. Pieces of one read arrived together, whenever they were made."""
    ended_s: float | None = None
    """Arrival time of the last piece, with or without content: tokens without text are part of an answer."""
    finish_s: float | None = None
    """Arrival time of the finish reason, with the last piece or after it."""
    usage_s: float | None = None
    """Arrival time of the last usage."""
    closed_s: float | None = None
    """When the stream ended."""
    text: str = ""
    aside: str = ""
    """Output outside the answer's own text: reasoning, tool calls, a refusal."""
    first_text: str = ""
    """Text of the first piece."""
    token_ids: list[int] | None = None
    """None if the endpoint reports no ids."""
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    counted_by: str | None = None
    """How ``completion_tokens`` was counted: usage, token_ids or tokenizer; None if nothing counted them."""
    first_tokens: int | None = None
    """Tokens of the first piece; None if unknown."""
    first_by: str | None = None
    """How ``first_tokens`` was counted: token_ids, usage, tokenizer, text (its share), one each, or one piece."""
    cached_tokens: int | None = None
    """Prompt tokens that hit a cache; None if the endpoint does not say."""
    finish_reason: str | None = None
    was_resent: bool = False
    """Whether the request was sent again on another connection, because the first was cut off before any byte of the answer."""
    error: str | None = None
    """One sentence; None if the answer is whole."""

    @property
    def are_single(self) -> bool:
        """Whether every piece is known to be one token. An end-of-text token may be counted but not sent."""
        if self.chunk_tokens and None not in self.chunk_tokens:
            return set(self.chunk_tokens) == {1}
        unsaid = 1 if self.finish_reason == "stop" else 0
        return self.completion_tokens is not None and len(self.chunks_s) >= self.completion_tokens - unsaid


Send = Callable[[Mapping[str, Any], Clock], Awaitable[Reply]]
"""Sends a body and waits for the end of its answer. Raises no error that a server can cause."""


@dataclass(frozen=True, kw_only=True)
class Ask:
    """The request for one turn."""

    body: Mapping[str, Any]
    prompt_len: int
    """Prompt tokens, as far as the client can tell."""
    asked_tokens: int


class Conversation(Protocol):
    """Turns, one after the other. A single request is a conversation of one turn."""

    @property
    def session_id(self) -> int: ...

    @property
    def arrival_s(self) -> float: ...

    @property
    def delays_s(self) -> Sequence[float]:
        """The delay after each turn, one for every turn."""

    def ask(self, turn: int, replies: Sequence[Reply]) -> Ask:
        """The request for the next turn, given the answers so far."""


@dataclass(frozen=True, kw_only=True)
class Exchange:
    """A turn and its answer. Times are None for a turn that was never sent."""

    session_id: int
    turn: int
    due_s: float
    queued_s: float | None = None
    """When this process's own loop found the turn due. From then on it waits for a place under ``max_concurrency``."""
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
    """Return every turn of every conversation, in the order in which they were due. Each conversation needs its own id.

    ``max_concurrency``, at least 1, holds back requests beyond it, which closes the loop: their wait is in their latency, and is also
    recorded apart. The turns after a failed one are not sent.
    """
    ordered = sorted(conversations, key=lambda conversation: conversation.arrival_s)
    tasks = set()
    gc.collect()  # which stops the clockwork for tens of milliseconds
    with without_collection():
        driver = _Driver(ordered, send, max_concurrency, on_progress)
        try:
            for conversation in ordered:
                await driver.sleep_until(conversation.arrival_s)
                tasks.add(asyncio.create_task(driver.converse(conversation)))
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

    async def converse(self, conversation: Conversation) -> None:
        """Runs all turns of one conversation."""
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
            # Anything that the endpoint sends after its answer does not count.
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
            # Wait for the end of the stream: until then we cannot know that the answer is whole.
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
