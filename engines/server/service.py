"""The engine's process as the event loop sees it: we start it, start it again when it has ended, and pass its events on.

Requests that are open when it ends fail. ``/metrics`` tells how requests and the engine do, and the status page reads it.
"""

import asyncio
import logging
import os
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import count
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from engines.errors import RunError, UserError
from engines.server.errors import ApiError, unavailable
from engines.server.protocol import (
    ENDS,
    Able,
    Admitted,
    Cancel,
    EngineStatus,
    Event,
    Failed,
    Ready,
    Report,
    ServedModel,
    Stop,
    Submission,
    Unable,
    frame,
    read_frame,
)

logger = logging.getLogger(__name__)

_STOP_S = 10.0
"""Seconds for the process to end when asked."""

_ENVIRONMENT = {
    # Makes malloc ask for huge pages: a CPU's step reads all weights, and looking up small pages took a tenth of its time.
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
    # oneDNN builds a product for every number of rows, and caches 1,024 of some 0.4 MB. torch caches as many too, and asks
    # oneDNN for each again. Steps of a server have hundreds of sizes, so both caches filled up, and what they dropped left
    # holes between activations.
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "64",
    "LRU_CACHE_CAPACITY": "8",
}
"""Environment of the engine's process, unless the user has set it. Libraries read it once, while they are loaded."""

Sink = Callable[[Event], None]


class EngineProcess:
    """The engine's process. Only ``start`` and ``stop`` wait. ``max_waiting`` bounds the queue, reserved places included."""

    def __init__(self, model: ServedModel, *, max_waiting: int) -> None:
        self._model = model
        self.max_waiting = max_waiting
        self._ids = count()
        self._open: dict[int, Sink] = {}
        self._begun: set[int] = set()
        """The open requests on which work has begun."""
        self._num_reserved = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._watch: asyncio.Task[None] | None = None
        self.is_ready = False
        self.status = EngineStatus()
        """The last status that the engine told; its totals begin anew when an engine is started again."""
        self.num_restarts = 0
        self.is_able = False
        """Whether this machine has what the model needs."""
        self.ended: asyncio.Future[Exception] = asyncio.get_running_loop().create_future()
        """Done, with the reason, once no engine can be started any more."""

    # -- life ----------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the process and return; ``is_ready`` becomes true once the model is loaded."""
        self._watch = asyncio.create_task(self._keep_running(), name="engine")

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
                self._process.kill()  # while it loads, it reads no message
            await asyncio.to_thread(_end, self._process)
        if self._writer is not None:
            self._writer.close()
        self._process = self._writer = None
        self.is_ready = False

    async def _keep_running(self) -> None:
        """Run processes one after the other, until one cannot start."""
        try:
            while True:
                await self._run_one()
                self.num_restarts += 1
        except Exception as error:
            self.is_ready = False
            if not self.ended.done():
                self.ended.set_result(error)

    async def _run_one(self) -> None:
        """Start a process and pass its events on until it ends; raises if it never got ready."""
        our_socket, their_socket = socket.socketpair()
        self._process = await asyncio.to_thread(_spawn, their_socket)
        their_socket.close()
        pid, began_s = self._process.pid, time.monotonic()
        reader, self._writer = await asyncio.open_connection(sock=our_socket)
        self._writer.write(frame(self._model))
        unable: Unable | None = None
        was_ready = False
        while (message := await read_frame(reader)) is not None:
            if isinstance(message, Able):
                self.is_able = True
            elif isinstance(message, Ready):
                was_ready = self.is_ready = True
                if self.num_restarts:
                    logger.warning("engine %d is ready after %.1f s", pid, time.monotonic() - began_s)
                self.status = message.status
            elif isinstance(message, Report):
                self.status = message.status
                for event in message.events:
                    self._dispatch(event)
            else:
                assert isinstance(message, Unable)
                unable = message
        self.is_ready = False
        self._writer.close()
        code = await asyncio.to_thread(self._process.wait)
        if not was_ready:
            if unable is not None and unable.is_users:
                raise UserError(unable.sentence)
            raise RunError(f"the engine's process did not start ({unable.sentence if unable else _exit_text(code)})")
        self.status = EngineStatus()
        reason = unable.sentence if unable is not None else f"its process ended: {_exit_text(code)}"
        logger.warning("engine %d was lost (%s): %d requests fail", pid, reason, self.num_open)
        for request_id in list(self._open):
            self._dispatch(Failed(request_id, f"the engine was lost in the middle of this request ({reason})"))

    # -- requests ------------------------------------------------------------------------------------------

    @property
    def num_open(self) -> int:
        """Requests that were submitted and have not ended."""
        return len(self._open)

    @property
    def num_waiting(self) -> int:
        """Requests on which work has not begun, reserved places included."""
        return len(self._open) - len(self._begun) + self._num_reserved

    def reserve(self, num: int) -> None:
        """Reserve places in the queue, each to be used by ``submit`` or given back. Raises ApiError if there are too few."""
        self._check_ready()
        if self.num_waiting + num > self.max_waiting:
            raise ApiError(
                429,
                f"the queue has no place left of max_queue={self.max_waiting}: come again later, or start the server with a "
                f"longer one",
                kind="rate_limit_error",
                code="queue_full",
                retry_after_s=1,
            )
        self._num_reserved += num

    def _check_ready(self) -> None:
        if self.ended.done():
            raise unavailable("the engine has ended")
        if not self.is_ready:
            raise unavailable("the model is being loaded")

    def give_back(self, num: int) -> None:
        self._num_reserved -= num

    def submit(self, prompt_ids: tuple[int, ...], generation: Any, sink: Sink, *, wants_tokens: bool) -> int:
        """Submit a request on a reserved place, and return its id; ``sink`` is called with each of its events. Raises
        ApiError if the engine was lost since."""
        self._check_ready()
        assert self._writer is not None
        request_id = next(self._ids)
        self._open[request_id] = sink
        self._num_reserved -= 1
        self._writer.write(frame(Submission(request_id, prompt_ids, generation, wants_tokens)))
        return request_id

    def cancel(self, request_id: int) -> None:
        """End the request, whose sink hears nothing more."""
        if self._forget(request_id) is not None and self.is_ready:
            assert self._writer is not None
            self._writer.write(frame(Cancel(request_id)))

    def fail_open(self, sentence: str) -> int:
        """Fail every open request, and return how many there were."""
        lost = list(self._open)
        for request_id in lost:
            sink = self._open[request_id]
            self.cancel(request_id)
            sink(Failed(request_id, sentence))
        return len(lost)

    def _dispatch(self, event: Event) -> None:
        sink = self._open.get(event.request_id)
        if sink is None:
            return  # cancelled while the event was on its way
        if isinstance(event, Admitted):
            self._begun.add(event.request_id)
        elif isinstance(event, ENDS):
            self._forget(event.request_id)
        sink(event)

    def _forget(self, request_id: int) -> Sink | None:
        self._begun.discard(request_id)
        return self._open.pop(request_id, None)


