"""The server in a thread of the test's process, its engine in a process of its own."""

import asyncio
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from engines.server.app import Server
from engines.server.completion import Served
from engines.server.run import HttpServer, http_config
from engines.server.service import EngineProcess
from engines.server.settings import ServerSettings

WAIT_S = 60.0


class Running:
    def __init__(self, port: int, server: Server, service: EngineProcess, loop: asyncio.AbstractEventLoop) -> None:
        self.port, self.server, self.service, self._loop = port, server, service, loop

    def call(self, function: Callable[[], Any]) -> Any:
        """In the event loop's thread."""

        async def run() -> Any:
            return function()

        return asyncio.run_coroutine_threadsafe(run(), self._loop).result(WAIT_S)

    def wait_until(self, is_so: Callable[[], bool]) -> None:
        until = time.monotonic() + WAIT_S
        while not self.call(is_so):
            assert time.monotonic() < until, "it did not come about"
            time.sleep(0.005)

    @contextmanager
    def standing_still(self) -> Iterator[None]:
        """Who connects and sends meanwhile is heard of afterwards, all of it at once: no bound on time has begun before."""
        stands, go_on = threading.Event(), threading.Event()

        def stand() -> None:
            stands.set()
            go_on.wait(WAIT_S)

        self._loop.call_soon_threadsafe(stand)
        assert stands.wait(WAIT_S)
        try:
            yield
        finally:
            go_on.set()

    def wait_until_idle(self) -> None:
        """No request is open, here or in the engine."""
        self.wait_until(lambda: self.service.num_open == 0 and self.server.num_answering == 0)
        self.wait_until(lambda: self.service.status.running == self.service.status.waiting == 0)


@contextmanager
def running_server(
    model: Any, codec: Any, settings: ServerSettings | None = None, *, is_ready: bool = True
) -> Iterator[Running]:
    settings = settings or ServerSettings()
    listener = socket.create_server(("127.0.0.1", 0))
    made: list[Running] = []
    has_started = threading.Event()
    over = threading.Event()

    async def serve() -> None:
        service = EngineProcess(model, max_waiting=settings.max_queue)
        with ThreadPoolExecutor(max_workers=1) as work, ThreadPoolExecutor(max_workers=1) as slow_work:
            served = Served(model=model, codec=codec, service=service, work=work, slow_work=slow_work)
            server = Server(served, settings)
            http = HttpServer(http_config(server, settings))
            service.start()
            serving = asyncio.create_task(http.serve(sockets=[listener]))
            made.append(Running(listener.getsockname()[1], server, service, asyncio.get_running_loop()))
            has_started.set()
            await asyncio.to_thread(over.wait)
            http.should_exit = True
            await serving
            await service.stop()

    thread = threading.Thread(target=asyncio.run, args=(serve(),), daemon=True)
    thread.start()
    assert has_started.wait(WAIT_S)
    try:
        if is_ready:
            made[0].wait_until(lambda: made[0].service.is_ready)
        yield made[0]
    finally:
        over.set()
        thread.join(WAIT_S)
        listener.close()
