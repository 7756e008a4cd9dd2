"""One request's answer over HTTP, whole or as a stream, until its end, its deadline, or its client's departure."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

from starlette.types import Message, Receive, Scope, Send

from engines.server.answer import FinishReason
from engines.server.body import Asked, ChatBody
from engines.server.completion import Completion, Served
from engines.server.errors import ApiError, too_late
from engines.server.format import DONE, Format, event
from engines.server.logprobs import joined
from engines.server.metrics import Metrics

_STREAM_HEADERS = {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache"}


class Reply:
    """An ASGI response. Work on a request whose client has gone is cancelled."""

    def __init__(
        self,
        served: Served,
        asked: Asked,
        metrics: Metrics,
        *,
        arrived_at: float,
        most_s: float,
        on_end: Callable[[], None],
    ) -> None:
        """``arrived_at`` is on the loop's clock; the request has ``most_s`` from there. ``on_end`` is called once it is over."""
        self._served, self._asked, self._metrics = served, asked, metrics
        self._arrived_at, self._on_end = arrived_at, on_end
        self._timeout_s = min(most_s, asked.timeout or most_s)
        self._ttft_s: float | None = None
        """When a stream's first piece came, since the request did."""
        self._format = Format(
            served.model.name,
            is_chat=isinstance(asked, ChatBody),
            has_ids=asked.return_token_ids,
            includes_usage=asked.stream_options.include_usage,
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._answer_unless_gone(receive, send)
        finally:
            self._on_end()

    async def _answer_unless_gone(self, receive: Receive, send: Send) -> None:
        work, gone = asyncio.create_task(self._answer(send)), asyncio.create_task(_until_gone(receive))
        try:
            await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                self._metrics.disconnects.inc()
        finally:
            for task in (work, gone):
                task.cancel()
            await asyncio.gather(work, gone, return_exceptions=True)
        if not work.cancelled() and (error := work.exception()) is not None:
            raise error

    async def _answer(self, send: Send) -> None:
        response = _Response(send)
        try:
            async with self._deadline(), Completion(self._served, self._asked) as completion:
                self._metrics.tokens.labels("prompt").inc(completion.usage.prompt_tokens)
                await (self._stream if self._asked.stream else self._whole)(completion, response)
                self._note(completion)
        except ApiError as error:
            taken = error.status >= 500 and error.code != "unavailable"
            counter = (
                self._metrics.failures.labels(error.code) if taken else self._metrics.rejections.labels(error.status)
            )
            counter.inc()
            if response.has_begun:
                # The status is out: what is left is to say it in the stream.
                await response.write(event(error.body))
                await response.end(DONE)
            else:
                await response.whole(error.status, error.body, error.headers)

    @asynccontextmanager
    async def _deadline(self) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout_at(self._arrived_at + self._timeout_s):
                yield
        except TimeoutError:
            raise too_late(self._timeout_s) from None

    async def _whole(self, completion: Completion, response: _Response) -> None:
        num = self._asked.num_choices
        texts: list[list[str]] = [[] for _ in range(num)]
        ids: list[list[int]] = [[] for _ in range(num)]
        reasons: dict[int, FinishReason] = {}
        scored: list[list[dict[str, Any]]] = [[] for _ in range(num)]
        async for choice, piece, logprobs in completion.parts():
            texts[choice].append(piece.text)
            ids[choice] += piece.token_ids
            if logprobs is not None:
                scored[choice].append(logprobs)
            if piece.finish_reason is not None:
                reasons[choice] = piece.finish_reason
        said = self._format.whole(
            ["".join(each) for each in texts],
            ids,
            [reasons[i] for i in range(num)],
            [joined(each) if each else None for each in scored],
            completion.usage,
        )
        for i, choice_said in enumerate(said["choices"]):
            prompt = completion.prompt_logprobs(i)
            if prompt is not None:
                (said if isinstance(self._asked, ChatBody) else choice_said)["prompt_logprobs"] = prompt
        await response.whole(200, said)

    async def _stream(self, completion: Completion, response: _Response) -> None:
        await response.begin(200, _STREAM_HEADERS)
        for opening in self._format.opening(self._asked.num_choices):
            await response.write(opening)
        async for choice, piece, logprobs in completion.parts():
            if self._ttft_s is None:
                self._ttft_s = self._since_arrival()
                self._metrics.note_first_piece(self._ttft_s)
            await response.write(self._format.part(choice, piece, logprobs))
        await response.end(self._format.closing(completion.usage) + DONE)

    def _note(self, completion: Completion) -> None:
        e2el_s, tokens = self._since_arrival(), completion.usage.completion_tokens
        self._metrics.answered.inc()
        self._metrics.tokens.labels("completion").inc(tokens)
        self._metrics.e2el_s.observe(e2el_s)
        if self._ttft_s is not None and tokens > 1 and self._asked.num_choices == 1:
            self._metrics.note_stream((e2el_s - self._ttft_s) / (tokens - 1))
        if completion.has_begun_at is not None:
            self._metrics.queue_s.observe(completion.has_begun_at - self._arrived_at)

    def _since_arrival(self) -> float:
        return asyncio.get_running_loop().time() - self._arrived_at


class _Response:
    def __init__(self, send: Send) -> None:
        self._send = send
        self.has_begun = False

    async def begin(self, status: int, headers: Mapping[str, str]) -> None:
        self.has_begun = True
        raw = [(name.lower().encode(), value.encode()) for name, value in headers.items()]
        await self._send({"type": "http.response.start", "status": status, "headers": raw})

    async def write(self, content: bytes) -> None:
        await self._send(_body(content, more=True))

    async def end(self, content: bytes) -> None:
        await self._send(_body(content, more=False))

    async def whole(self, status: int, said: Mapping[str, Any], headers: Mapping[str, str] | None = None) -> None:
        content = json.dumps(said, ensure_ascii=False, separators=(",", ":")).encode()
        own = {"Content-Type": "application/json", "Content-Length": str(len(content)), **(headers or {})}
        await self.begin(status, own)
        await self.end(content)


def _body(content: bytes, *, more: bool) -> Message:
    return {"type": "http.response.body", "body": content, "more_body": more}


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