def _spawn(channel: socket.socket) -> subprocess.Popen[bytes]:
    descriptor = channel.fileno()
    # The new process finds modules where this one does; an empty path stands for the working directory.
    environment = {
        **_ENVIRONMENT,
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
    }
    command = [sys.executable, "-m", "engines.server.process", str(descriptor)]
    # In its own session Ctrl-C in a terminal never reaches it, not even before it can ignore it: the server decides what that means.
    return subprocess.Popen(
        command, pass_fds=[descriptor], env=environment, stdin=subprocess.DEVNULL, start_new_session=True
    )


def _end(process: subprocess.Popen[bytes]) -> None:
    try:
        process.wait(_STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _exit_text(code: int) -> str:
    return f"killed by signal {-code}" if code < 0 else f"exit code {code}"


PREFIX = "repro_"
_RECENT_S, _MOST_RECENT = 60.0, 2048
"""Seconds for which a value counts as recent, and how many values do at most."""
_MOST_NAMES, _LONGEST_NAME = 64, 64
"""Most unknown fields that we count by name, and most characters of such a name."""
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
_SHORT = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)


class Metrics:
    """Counts requests by what became of them, and shows the engine's figures as it last told them."""

    def __init__(
        self, service: EngineProcess, model: str, gauges: Mapping[str, tuple[str, Callable[[], float]]]
    ) -> None:
        """``gauges`` holds the server's own gauges by name: each is a description and a function that returns the current value."""
        registry = self._registry = CollectorRegistry()
        registry.register(_OfTheEngine(service))
        Info(f"{PREFIX}model", "What is served.", registry=registry).info({"name": model})
        for name, (description, read) in gauges.items():
            Gauge(f"{PREFIX}{name}", description, registry=registry).set_function(read)
        self.answered = Counter(f"{PREFIX}requests", "Requests answered to their end.", registry=registry)
        self.rejections = Counter(
            f"{PREFIX}rejections", "Requests refused, by HTTP status.", ["status"], registry=registry
        )
        self.failures = Counter(
            f"{PREFIX}failures", "Requests that failed after they were taken, by code.", ["code"], registry=registry
        )
        self.disconnects = Counter(f"{PREFIX}disconnects", "Requests whose client left first.", registry=registry)
        self._unknown_fields = Counter(
            f"{PREFIX}unknown_fields",
            "Requests with a field that is unknown here, by its name.",
            ["field"],
            registry=registry,
        )
        self._unknown_names: set[str] = set()
        self.tokens = Counter(f"{PREFIX}tokens", "Tokens of prompts and of answers.", ["kind"], registry=registry)
        self.queue_s = self._histogram("queue_seconds", "From arrival until work on a request began.")
        first, later = "time_to_first_block_seconds", "time_per_output_token_seconds"
        ttft_s = self._histogram(first, "From arrival to the first piece of a stream.")
        tpot_s = self._histogram(later, "From a stream's first piece to its end, by token after the first.", _SHORT)
        self.ttft_s, self.tpot_s = _Recent(first, ttft_s), _Recent(later, tpot_s)
        registry.register(self.ttft_s)
        registry.register(self.tpot_s)
        self.e2el_s = self._histogram("request_seconds", "From arrival to the end of the answer.")
        for kind in ("prompt", "completion"):
            self.tokens.labels(kind)

    def _histogram(self, name: str, description: str, buckets: Sequence[float] = _SECONDS) -> Histogram:
        return Histogram(f"{PREFIX}{name}", description, buckets=buckets, registry=self._registry)

    def note_unknown_fields(self, names: Iterable[str]) -> None:
        """Count unknown fields. Clients choose the names, so we count only the first few by name, and later ones as other."""
        for name in {self._label_of(name) for name in names}:
            self._unknown_fields.labels(name).inc()

    def _label_of(self, name: str) -> str:
        is_plain = len(name) <= _LONGEST_NAME and name.isascii() and name.isprintable()
        if is_plain and len(self._unknown_names) < _MOST_NAMES:
            self._unknown_names.add(name)
        return name if name in self._unknown_names else "other"

    def text(self) -> bytes:
        return generate_latest(self._registry)


