"""One request's answer over HTTP, whole or as a stream, until its end, its deadline, or its client's departure."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from engines.server.answer import Piece, joined
from engines.server.body import AnswerBody
from engines.server.completion import AnswerPiece, Completion, Served, Usage
from engines.server.errors import ApiError, too_late
from engines.server.responses import Choice, Format, ResponseFormat, ResponsesBody
from engines.server.service import Metrics

_STREAM_BEGINS = {
    "type": "http.response.start",
    "status": 200,
    "headers": [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")],
}


class Reply:
    """An ASGI response. Work on a request whose client has gone is cancelled."""

    def __init__(
        self,
        served: Served,
        asked: AnswerBody,
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
        self._format: Format | ResponseFormat
        if isinstance(asked, ResponsesBody):
            self._format = ResponseFormat(served.model.name, asked)
        else:
            self._format = Format(served.model.name, asked)
        self._is_streaming = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._answer_unless_gone(scope, receive, send)
        finally:
            self._on_end()

    async def _answer_unless_gone(self, scope: Scope, receive: Receive, send: Send) -> None:
        work, gone = asyncio.create_task(self._answer(scope, receive, send)), asyncio.create_task(_until_gone(receive))
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

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with self._deadline(), Completion(self._served, self._asked) as completion:
                self._metrics.tokens.labels("prompt").inc(completion.usage.prompt_tokens)
                if self._asked.stream:
                    await self._stream(completion, send)
                else:
                    await _whole(200, await self._told(completion))(scope, receive, send)
                self._note(completion)
        except ApiError as error:
            taken = error.status >= 500 and error.code != "unavailable"
            counter = (
                self._metrics.failures.labels(error.code) if taken else self._metrics.rejections.labels(error.status)
            )
            counter.inc()
            if self._is_streaming:
                await send(_body(self._format.failure(error), more=False))
            else:
                await _whole(error.status, error.body, error.headers)(scope, receive, send)

    @asynccontextmanager
    async def _deadline(self) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout_at(self._arrived_at + self._timeout_s):
                yield
        except TimeoutError:
            raise too_late(self._timeout_s) from None

    async def _told(self, completion: Completion) -> Mapping[str, Any]:
        parts: list[list[AnswerPiece]] = [[] for _ in range(self._asked.num_choices)]
        async for part in completion.parts():
            parts[part.choice].append(part)
        choices = [
            Choice(_joined(own), completion.prompt_of(i), _scores(own), await completion.prompt_logprobs(i))
            for i, own in enumerate(parts)
        ]
        return self._format.whole(choices, completion.usage)

    async def _stream(self, completion: Completion, send: Send) -> None:
        options, prompt_of = self._asked.stream_options, completion.prompt_of

        def counted(choice: int) -> Usage | None:
            return completion.usage_of(choice) if options.include_usage and options.continuous_usage_stats else None

        self._is_streaming = True
        await send(_STREAM_BEGINS)
        for choice in range(self._asked.num_choices):
            if opening := self._format.opening(choice, prompt_of(choice), counted(choice)):
                await send(_body(opening, more=True))
        async for part in completion.parts():
            if self._ttft_s is None:
                self._ttft_s = self._since_arrival()
                self._metrics.note_first_piece(self._ttft_s)
            if content := self._format.part(part, prompt_of(part.choice), counted(part.choice)):
                await send(_body(content, more=True))
        await send(_body(self._format.ending(completion.usage, is_told=options.include_usage), more=False))

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


def _whole(status: int, said: Mapping[str, Any], headers: Mapping[str, str] | None = None) -> Response:
    content = json.dumps(said, ensure_ascii=False, separators=(",", ":"))
    return Response(content, status, headers, "application/json")


def _joined(parts: Sequence[AnswerPiece]) -> Piece:
    """An answer from all of its parts."""
    pieces = [part.piece for part in parts]
    ids = tuple(token for piece in pieces for token in piece.token_ids)
    return pieces[-1]._replace(text="".join(piece.text for piece in pieces), token_ids=ids)


def _scores(parts: Sequence[AnswerPiece]) -> Mapping[str, Any] | None:
    scored = [part.logprobs for part in parts if part.logprobs is not None]
    return joined(scored) if scored else None


def _body(content: bytes, *, more: bool) -> Message:
    return {"type": "http.response.body", "body": content, "more_body": more}


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
