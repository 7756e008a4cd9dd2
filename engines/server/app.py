"""The routes: OpenAI's under ``/v1``, and tokens, health, readiness, metrics and a status page beside them."""

import asyncio
import hmac
import json
import logging
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from importlib.resources import files
from typing import Annotated, Any, ClassVar, Self

from pydantic import FailFast, Field, model_validator
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route
from starlette.types import Message, Receive, Scope, Send

from engines.errors import UserError
from engines.machine import version_of
from engines.server.answer import Piece, join_logprobs
from engines.server.body import (
    LONGEST_ID,
    AnswerBody,
    Body,
    ChatBody,
    CompletionBody,
    Conversation,
    Messages,
    Object,
    Schema,
    Whole,
    refused_fields,
)
from engines.server.completion import LARGE_TEXT, AnswerPiece, Completion, Served, Usage, for_client
from engines.server.connection import LARGE_BODY, Addressed, Intake, host_names
from engines.server.errors import ApiError, refusal
from engines.server.responses import Choice, Format, ResponseFormat, ResponsesBody
from engines.server.service import Metrics
from engines.server.settings import ServerSettings

# -- answers ----------------------------------------------------------------------------------------------

_STREAM_BEGINS = {
    "type": "http.response.start",
    "status": 200,
    "headers": [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")],
}


class Reply:
    """An ASGI response. If the client has gone, the work on its request is cancelled."""

    def __init__(
        self,
        served: Served,
        body: AnswerBody,
        metrics: Metrics,
        *,
        arrived_at: float,
        limit_s: float,
        on_end: Callable[[], None],
    ) -> None:
        """``arrived_at`` is on the loop's clock; the request has ``limit_s`` seconds from then. ``on_end`` is called once it is over."""
        self._served, self._body, self._metrics = served, body, metrics
        self._arrived_at, self._on_end = arrived_at, on_end
        self._timeout_s = min(limit_s, body.timeout or limit_s)
        self._ttft_s: float | None = None
        """Seconds from the request's arrival to a stream's first piece."""
        self._format: Format | ResponseFormat
        if isinstance(body, ResponsesBody):
            self._format = ResponseFormat(served.model.name, body)
        else:
            self._format = Format(served.model.name, body)
        self._is_streaming = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._answer_until_disconnect(scope, receive, send)
        finally:
            self._on_end()

    async def _answer_until_disconnect(self, scope: Scope, receive: Receive, send: Send) -> None:
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
            async with self._deadline(), Completion(self._served, self._body).submitted() as completion:
                self._metrics.tokens.labels("prompt").inc(completion.usage.prompt_tokens)
                if self._body.stream:
                    await self._stream(completion, send)
                else:
                    await _json_response(200, await self._whole_answer(completion))(scope, receive, send)
                self._record_metrics(completion)
        except ApiError as error:
            failed = error.status >= 500 and error.code != "unavailable"
            counter = (
                self._metrics.failures.labels(error.code) if failed else self._metrics.rejections.labels(error.status)
            )
            counter.inc()
            if self._is_streaming:
                await send(_body_message(self._format.failure(error), more=False))
            else:
                await _json_response(error.status, error.body, error.headers)(scope, receive, send)

    @asynccontextmanager
    async def _deadline(self) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout_at(self._arrived_at + self._timeout_s):
                yield
        except TimeoutError:
            raise ApiError(
                504,
                f"the answer was not complete after timeout={self._timeout_s:g} s: ask for fewer tokens, or allow more time",
                kind="timeout_error",
                code="deadline_exceeded",
            ) from None

    async def _whole_answer(self, completion: Completion) -> Mapping[str, Any]:
        parts: list[list[AnswerPiece]] = [[] for _ in range(self._body.num_choices)]
        async for part in completion.parts():
            parts[part.choice].append(part)
        choices = [
            Choice(_join(pieces), completion.prompt_of(i), _join_scores(pieces), await completion.prompt_logprobs(i))
            for i, pieces in enumerate(parts)
        ]
        return self._format.whole(choices, completion.usage)

    async def _stream(self, completion: Completion, send: Send) -> None:
        options, prompt_of = self._body.stream_options, completion.prompt_of

        def usage_so_far(choice: int) -> Usage | None:
            return completion.usage_of(choice) if options.include_usage and options.continuous_usage_stats else None

        self._is_streaming = True
        await send(_STREAM_BEGINS)
        choices = range(self._body.num_choices)
        opening = b"".join(self._format.opening(i, prompt_of(i), usage_so_far(i)) for i in choices)
        if isinstance(self._format, ResponseFormat):
            await send(_body_message(opening, more=True))
            opening = b""
        async for part in completion.parts():
            if self._ttft_s is None:
                self._ttft_s = self._since_arrival()
                self._metrics.ttft_s.observe(self._ttft_s)
            # Clients take a chat's first chunk for its first token, so the role waits for that, as in vLLM.
            if content := opening + self._format.part(part, prompt_of(part.choice), usage_so_far(part.choice)):
                await send(_body_message(content, more=True))
                opening = b""
        await send(_body_message(self._format.ending(completion.usage, has_usage=options.include_usage), more=False))

    def _record_metrics(self, completion: Completion) -> None:
        e2el_s, tokens = self._since_arrival(), completion.usage.completion_tokens
        self._metrics.answered.inc()
        self._metrics.tokens.labels("completion").inc(tokens)
        self._metrics.e2el_s.observe(e2el_s)
        if self._ttft_s is not None and tokens > 1 and self._body.num_choices == 1:
            self._metrics.tpot_s.observe((e2el_s - self._ttft_s) / (tokens - 1))
        if completion.has_begun_at is not None:
            self._metrics.queue_s.observe(completion.has_begun_at - self._arrived_at)

    def _since_arrival(self) -> float:
        return asyncio.get_running_loop().time() - self._arrived_at


def _with_id_of_header(body: AnswerBody, request: Request) -> AnswerBody:
    """Return the body with the id of the header X-Request-Id, which goes before its own, as in vLLM. A response has its own id alone."""
    given = request.headers.get("x-request-id")
    if given is None or isinstance(body, ResponsesBody):
        return body
    if len(given) > LONGEST_ID:
        raise refusal(f"X-Request-Id has {len(given)} characters, more than {LONGEST_ID}: shorten it")
    return body.model_copy(update={"request_id": given})


def _json_response(status: int, body: Mapping[str, Any], headers: Mapping[str, str] | None = None) -> Response:
    content = json.dumps(body, ensure_ascii=False, separators=(",", ":"))
    return Response(content, status, headers, "application/json")


def _join(parts: Sequence[AnswerPiece]) -> Piece:
    """Join an answer from all of its parts."""
    pieces = [part.piece for part in parts]
    ids = tuple(token for piece in pieces for token in piece.token_ids)
    return pieces[-1]._replace(text="".join(piece.text for piece in pieces), token_ids=ids)


def _join_scores(parts: Sequence[AnswerPiece]) -> Mapping[str, Any] | None:
    scored = [part.logprobs for part in parts if part.logprobs is not None]
    return join_logprobs(scored) if scored else None


def _body_message(content: bytes, *, more: bool) -> Message:
    return {"type": "http.response.body", "body": content, "more_body": more}


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


# -- routes -----------------------------------------------------------------------------------------------

logger = logging.getLogger(__name__)

_PACKAGE = "dllm-serve-repro"
_PAGE_POLICY = "default-src 'self'; img-src data:; style-src 'unsafe-inline'; script-src 'unsafe-inline'"


_MOST_ID = 2**32 - 1
"""Tokenizers have ids of 32 bits."""


class TokenizeBody(Conversation):
    """A body with either ``prompt`` or ``messages``."""

    not_supported: ClassVar = refused_fields("tokenize")
    model: str = ""
    prompt: str | None = None
    messages: Messages = []
    add_special_tokens: bool | None = None
    """None adds to a prompt what ``/v1/completions`` adds, and nothing to a conversation."""
    return_token_strs: bool = False

    @model_validator(mode="after")
    def _is_of_one_form(self) -> Self:
        if (self.prompt is None) == (not self.messages):
            raise refusal("prompt and messages are two forms of one request: give one of them", "prompt")
        return self

    @property
    def size(self) -> int:
        """Characters of all texts."""
        if self.prompt is not None:
            return len(self.prompt)
        return sum(len(part.text) for message in self.messages for part in message.content)

    def answer(self, served: Served) -> Mapping[str, Any]:
        codec = served.codec
        if self.prompt is not None:
            ids = codec.encode(self.prompt, add_special=self.add_special_tokens)
        else:
            ids = codec.encode_chat(self.turns, self.form, add_special=self.add_special_tokens)
        names = [codec.backend.id_to_token(i) for i in ids] if self.return_token_strs and codec.backend else None
        return {
            "count": len(ids),
            "max_model_len": served.model.max_model_len,
            "tokens": list(ids),
            "token_strs": names,
        }


class DetokenizeBody(Object):
    model: str = ""
    tokens: Annotated[
        list[Annotated[Whole, Field(ge=0, le=_MOST_ID)]], FailFast(), Field(description="a list of token ids")
    ]

    @property
    def size(self) -> int:
        """Characters of the text, about."""
        return 4 * len(self.tokens)

    def answer(self, served: Served) -> Mapping[str, Any]:
        """Return the text, special tokens included. Ids that the vocabulary lacks add nothing."""
        backend = served.codec.backend
        if backend is None:
            raise UserError("tokens: the model has no tokenizer, its ids have no text: ask another model")
        return {"prompt": backend.decode(self.tokens, skip_special_tokens=False)}


class Server:
    """The server: ``app`` answers with ``served``. After ``drain`` it takes no more requests, and finishes those it has."""

    def __init__(self, served: Served, settings: ServerSettings) -> None:
        self._served, self._settings = served, settings
        self._started = time.time()
        self._intake = Intake(settings)
        gauges: Mapping[str, tuple[str, Callable[[], float]]] = {
            "uptime_seconds": ("Since the server began.", lambda: time.time() - self._started),
            "draining": ("1 when no request is taken any more.", lambda: self._intake.is_closed),
            "requests_receiving": ("Requests whose bodies have not come whole.", lambda: self._intake.num_reading),
        }
        self.metrics = Metrics(served.service, served.model.name, gauges)
        self.num_answering = 0
        """Requests under /v1 that have arrived whole and are being answered."""
        page = files(__package__).joinpath("status.html").read_text(encoding="utf-8")
        is_strict = settings.unknown_fields == "refuse"
        completion, chat, responses = (
            Schema(kind, served.model.name, served.model.options, is_strict=is_strict)
            for kind in (CompletionBody, ChatBody, ResponsesBody)
        )
        tokenize = Schema(TokenizeBody, served.model.name, {}, is_strict=is_strict)
        detokenize = Schema(DetokenizeBody, served.model.name, {}, is_strict=is_strict)
        middleware = [Middleware(Addressed, names=host_names(settings.host), refuse=self._refuse)]
        if settings.allow_origin:
            cors = Middleware(
                CORSMiddleware,
                allow_origins=settings.allow_origin,
                allow_methods=["GET", "POST"],
                allow_headers=["*"],
                expose_headers=["Retry-After"],
                allow_private_network=True,
            )
            middleware.append(cors)
        self.app = Starlette(
            routes=[
                Route("/v1/completions", partial(self._answer, completion), methods=["POST"]),
                Route("/v1/chat/completions", partial(self._answer, chat), methods=["POST"]),
                Route("/v1/responses", partial(self._answer, responses), methods=["POST"]),
                Route("/tokenize", partial(self._answer_tokens, tokenize), methods=["POST"]),
                Route("/detokenize", partial(self._answer_tokens, detokenize), methods=["POST"]),
                Route("/v1/models", self._models),
                Route("/v1/models/{name:path}", self._model),
                Route("/health", JSONResponse({"status": "ok"}), methods=["GET"]),
                Route("/ping", JSONResponse({"status": "ok"}), methods=["GET", "POST"]),
                Route("/version", JSONResponse({"version": version_of(_PACKAGE) or "unknown"}), methods=["GET"]),
                Route("/ready", self._ready),
                Route("/metrics", self._metrics),
                Route("/", HTMLResponse(page, headers={"Content-Security-Policy": _PAGE_POLICY}), methods=["GET"]),
            ],
            middleware=middleware,
            exception_handlers={
                ApiError: self._refuse,
                HTTPException: self._refuse_route,
                ClientDisconnect: self._count_disconnect,
                Exception: self._report_fault,
            },
        )

    def drain(self) -> None:
        self._intake.close()

    # -- what is told ----------------------------------------------------------------------------------------

    async def _models(self, request: Request) -> Response:
        self._check_key(request)
        return JSONResponse({"object": "list", "data": [self._model_card()]})

    async def _model(self, request: Request) -> Response:
        self._check_key(request)
        card, name = self._model_card(), request.path_params["name"]
        if not name:  # a slash behind the list's address
            return await self._models(request)
        if name != card["id"]:
            raise ApiError(404, f"model={name!r} is not served here: use {card['id']!r}", code="model_not_found")
        return JSONResponse(card)

    async def _ready(self, _request: Request) -> Response:
        if self._intake.is_closed:
            return JSONResponse({"status": "draining"}, 503)
        is_ready = self._served.service.is_ready
        return JSONResponse({"status": "ready" if is_ready else "loading"}, 200 if is_ready else 503)

    async def _metrics(self, _request: Request) -> Response:
        return Response(self.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    # -- requests ------------------------------------------------------------------------------------------

    async def _answer(self, schema: Schema[Any], request: Request) -> Reply:
        arrived_at = asyncio.get_running_loop().time()
        self._check_key(request)
        content = await self._intake.read(request)
        size = len(content)
        self.num_answering += 1
        try:
            body = _with_id_of_header(await self._read_body(schema, content), request)
            timeout_s, on_end = self._settings.request_timeout, partial(self._release, size)
            return Reply(self._served, body, self.metrics, arrived_at=arrived_at, limit_s=timeout_s, on_end=on_end)
        except BaseException:
            self._release(size)
            raise

    async def _answer_tokens(self, schema: Schema[Any], request: Request) -> Response:
        self._check_key(request)
        content = await self._intake.read(request)
        try:
            body = await self._read_body(schema, content)
            served = self._served
            work = served.work if body.size < LARGE_TEXT else served.slow_work
            answer = partial(for_client, partial(body.answer, served))
            return JSONResponse(await asyncio.get_running_loop().run_in_executor(work, answer))
        finally:
            self._intake.release(len(content))

    async def _read_body(self, schema: Schema[Body], content: bytes) -> Body:
        if len(content) < LARGE_BODY:
            body = schema.read(content)
        else:
            body = await asyncio.get_running_loop().run_in_executor(self._served.slow_work, schema.read, content)
        self.metrics.note_unknown_fields(body.unknown)
        return body

    def _release(self, size: int) -> None:
        self.num_answering -= 1
        self._intake.release(size)

    def _check_key(self, request: Request) -> None:
        key = self._settings.api_key
        if key is None:
            return
        scheme, _, given_key = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not hmac.compare_digest(given_key.strip().encode(), key.encode()):
            raise ApiError(
                401,
                "the API key is missing or wrong: send it as 'Authorization: Bearer KEY'",
                kind="authentication_error",
                code="invalid_api_key",
            )

    def _model_card(self) -> dict[str, Any]:
        model = self._served.model
        card = {"id": model.name, "object": "model", "created": int(self._started), "owned_by": "dllm-serve-repro"}
        return {**card, "max_model_len": model.max_model_len, "default_max_tokens": model.default_tokens, **model.facts}

    # -- refusals ------------------------------------------------------------------------------------------

    async def _refuse(self, request: Request, error: Exception) -> Response:
        assert isinstance(error, ApiError)
        self.metrics.rejections.labels(error.status).inc()
        # We close the connection while the server ends, or if nobody can tell the body from the next request.
        has_two_lengths = "transfer-encoding" in request.headers and "content-length" in request.headers
        is_unclear = error.status == 408 or "expect" in request.headers or has_two_lengths
        close = {"Connection": "close"} if self._intake.is_closed or is_unclear else {}
        return JSONResponse(error.body, error.status, headers={**error.headers, **close})

    async def _refuse_route(self, request: Request, error: Exception) -> Response:
        """Answer a request for an unknown route or method."""
        assert isinstance(error, HTTPException)
        message = (
            f"{request.method} is not allowed on {request.url.path}: see the documentation for its method"
            if error.status_code == 405
            else f"there is nothing at {request.url.path}: use /v1/completions, /v1/chat/completions or /v1/responses"
        )
        answer = await self._refuse(request, ApiError(error.status_code, message))
        answer.headers.update(error.headers or {})  # which methods there are
        return answer

    async def _count_disconnect(self, _request: Request, _error: Exception) -> Response:
        """Count a client that left in the middle of its body; nobody gets this answer."""
        self.metrics.disconnects.inc()
        return Response(status_code=499)

    async def _report_fault(self, request: Request, error: Exception) -> Response:
        logger.error("%s %s", request.method, request.url.path, exc_info=error)
        fault = ApiError(500, f"a fault of this server ({type(error).__name__}): see its log", kind="server_error")
        return JSONResponse(fault.body, fault.status)
