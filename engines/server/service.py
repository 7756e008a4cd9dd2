"""The engine's process as the event loop sees it: starts it, starts it again where it ended, and passes its events on.

Requests that it had not begun when it ended are given to the next one; those it had begun fail.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

from engines.errors import RunError, UserError
from engines.server.errors import queue_full, unavailable
from engines.server.protocol import ENDS, Admitted, EngineStatus, Event, Failed, Finished, ServedModel, Submission
from engines.server.wire import Able, Cancel, Ready, Report, Stop, Unable, frame, read_frame

logger = logging.getLogger(__name__)

_MOST_RESTARTS = 3
"""In a row, without a request finished in between."""
_MOST_TRIES = 2
"""Processes that a request is given to: what ends each of them must not go round for ever."""
_STOP_S = 10.0
"""For the process to end when asked."""

_ENVIRONMENT = {
    # Has malloc ask for huge pages: a CPU's step reads all weights, and to find their small ones took a tenth of it.
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
    # oneDNN makes a product anew for every number of rows, and keeps 1,024 of some 0.4 MB; torch keeps as many besides, and asks
    # oneDNN for each again. Steps of a server have hundreds of sizes, so both filled up, and what they let go left holes
    # between activations.
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "64",
    "LRU_CACHE_CAPACITY": "8",
}
"""Environment of the engine's process, unless the user has set it. Libraries read it once, while they are loaded."""

_TOTALS = ("forward_passes", "committed_tokens", "busy_s")


Sink = Callable[[Event], None]


@dataclass(slots=True)
class _Open:
    """A request that has not ended."""

    submission: Submission
    sink: Sink
    has_begun: bool = False
    tries: int = 0


