"""Runs a server, with the engine beside it, from opening its socket to its end; SIGTERM and Ctrl-C ask it to finish."""

import asyncio
import resource
import signal
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from functools import partial
from typing import cast

import uvicorn

from engines.errors import RunError, UserError
from engines.server.app import Server
from engines.server.codec import Codec
from engines.server.completion import Served
from engines.server.connection import Connection
from engines.server.protocol import ServedModel
from engines.server.service import EngineProcess
from engines.server.settings import ServerSettings

_POLL_S = 0.02
_KEEP_ALIVE_S = 1260
"""Longer than clients and proxies keep an idle connection (Java before JDK 20: 1,200 s). So none of them sends a request on
a connection that we are closing."""
_BACKLOG = 2048
_MOST_HEAD = 1 << 14
"""Most bytes of a request's head, if it does not come at once."""
_FLUSH_S = 5
"""Seconds for a client to read the end of what we wrote to it."""


def run(model: ServedModel, codec: Codec, settings: ServerSettings, say: Callable[[str], None]) -> None:
    """Serve until SIGTERM or Ctrl-C, then finish the requests taken. A second signal ends the server at once.

    ``say`` gets a line when the socket is open, when we take requests, and when the end begins. Raises UserError if the
    address or the model cannot be used. Raises RunError if the engine is lost for good, or if requests are given up at the
    end. Nobody can connect before the engine's process has found that this machine can run the model.
    """
    with closing(_bind(settings)) as listener:
        asyncio.run(_serve(model, codec, settings, listener, say))


async def _serve(
    model: ServedModel, codec: Codec, settings: ServerSettings, listener: socket.socket, say: Callable[[str], None]
) -> None:
    service = EngineProcess(model, max_waiting=settings.max_queue)
    host, port = listener.getsockname()[:2]
    address = f"http://{f'[{host}]' if ':' in host else host}:{port}"
    with _text_thread() as work, _text_thread() as slow_work:
        served = Served(model=model, codec=codec, service=service, work=work, slow_work=slow_work)
        server = Server(served, settings)
        http = HttpServer(http_config(server, settings))
        signals = _Signals()
        service.start()
        serving: asyncio.Task[None] | None = None
        try:
            await _until_able(service, signals)
            if not signals.count:
                with _naming_address(settings):
                    listener.listen(_BACKLOG)
                serving = asyncio.create_task(http.serve(sockets=[listener]))
                say(f"listening on {address}, loading {model.name}")
            lost = await _until_over(service, server, signals, settings, say, address)
        finally:
            signals.close()
            http.should_exit = True
            http.force_exit = signals.count > 1
            if serving is not None:
                with suppress(asyncio.CancelledError):
                    await serving
            await service.stop()
    if lost:
        raise RunError(f"{lost} requests were given up at the end: allow them more with --drain-timeout")


async def _until_able(service: EngineProcess, signals: "_Signals") -> None:
    """Wait until the engine's process has checked this machine, or for a signal. Raises if the machine lacks something."""
    while not service.is_able and not signals.count:
        if service.ended.done():
            raise service.ended.result()
        await asyncio.sleep(_POLL_S)


async def _until_over(
    service: EngineProcess,
    server: Server,
    signals: "_Signals",
    settings: ServerSettings,
    say: Callable[[str], None],
    address: str,
) -> int:
    """Serve until a signal, drain, and return how many requests were given up. Raises the error that ended the engine for good."""
    is_announced = False
    while not signals.count:
        if service.ended.done():
            raise service.ended.result()
        if service.is_ready and not is_announced:
            say(f"ready: {address}/v1, status page at {address}/")
            is_announced = True
        await asyncio.sleep(_POLL_S)
    say(f"ending: {server.num_answering} requests to finish")
    server.drain()
    loop = asyncio.get_running_loop()
    deadline = loop.time() + settings.drain_timeout
    while server.num_answering and not service.ended.done() and signals.count == 1 and loop.time() < deadline:
        await asyncio.sleep(_POLL_S)
    return service.fail_open("the server has ended before this request: send it again")


def http_config(server: Server, settings: ServerSettings) -> uvicorn.Config:
    connection = partial(Connection, on_refusal=lambda status: server.metrics.rejections.labels(status).inc())
    return uvicorn.Config(
        server.app,
        http=cast(type[asyncio.Protocol], connection),
        ws="none",
        # Its warnings are about what clients send, a line for each: they are counted in /metrics instead.
        log_level="error",
        access_log=False,
        lifespan="off",
        server_header=False,
        proxy_headers=False,
        backlog=_BACKLOG,
        limit_concurrency=_max_connections(settings.max_connections) + 1,
        h11_max_incomplete_event_size=_MOST_HEAD,
        timeout_keep_alive=_KEEP_ALIVE_S,
        timeout_graceful_shutdown=_FLUSH_S,
    )


def _max_connections(wanted: int) -> int:
    """Return how many of ``wanted`` connections this process has descriptors for, beside those being accepted."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= soft < 4 * wanted:
        soft = 4 * wanted if hard == resource.RLIM_INFINITY else min(4 * wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return wanted if soft == resource.RLIM_INFINITY else min(wanted, soft // 2)


def _text_thread() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(max_workers=1, thread_name_prefix="text")


class HttpServer(uvicorn.Server):
    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals to ``_Signals`` instead of uvicorn."""
        yield


class _Signals:
    """Counts SIGTERM and Ctrl-C; a signal that a background job was started to ignore stays ignored."""

    def __init__(self) -> None:
        self.count = 0
        self._loop = asyncio.get_running_loop()
        both = (signal.SIGTERM, signal.SIGINT)
        self._numbers = [number for number in both if signal.getsignal(number) is not signal.SIG_IGN]
        for number in self._numbers:
            self._loop.add_signal_handler(number, self._receive)

    def _receive(self) -> None:
        self.count += 1

    def close(self) -> None:
        for number in self._numbers:
            self._loop.remove_signal_handler(number)


def _bind(settings: ServerSettings) -> socket.socket:
    """Return a socket that is bound to its address, but does not listen yet."""
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    with _naming_address(settings):
        # asyncio sends small pieces at once only if the protocol is named. Otherwise a stream's first piece waits 40 ms for
        # the client to acknowledge its head.
        listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            listener.bind((settings.host, settings.port))
        except OSError:
            listener.close()
            raise
    return listener


@contextmanager
def _naming_address(settings: ServerSettings) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UserError(
            f"host={settings.host!r}, port={settings.port} cannot be listened on ({error.strerror or error}): give another "
            f"--port or --host"
        ) from error
