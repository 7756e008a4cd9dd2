"""What ``/metrics`` says, in Prometheus' text format; the status page reads it too."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from engines.server.service import EngineProcess

PREFIX = "repro_"
_RECENT_S, _MOST_RECENT = 60.0, 2048
"""How long a time counts as recent, and how many do at most."""
_MOST_NAMES, _LONGEST_NAME = 64, 64
"""Unknown fields that are told by their name, and characters of one."""
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
_SHORT = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)


class Metrics:
    """Counts of requests by what became of them, and the engine's own figures as it last told them."""

    def __init__(self, service: EngineProcess, model: str, own: Mapping[str, tuple[str, Callable[[], float]]]) -> None:
        """``own`` is what the server says of itself, by name: in words, and now."""
        registry = self._registry = CollectorRegistry()
        registry.register(_OfTheEngine(service))
        Info(f"{PREFIX}model", "What is served.", registry=registry).info({"name": model})
        for name, (what, read) in own.items():
            Gauge(f"{PREFIX}{name}", what, registry=registry).set_function(read)
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
        self.ttft_s = self._histogram("time_to_first_block_seconds", "From arrival to the first piece of a stream.")
        self.tpot_s = self._histogram(
            "time_per_output_token_seconds", "From a stream's first piece to its end, by token after the first.", _SHORT
        )
        self._recent_ttft_s = _Recent("recent_time_to_first_block_seconds", "Of the streams of the last minute.")
        self._recent_tpot_s = _Recent("recent_time_per_output_token_seconds", "Of the streams of the last minute.")
        registry.register(self._recent_ttft_s)
        registry.register(self._recent_tpot_s)
        self.e2el_s = self._histogram("request_seconds", "From arrival to the end of the answer.")
        for kind in ("prompt", "completion"):
            self.tokens.labels(kind)

    def _histogram(self, name: str, what: str, buckets: Sequence[float] = _SECONDS) -> Histogram:
        return Histogram(f"{PREFIX}{name}", what, buckets=buckets, registry=self._registry)

    def note_unknown_fields(self, names: Iterable[str]) -> None:
        """Clients choose the names: the first few are told, what comes behind counts as other."""
        for name in {self._label_of(name) for name in names}:
            self._unknown_fields.labels(name).inc()

    def _label_of(self, name: str) -> str:
        is_told = len(name) <= _LONGEST_NAME and name.isascii() and name.isprintable()
        if is_told and len(self._unknown_names) < _MOST_NAMES:
            self._unknown_names.add(name)
        return name if name in self._unknown_names else "other"

    def note_first_piece(self, ttft_s: float) -> None:
        self.ttft_s.observe(ttft_s)
        self._recent_ttft_s.add(ttft_s)

    def note_stream(self, tpot_s: float) -> None:
        self.tpot_s.observe(tpot_s)
        self._recent_tpot_s.add(tpot_s)

    def text(self) -> bytes:
        return generate_latest(self._registry)


class _Recent(Collector):
    """Quantiles of the last minute's values; none where there was no value."""

    def __init__(self, name: str, what: str) -> None:
        self._name, self._what = name, what
        self._values: deque[tuple[float, float]] = deque(maxlen=_MOST_RECENT)

    def add(self, value: float) -> None:
        self._values.append((time.monotonic(), value))

    def collect(self) -> Iterator[Metric]:
        since = time.monotonic() - _RECENT_S
        found = sorted(value for at, value in self._values if at >= since)
        family = GaugeMetricFamily(f"{PREFIX}{self._name}", self._what, labels=["quantile"])
        for part in (0.5, 0.9) if found else ():
            family.add_metric([str(part)], found[int(part * len(found))])
        yield family


class _OfTheEngine(Collector):
    """Read when it is asked for."""

    def __init__(self, service: EngineProcess) -> None:
        self._service = service

    def collect(self) -> Iterator[Metric]:
        service, status = self._service, self._service.status
        for name, what, value in (
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
            yield GaugeMetricFamily(f"{PREFIX}{name}", what, value=value)
        phases = GaugeMetricFamily(f"{PREFIX}step_requests", "Requests of the last step by phase.", labels=["phase"])
        for phase, num in status.phases.items():
            phases.add_metric([phase], num)
        yield phases
        for name, what, total in (
            ("forward_passes", "Steps of the engine that ran a forward pass.", status.forward_passes),
            ("committed_tokens", "Tokens committed by the engine, of answers given up too.", status.committed_tokens),
            ("engine_busy_seconds", "Time inside steps.", status.busy_s),
            ("engine_restarts", "Times that the engine's process was started again.", service.num_restarts),
            *((name, "Counted by the engine.", num) for name, num in status.counts.items()),
        ):
            yield CounterMetricFamily(f"{PREFIX}{name}", what, value=total)