class EngineProcess:
    """Nothing here waits but ``start`` and ``stop``. ``max_waiting`` bounds the queue, places reserved in it included."""

    def __init__(self, model: ServedModel, *, max_waiting: int) -> None:
        self._model = model
        self._max_waiting = max_waiting
        self._ids = count()
        self._open: dict[int, _Open] = {}
        self._num_begun = 0
        self._num_reserved = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._watch: asyncio.Task[None] | None = None
        self.is_ready = False
        self.status = EngineStatus()
        """As last told; its totals do not fall when an engine is started again."""
        self._base = EngineStatus()
        """Totals of the processes before this one."""
        self._num_finished = 0
        self.num_restarts = 0
        self.is_able = False
        """Whether this machine has what the model needs."""
        self.ended: asyncio.Future[Exception] | None = None
        """Done, with the reason, when no engine can be had any more."""

    # -- life ----------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the process and return; ``is_ready`` once the model is loaded."""
        self.ended = asyncio.get_running_loop().create_future()
        self._watch = asyncio.create_task(self._keep(), name="engine")

    async def stop(self) -> None:
        """End the process. Requests that are open hear nothing more."""
        if self._watch is not None:
            self._watch.cancel()
            with suppress(asyncio.CancelledError):
                await self._watch
        if self._writer is not None:
            with suppress(ConnectionError, RuntimeError):
                self._writer.write(frame(Stop()))
        if self._process is not None:
            if not self.is_ready:
                self._process.kill()  # it loads, and hears nothing meanwhile
            await asyncio.to_thread(_end, self._process)
        if self._writer is not None:
            self._writer.close()
        self._process = self._writer = None
        self.is_ready = False

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    async def _keep(self) -> None:
        """Run one process after the other, until one cannot start or too many have ended."""
        in_a_row = 0
        while True:
            finished_before = self._num_finished
            try:
                await self._run_one()
            except Exception as error:
                self._give_up(error)
                return
            in_a_row = 1 if self._num_finished > finished_before else in_a_row + 1
            if in_a_row > _MOST_RESTARTS:
                self._give_up(RunError(f"the engine's process ended {in_a_row} times in a row: see its messages above"))
                return
            self.num_restarts += 1

    async def _run_one(self) -> None:
        """Start a process and pass its events on until it ends; raises where it never got ready."""
        here, there = socket.socketpair()
        self._process = await asyncio.to_thread(_spawn, there)
        there.close()
        pid, began = self._process.pid, time.monotonic()
        reader, self._writer = await asyncio.open_connection(sock=here)
        self._writer.write(frame(self._model))
        said: Unable | None = None
        was_ready = False
        while (message := await read_frame(reader)) is not None:
            if isinstance(message, Able):
                self.is_able = True
            elif isinstance(message, Ready):
                was_ready = self.is_ready = True
                if self.num_restarts:
                    taken = time.monotonic() - began
                    logger.warning(
                        "engine %d is ready after %.1f s, with %d requests to go on", pid, taken, self.num_open
                    )
                self._tell(message.status)
                for open_ in self._open.values():
                    self._send(open_)
            elif isinstance(message, Report):
                self._tell(message.status)
                for event in message.events:
                    self._pass(event)
            else:
                assert isinstance(message, Unable)
                said = message
        self.is_ready = False
        self._writer.close()
        code = await asyncio.to_thread(self._process.wait)
        if not was_ready:
            if said is not None and said.is_users:
                raise UserError(said.sentence)
            raise RunError(f"the engine's process did not start ({said.sentence if said else _how(code)})")
        self._base = self.status
        self.status = replace(self._base, waiting=0, running=0, phases={}, budget_used=0, pool_used=0, pool_idle=0)
        reason = said.sentence if said is not None else f"its process ended: {_how(code)}"
        lost = [i for i, open_ in self._open.items() if open_.has_begun or open_.tries >= _MOST_TRIES]
        logger.warning(
            "engine %d was lost (%s): %d requests fail, %d wait on", pid, reason, len(lost), self.num_open - len(lost)
        )
        for request_id in lost:
            self._pass(Failed(request_id, f"the engine was lost in the middle of this request ({reason})"))

    def _give_up(self, error: Exception) -> None:
        self.is_ready = False
        for request_id in list(self._open):
            self._pass(Failed(request_id, f"there is no engine any more ({error})"))
        assert self.ended is not None
        if not self.ended.done():
            self.ended.set_result(error)

    # -- requests ------------------------------------------------------------------------------------------

    @property
    def num_open(self) -> int:
        """Requests that were submitted and have not ended."""
        return len(self._open)

    @property
    def num_waiting(self) -> int:
        """Requests that work has not begun on, places reserved included."""
        return len(self._open) - self._num_begun + self._num_reserved

    def reserve(self, num: int) -> None:
        """Take places in the queue, each to be used by ``submit`` or given back. Raise ApiError where there are none."""
        if self.ended is not None and self.ended.done():
            raise unavailable("the engine has ended")
        if not self.is_ready and self.num_restarts == 0:
            raise unavailable("the model is being loaded")
        if self.num_waiting + num > self._max_waiting:
            raise queue_full(self._max_waiting)
        self._num_reserved += num

    def give_back(self, num: int) -> None:
        self._num_reserved -= num

    def submit(self, prompt_ids: tuple[int, ...], generation: Any, sink: Sink, *, wants_tokens: bool) -> int:
        """Use a reserved place; ``sink`` is called with every event of the request. Its id."""
        request_id = next(self._ids)
        open_ = self._open[request_id] = _Open(Submission(request_id, prompt_ids, generation, wants_tokens), sink)
        self._num_reserved -= 1
        if self.is_ready:
            self._send(open_)
        return request_id

    def _send(self, open_: _Open) -> None:
        assert self._writer is not None
        open_.tries += 1
        self._writer.write(frame(open_.submission))

    def cancel(self, request_id: int) -> None:
        """End the request, whose sink hears nothing more."""
        if self._forget(request_id) is not None and self.is_ready:
            assert self._writer is not None
            self._writer.write(frame(Cancel(request_id)))

    def fail_open(self, sentence: str) -> int:
        """Give up every open request; how many they were."""
        lost = list(self._open)
        for request_id in lost:
            sink = self._open[request_id].sink
            self.cancel(request_id)
            sink(Failed(request_id, sentence))
        return len(lost)

    def _pass(self, event: Event) -> None:
        open_ = self._open.get(event.request_id)
        if open_ is None:
            return  # cancelled while the event was on its way
        if isinstance(event, Admitted):
            open_.has_begun = True
            self._num_begun += 1
        elif isinstance(event, ENDS):
            self._num_finished += isinstance(event, Finished)
            self._forget(event.request_id)
        open_.sink(event)

    def _forget(self, request_id: int) -> _Open | None:
        open_ = self._open.pop(request_id, None)
        if open_ is not None:
            self._num_begun -= open_.has_begun
        return open_

    def _tell(self, status: EngineStatus) -> None:
        totals = {name: getattr(status, name) + getattr(self._base, name) for name in _TOTALS}
        counts = {name: num + self._base.counts.get(name, 0) for name, num in status.counts.items()}
        self.status = replace(status, **totals, counts=counts)


def _spawn(there: socket.socket) -> subprocess.Popen[bytes]:
    descriptor = there.fileno()
    # It finds modules where this process does, whose working directory may be spelt as nothing.
    environment = {
        **_ENVIRONMENT,
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
    }
    command = [sys.executable, "-m", "engines.server.process", str(descriptor)]
    # Where Ctrl-C in a terminal does not reach it, not even before it could ignore it: the server decides what that means.
    return subprocess.Popen(
        command, pass_fds=[descriptor], env=environment, stdin=subprocess.DEVNULL, start_new_session=True
    )


def _end(process: subprocess.Popen[bytes]) -> None:
    try:
        process.wait(_STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _how(code: int) -> str:
    return f"killed by signal {-code}" if code < 0 else f"exit code {code}"
