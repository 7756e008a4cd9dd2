"""LAPS's single-instance experiments on a measured worker: closed loops of clients, whose every step is run and timed.

Queues, policies and records are those of the simulated cluster, on a clock that the measured steps put forward. Times
that the paper's settings state for a TTFT objective of 0.4 s are scaled to the objective of the worker.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from baselines.ar.sglang import SglangConfig, graphs_only, sglang
from engines.ar.session import ClosedLoop, Round, Session
from engines.errors import require
from engines.laps.cluster import PrefillCluster
from engines.laps.record import PrefillRun
from engines.laps.reserve import ReserveConfig
from engines.laps.system import LapsConfig, PrefillSystem, laps, reserve
from engines.laps.temporal import TemporalConfig
from engines.laps.waiting import WaitConfig
from repro.prefill.instance import MeasuredInstance

PAPER_SLO_S = 0.4
PAPER_KNEE = 206
"""Tokens: the roofline's knee on the paper's card, which its chunk sizes go with."""
SHARE_SHORT = (0.63, 0.81)
"""Of first and of later turns (LAPS §2.1)."""
MEAN_TURNS = 2.0
ANSWER_TOKENS = 8
WARM_UP = 0.1
"""Share of a run that does not count."""


@dataclass(frozen=True, kw_only=True)
class Loop:
    """Clients of one kind, each a request at a time, ``think_s`` after the last one's first token."""

    num_clients: int
    kind: str
    """'short', 'long' or 'mixed' (conversations)."""
    think_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class LoopCell:
    figure: str
    system: str
    loops: tuple[Loop, ...]
    seed: int
    window_s: float | None = None
    """W_max of LAPS; None is the paper's, scaled."""


@dataclass(frozen=True, kw_only=True)
class LoopResult:
    """Measured. Latencies are TTFT in seconds, of requests that arrived after the warm-up; null without any."""

    figure: str
    system: str
    short_clients: int
    long_clients: int
    mixed_clients: int
    think_s: float
    window_s: float | None
    seed: int
    finished: int
    rps: float
    mean_s: float | None
    p90_s: float | None
    p90_short_s: float | None
    p90_long_s: float | None
    longest_s: float | None
    violated: float | None
    """Share of requests whose deadline has passed or that were finished."""
    padding: float
    """Padded over real tokens."""
    in_flight: float
    """Requests in the worker on average, by Little's law; the clients that do not think."""


def systems(instance: MeasuredInstance, window_s: float | None = None) -> Mapping[str, Callable[[], PrefillSystem]]:
    """SGLang's batches, LAPS's two parts, LAPS as printed by its graphs and as mended, and Reserve."""
    model, slo_s = instance.step_model, instance.slo_s
    scale, knee = slo_s / PAPER_SLO_S, instance.boundary / PAPER_KNEE
    wait = WaitConfig()
    wait = replace(
        wait,
        max_window_s=wait.max_window_s * scale if window_s is None else window_s,
        slack_s=wait.slack_s * scale,
        margin_s=wait.margin_s * scale,
        max_wait_s=wait.max_wait_s * scale,
    )
    temporal = TemporalConfig(
        chunk_tokens=max(round(2048 * knee), 1), short_tokens=max(round(8192 * knee), 1), max_long_wait_s=1.0 * scale
    )
    config = LapsConfig(boundary=instance.boundary, slo_s=slo_s, wait=wait, temporal=temporal)
    budget = max(round(8192 * knee), 1)
    step = ReserveConfig(slo_s=slo_s)
    step = replace(step, min_step_s=step.min_step_s * scale, max_step_s=step.max_step_s * scale)
    return {
        "sglang": lambda: sglang(SglangConfig(chunked_prefill_size=budget)),
        "graphs-only": lambda: graphs_only(model, chunked_prefill_size=budget),
        "disaggregation-only": lambda: laps(model, replace(config, graphs="none")),
        "laps-nearest": lambda: laps(model, replace(config, graphs="nearest")),
        "laps": lambda: laps(model, config),
        "reserve": lambda: reserve(model, step, graphs="none"),
    }


def run_cell(instance: MeasuredInstance, cell: LoopCell, duration_s: float) -> LoopResult:
    """``duration_s`` seconds of measured steps."""
    require(duration_s > 0, f"duration_s={duration_s} must be above 0 s")
    known = systems(instance, cell.window_s)
    require(cell.system in known, f"system={cell.system!r} is unknown: use one of {', '.join(known)}")
    random = np.random.default_rng(cell.seed)
    arrivals = [
        ClosedLoop(
            sessions=conversations(instance, loop, random, number=2000),
            num_clients=loop.num_clients,
            think_s=loop.think_s,
        )
        for loop in cell.loops
        if loop.num_clients
    ]
    run = PrefillCluster(
        system=known[cell.system](), cost=instance.cost, slo_s=instance.slo_s, boundary=instance.boundary
    ).simulate(arrivals, until_s=duration_s)
    return _result(cell, run, duration_s)


def conversations(
    instance: MeasuredInstance, loop: Loop, random: np.random.Generator, *, number: int
) -> tuple[Session, ...]:
    """Sessions of one kind; a mixed one has a geometric number of turns, its context within the worker's."""
    found = []
    most = instance.setting.max_len
    for session_id in range(number):
        turns = int(random.geometric(1 / MEAN_TURNS)) if loop.kind == "mixed" else 1
        rounds: list[Round] = []
        context = 0
        for turn in range(turns):
            is_short = loop.kind == "short" or (
                loop.kind == "mixed" and random.random() < SHARE_SHORT[min(turn, len(SHARE_SHORT) - 1)]
            )
            low, high = instance.setting.shorts if is_short else instance.setting.longs
            tokens = round(float(np.exp(random.uniform(np.log(low), np.log(high)))))
            if context + tokens + ANSWER_TOKENS > most:
                break
            rounds.append(Round(tokens, ANSWER_TOKENS, loop.think_s))
            context += tokens + ANSWER_TOKENS
        found.append(Session(session_id, 0.0, tuple(rounds)))
    return tuple(found)


