"""The routes: OpenAI's under ``/v1``, and health, readiness, metrics and a status page beside them."""

from __future__ import annotations

import asyncio
import hmac
import logging
import time
from collections.abc import Awaitable, Callable
from functools import partial
from importlib.resources import files
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import HTMLResponse, JSONResponse, Response
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Receive, Scope, Send

from engines.server.body import ChatBody, CompletionBody, Schema
from engines.server.completion import Served
from engines.server.errors import ApiError
from engines.server.intake import LARGE_BODY, Addressed, Intake
from engines.server.metrics import Metrics
from engines.server.reply import Reply
from engines.server.settings import ServerSettings

logger = logging.getLogger(__name__)

_PAGE_POLICY = "default-src 'self'; img-src data:; style-src 'unsafe-inline'; script-src 'unsafe-inline'"


class Server:
    """``app`` answers with ``served``. After ``drain`` it takes no request any more and ends those it has."""

    def __init__(self, served: Served, settings: ServerSettings) -> None:
        self._served, self._settings = served, settings
        self.metrics = Metrics(served.service)
        self._started = int(time.time())
        self._intake = Intake(settings)
        self.num_answering = 0
        """Requests under /v1 that came whole and are being answered."""
        self.app = FastAPI(title="dllm-serve-repro", docs_url=None, redoc_url=None, openapi_url=None)
        self._add_routes()

    def drain(self) -> None:
        self._intake.close()

    @property
    def num_reading(self) -> int:
        """Requests whose bodies have not come whole."""
        return self._intake.num_reading

    @property
    def is_draining(self) -> bool:
        return self._intake.is_closed

    def _add_routes(self) -> None:
        app, served = self.app, self._served.model
        schemas = [Schema(kind, served.name, served.options) for kind in (CompletionBody, ChatBody)]
        page = files(__package__).joinpath("status.html").read_text(encoding="utf-8")
        app.add_middleware(_Addressed, check=Addressed(self._settings.host).check, say=self._say)
        app.add_exception_handler(ApiError, self._say)
        app.add_exception_handler(HTTPException, self._say_http)
        app.add_exception_handler(ClientDisconnect, self._note_departure)
        app.add_exception_handler(Exception, self._say_fault)

        @app.post("/v1/completions")
        async def completions(request: Request) -> Response:
            return await self._answer(request, schemas[0])

        @app.post("/v1/chat/completions")
        async def chat_completions(request: Request) -> Response:
            return await self._answer(request, schemas[1])

        @app.get("/v1/models")
        async def models(request: Request) -> Response:
            self._check_key(request)
            return JSONResponse({"object": "list", "data": [self._card()]})

        @app.get("/v1/models/{name:path}")
        async def model(request: Request, name: str) -> Response:
            self._check_key(request)
            card = self._card()
            if name != card["id"]:
                raise ApiError(404, f"model={name!r} is not served here: use {card['id']!r}", code="model_not_found")
            return JSONResponse(card)

        @app.get("/health")
        async def health() -> Response:
            return JSONResponse({"status": "ok"})

        @app.get("/ready")
        async def ready() -> Response:
            is_ready = self._served.service.is_ready and not self.is_draining
            said = "ready" if is_ready else "draining" if self.is_draining else "loading"
            return JSONResponse({"status": said}, 200 if is_ready else 503)

        @app.get("/metrics")
        async def metrics() -> Response:
            return Response(self.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

        @app.get("/status")
        async def status() -> Response:
            about = {"model": self._served.model.name, "uptime_s": time.time() - self._started}
            own = {"draining": self.is_draining, "receiving": self.num_reading}
            return JSONResponse({**about, **own, **self.metrics.page()})

        @app.get("/")
        async def status_page() -> Response:
            return HTMLResponse(page, headers={"Content-Security-Policy": _PAGE_POLICY})

    # -- requests ------------------------------------------------------------------------------------------

    async def _answer(self, request: Request, schema: Schema) -> Response:
        arrived_at = asyncio.get_running_loop().time()
        self._check_key(request)
        body = await self._intake.read(request)
        size = len(body)
        self.num_answering += 1
        try:
            if size < LARGE_BODY:
                asked = schema.read(body)
            else:
                loop = asyncio.get_running_loop()
                asked = await loop.run_in_executor(self._served.slow_work, schema.read, body)
            reply = Reply(
                self._served, asked, self.metrics, arrived_at=arrived_at, most_s=self._settings.request_timeout_s
            )
        except BaseException:
            self._answered(size)
            raise
        return _Counted(reply, partial(self._answered, size))

    def _answered(self, size: int) -> None:
        self.num_answering -= 1
        self._intake.release(size)

    def _check_key(self, request: Request) -> None:
        key = self._settings.api_key
        if key is None:
            return
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not hmac.compare_digest(given.strip().encode(), key.encode()):
            raise ApiError(
                401,
                "the API key is missing or wrong: send it as 'Authorization: Bearer KEY'",
                kind="authentication_error",
                code="invalid_api_key",
            )

    def _card(self) -> dict[str, Any]:
        model = self._served.model
        own = {"max_model_len": model.max_model_len, **model.facts}
        return {"id": model.name, "object": "model", "created": self._started, "owned_by": "dllm-serve-repro", **own}

    # -- refusals ------------------------------------------------------------------------------------------

    async def _say(self, request: Request, error: Exception) -> Response:
        assert isinstance(error, ApiError)
        self.metrics.rejections.labels(error.status).inc()
        # A connection is not kept while the server ends, nor where nobody knows what is a body and what the next request.
        is_unclear = error.status == 408 or "expect" in request.headers or "transfer-encoding" in request.headers
        close = {"Connection": "close"} if self.is_draining or is_unclear else {}
        return JSONResponse(error.body, error.status, headers={**error.headers, **close})

    async def _say_http(self, request: Request, error: Exception) -> Response:
        """An unknown route or method."""
        assert isinstance(error, HTTPException)
        message = (
            f"{request.method} is not allowed on {request.url.path}: see the documentation for its method"
            if error.status_code == 405
            else f"there is nothing at {request.url.path}: use /v1/completions or /v1/chat/completions"
        )
        return await self._say(request, ApiError(error.status_code, message))

    async def _note_departure(self, _request: Request, _error: Exception) -> Response:
        """In the middle of its body; nobody gets this answer."""
        self.metrics.disconnects.inc()
        return Response(status_code=499)

    async def _say_fault(self, request: Request, error: Exception) -> Response:
        logger.error("%s %s", request.method, request.url.path, exc_info=error)
        said = ApiError(500, f"a fault of this server ({type(error).__name__}): see its log", kind="server_error")
        return JSONResponse(said.body, said.status)


class _Addressed:
    """``app``, for requests whose headers ``check`` lets pass."""

    def __init__(self, app: ASGIApp, check: Callable[..., None], say: Callable[..., Awaitable[Response]]) -> None:
        self._app, self._check, self._say = app, check, say

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        answer = self._app
        try:
            self._check(scope["headers"])
        except ApiError as error:
            answer = await self._say(Request(scope), error)
        await answer(scope, receive, send)


class _Counted(Response):
    """``reply``, and a word when it is over."""

    def __init__(self, reply: Reply, on_end: Callable[[], None]) -> None:
        super().__init__()
        self._reply, self._on_end = reply, on_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._reply(scope, receive, send)
        finally:
            self._on_end()