class _Recent(Collector):
    """Quantiles of the last minute's values of ``histogram``; none if there was no value."""

    def __init__(self, name: str, histogram: Histogram) -> None:
        self._name, self._histogram = name, histogram
        self._values: deque[tuple[float, float]] = deque(maxlen=_MOST_RECENT)

    def observe(self, value: float) -> None:
        self._histogram.observe(value)
        self._values.append((time.monotonic(), value))

    def collect(self) -> Iterator[Metric]:
        since = time.monotonic() - _RECENT_S
        values = sorted(value for time_s, value in self._values if time_s >= since)
        description = "Of the streams of the last minute."
        family = GaugeMetricFamily(f"{PREFIX}recent_{self._name}", description, labels=["quantile"])
        for quantile in (0.5, 0.9) if values else ():
            family.add_metric([str(quantile)], values[int(quantile * len(values))])
        yield family


class _OfTheEngine(Collector):
    """The engine's figures, which are read when somebody asks for the metrics."""

    def __init__(self, service: EngineProcess) -> None:
        self._service = service

    def collect(self) -> Iterator[Metric]:
        service, status = self._service, self._service.status
        for name, description, value in (
            ("ready", "1 when the engine takes requests.", float(service.is_ready)),
            ("requests_open", "Requests taken and not ended.", service.num_open),
            ("requests_waiting", "Requests that work has not begun on, places reserved included.", service.num_waiting),
            ("requests_running", "Requests admitted by the engine.", status.running),
            ("budget_tokens", "Most query tokens of a step.", status.budget),
            ("budget_tokens_used", "Query tokens charged to the last step.", status.budget_used),
            ("pool_rows", "Rows of the KV pool.", status.pool),
            ("pool_rows_used", "Rows of the KV pool in use.", status.pool_used),
            ("pool_rows_idle", "Rows of the KV pool kept for a next turn.", status.pool_idle),
        ):
            yield GaugeMetricFamily(f"{PREFIX}{name}", description, value=value)
        phases = GaugeMetricFamily(f"{PREFIX}step_requests", "Requests of the last step by phase.", labels=["phase"])
        for phase, num in status.phases.items():
            phases.add_metric([phase], num)
        yield phases
        for name, description, total in (
            ("forward_passes", "Steps of the engine that ran a forward pass.", status.forward_passes),
            ("committed_tokens", "Tokens committed by the engine, of answers given up too.", status.committed_tokens),
            ("engine_busy_seconds", "Time inside steps.", status.busy_s),
            ("engine_restarts", "Times that the engine's process was started again.", service.num_restarts),
            *((name, "Counted by the engine.", num) for name, num in status.counts.items()),
        ):
            yield CounterMetricFamily(f"{PREFIX}{name}", description, value=total)