def _result(cell: LoopCell, run: PrefillRun, duration_s: float) -> LoopResult:
    columns = {
        name: np.array([np.nan if value is None else value for value in run.requests[name]], dtype=np.float64)
        for name in ("arrival_s", "finished_s", "violated")
    }
    begin = WARM_UP * duration_s
    arrival, finish = columns["arrival_s"], columns["finished_s"]
    counted = (arrival >= begin) & np.isfinite(finish)
    latency = finish - arrival
    is_short = np.array([kind == "short" for kind in run.requests["length_class"]])
    decided = (arrival >= begin) & np.isfinite(columns["violated"])
    done = np.isfinite(finish) & (finish >= begin)
    # Time requests spent in the worker within the window, per second of it.
    inside = np.clip(np.nan_to_num(finish, nan=duration_s), begin, duration_s) - np.clip(arrival, begin, duration_s)
    tokens, padded = sum(run.steps["tokens"]), sum(run.steps["padded_tokens"])
    clients = {kind: sum(loop.num_clients for loop in cell.loops if loop.kind == kind) for kind in _KINDS}
    return LoopResult(
        figure=cell.figure,
        system=cell.system,
        short_clients=clients["short"],
        long_clients=clients["long"],
        mixed_clients=clients["mixed"],
        think_s=max((loop.think_s for loop in cell.loops), default=0.0),
        window_s=cell.window_s,
        seed=cell.seed,
        finished=int(done.sum()),
        rps=float(done.sum() / (duration_s - begin)),
        mean_s=_of(np.mean, latency[counted]),
        p90_s=_of(_p90, latency[counted]),
        p90_short_s=_of(_p90, latency[counted & is_short]),
        p90_long_s=_of(_p90, latency[counted & ~is_short]),
        longest_s=_of(np.max, latency[counted]),
        violated=_of(np.mean, columns["violated"][decided]),
        padding=padded / tokens if tokens else 1.0,
        in_flight=float(inside.sum() / (duration_s - begin)),
    )


_KINDS = ("short", "long", "mixed")


def _p90(values: np.ndarray) -> float:
    return float(np.quantile(values, 0.9))


def _of(statistic: Callable[[np.ndarray], float], values: np.ndarray) -> float | None:
    return float(statistic(values)) if len(values) else None


@dataclass(frozen=True, kw_only=True)
class LoopGrid:
    """What the figures vary; the defaults are for the tiny model."""

    seeds: Sequence[int] = (0, 1, 2)
    long_clients: Sequence[int] = (1, 4)
    short_clients: Sequence[int] = (0, 4, 16)
    interference: Sequence[str] = ("sglang", "laps", "reserve")
    """Systems of Figures 1 and 3."""
    windows: Sequence[float] = (0.0, 0.5, 1.0, 2.0, 4.0)
    """W_max of Figure 5, in steps of one token."""
    thinks: Sequence[float] = (0.0, 10.0)
    """Likewise."""
    window_clients: int = 16
    concurrency: Sequence[int] = (1, 4, 16)
    compared: Sequence[str] = ("sglang", "graphs-only", "disaggregation-only", "laps", "reserve")
    """Systems of Figure 6."""

    def cells(self, figures: Sequence[str], floor_s: float) -> Iterator[LoopCell]:
        for seed in self.seeds:
            if "fig1" in figures or "fig3" in figures:
                yield from self._interference(seed)
            if "fig5" in figures:
                yield from self._windows(seed, floor_s)
            if "fig6" in figures:
                yield from self._throughput(seed)

    def _interference(self, seed: int) -> Iterator[LoopCell]:
        for system in self.interference:
            for longs in (0, *self.long_clients):
                for shorts in self.short_clients:
                    if longs or shorts:
                        loops = (Loop(num_clients=longs, kind="long"), Loop(num_clients=shorts, kind="short"))
                        yield LoopCell(figure="fig1-3", system=system, loops=loops, seed=seed)

    def _windows(self, seed: int, floor_s: float) -> Iterator[LoopCell]:
        for think in self.thinks:
            for window in self.windows:
                loop = Loop(num_clients=self.window_clients, kind="short", think_s=think * floor_s)
                yield LoopCell(figure="fig5", system="laps", loops=(loop,), seed=seed, window_s=window * floor_s)

    def _throughput(self, seed: int) -> Iterator[LoopCell]:
        for clients in self.concurrency:
            for system in self.compared:
                loop = Loop(num_clients=clients, kind="mixed")
                yield LoopCell(figure="fig6", system=system, loops=(loop,), seed=seed)


@dataclass(frozen=True, kw_only=True)
class WorkerFacts:
    """Facts of the worker the cells ran on."""

    floor_s: float
    knee_tokens: float
    boundary: int
    slo_s: float
    token_s: float
    model_error: float
    captured: int = field(default=0)

    @staticmethod
    def of(instance: MeasuredInstance) -> WorkerFacts:
        return WorkerFacts(
            floor_s=instance.floor_s,
            knee_tokens=instance.step_model.knee_tokens,
            boundary=instance.boundary,
            slo_s=instance.slo_s,
            token_s=instance.step_model.token_s,
            model_error=instance.step_model.mean_error,
            captured=len(instance.captured),
        )
