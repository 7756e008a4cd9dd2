"""Times the cluster simulator and holds it against queueing theory: python benchmarks/cluster.py --help

    queues    a million arrivals through prefill workers: mean waits and tails against the exact ones
    speed     events a second of single runs, with and without macro-steps, and of their metrics
    grid      Figure 4's grid: 12 panels x 5 rates x 5 systems x 2 plans x seeds, with all metrics, on several processes
    scaling   GPUs from 8 to 1,024 and sessions from 10^2 to 10^5

Times are of the process, so that neighbours count less; ``loop`` is what this core takes for 10^7 additions in a loop.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from common import Rows, add_counts, parser_of, run, said
from waits import Draw, deterministic, markov, sampled

from baselines.ar.dynamo import DynamoConfig
from baselines.ar.vllm import ContinuumConfig, VllmConfig
from engines.ampd.system import AmpdConfig
from engines.cluster.cluster import Cluster
from engines.cluster.decode import Sink
from engines.cluster.hardware import Deployment
from engines.cluster.metrics import attainments, observe
from engines.cluster.record import ClusterRun
from engines.cluster.sessions import Arrivals, OpenLoop, Round, Session
from engines.cluster.simulation import DecodeSimulation
from engines.cluster.worker import PrefillWorker
from engines.cost.roofline import DecodeLine
from engines.policies.batching import ONE_BY_ONE
from engines.policies.routing import LeastKvMemory, RemoteOnly
from engines.policies.step import Chunk
from engines.policies.task import PrefillQueue, Slo
from paper_figures.ampd.panels import DETAIL_MODEL, DETAIL_RATE, RATES, TracePanel, panel_of, panels
from repro.runs.cell import Cell
from repro.systems.cluster.ampd import AmpdKnobs, Build, build_ampd, build_continuum, build_dynamo, build_vllm
from repro.systems.cluster.ampd_settings import Ground, Settings, resolve, sessions_of
from repro.workloads.draws import ArrivalConfig


@dataclass(frozen=True)
class MicroCost:
    """A microsecond a token."""

    def step_s(self, chunks: Sequence[Chunk], decoding: int, context: int, mode: object = None) -> float:
        return sum(chunk.tokens for chunk in chunks) * 1e-6

    def decode_line(self, decoding: int) -> DecodeLine:
        return DecodeLine(0.0, 0.0, 0.0)


SERVICES: dict[str, Draw] = {
    "D": lambda rng, num: np.ones(num),
    "M": lambda rng, num: rng.exponential(1.0, num),
    "G (log-normal, 0.6)": lambda rng, num: np.exp(0.6 * rng.standard_normal(num) - 0.18),
}
"""Service times of mean 1 s."""
EXACT = {"D": deterministic, "M": markov}
LOADS = {1: 0.5, 8: 0.7}
"""Load of each server, by the number of servers: light enough that the mean of a million waits has a standard error below 1 %."""


def queues(num: int, seed: int) -> Iterator[dict[str, Any]]:
    """M/G/k against the exact wait: by formula, and for a general service by a recursion of 6 million customers.
    ``standard_error`` is of the mean, from a hundred batches of customers."""
    for name, draw in SERVICES.items():
        for servers, load in LOADS.items():
            waits, seconds, events = _waits(draw, servers, load * servers, num, seed)
            if name in EXACT:
                wait = EXACT[name](servers, load)
                mean, p95, p99 = wait.mean, wait.quantile(0.95), wait.quantile(0.99)
            else:
                known = sampled(draw, servers, load)
                mean, (p95, p99) = known.mean(), np.quantile(known, (0.95, 0.99))
            batches = [batch.mean() for batch in np.array_split(waits, 100)]
            yield {
                "queue": f"M/{name}/{servers}",
                "load": load,
                "arrivals": num,
                "mean_wait_s": waits.mean(),
                "exact_mean_s": mean,
                "mean_off": waits.mean() / mean - 1,
                "standard_error": np.std(batches, ddof=1) / len(batches) ** 0.5 / mean,
                "p95_off": np.quantile(waits, 0.95) / p95 - 1,
                "p99_off": np.quantile(waits, 0.99) / p99 - 1,
                "seconds": seconds,
                "events_per_s": events / seconds,
            }


def _waits(draw: Draw, servers: int, rate: float, num: int, seed: int) -> tuple[np.ndarray, float, int]:
    rng = np.random.default_rng(seed)
    times = np.cumsum(rng.exponential(1 / rate, num)).tolist()
    tokens = np.maximum(1, np.rint(1e6 * draw(rng, num))).astype(np.int64).tolist()
    simulation = DecodeSimulation(binder=LeastKvMemory(), router=RemoteOnly("shared"))
    simulation.add(Sink(simulation, worker_id=0))
    shared = PrefillQueue()
    for index in range(servers):
        simulation.add(
            PrefillWorker(
                simulation,
                worker_id=1 + index,
                degree=1,
                cost=MicroCost(),
                queue=shared,
                batching=ONE_BY_ONE,
                overlaps=False,
            )
        )
    sessions = (Session(index, times[index], (Round(tokens[index], 1),)) for index in range(num))
    start = time.process_time()
    run = simulation.run(OpenLoop(sessions=sessions))
    seconds = time.process_time() - start
    return np.array(run.tasks["started_s"]) - np.array(run.tasks["ready_s"]), seconds, run.facts["num_events"]


APART: tuple[tuple[Build, Any], ...] = (
    (build_ampd, AmpdKnobs()),
    (build_dynamo, DynamoConfig()),
    (build_dynamo, DynamoConfig(conditional="isl_bounding")),
)
COLOCATED: tuple[tuple[Build, Any], ...] = ((build_vllm, VllmConfig()), (build_continuum, ContinuumConfig()))


def settings_of(panel: TracePanel) -> Settings:
    knobs = (("model", panel.model), ("constants", "physical"))
    cell = Cell(
        system="ampd", dataset=panel.trace, platform="h20x32", executor="roofline", rate=1.0, seed=0, knobs=knobs
    )
    return resolve(cell, "ampd", AmpdConfig)


def arrivals_of(ground: Ground, rate: float, seed: int, **sizes: int) -> Arrivals:
    arrivals = ArrivalConfig(kind="poisson", rate=rate)
    return OpenLoop(sessions=sessions_of(replace(ground.workload, arrivals=arrivals, seed=seed, **sizes)).sessions)


def clusters_of(panel: TracePanel) -> list[Cluster]:
    """Five systems on two plans each: Table 2's first two, and TP 8 and TP 4 for co-located ones."""
    settings = settings_of(panel)
    found = [build(replace(settings, own=own), plan) for plan in panel.plans[:2] for build, own in APART]
    plans = [Deployment.colocated(degree, panel.num_gpus // degree) for degree in (8, 4)]
    return found + [build(replace(settings, own=own), plan) for plan in plans for build, own in COLOCATED]


def speed(repeats: int) -> Iterator[dict[str, Any]]:
    for panel in panels():
        if panel.model == DETAIL_MODEL:
            clusters = {each.name: each for each in reversed(clusters_of(panel))}
            ground = settings_of(panel).ground
            arrivals = arrivals_of(ground, DETAIL_RATE, 1)
            for cluster in (clusters[name] for name in ("ampd", "dynamo", "vllm")):
                seconds, run = _best(repeats, partial(cluster.simulate, arrivals, seed=1))
                micro_s, micro = _best(repeats, partial(cluster.simulate, arrivals, seed=1, max_run_steps=1))
                metrics_s, _ = _best(repeats, partial(_attained, run, ground.slo))
                yield {
                    "panel": panel.title,
                    "system": cluster.name,
                    **_pace(run, seconds),
                    "micro_events": micro.facts["num_events"],
                    "micro_s": micro_s,
                    "metrics_s": metrics_s,
                }


def _pace(run: ClusterRun, seconds: float) -> dict[str, Any]:
    events = run.facts["num_events"]
    return {"events": events, "seconds": seconds, "events_per_s": events / seconds}


def _best(repeats: int, call: Callable[[], Any]) -> tuple[float, Any]:
    """The fewest processor seconds that a call took, and what it returns."""

    def timed() -> tuple[float, Any]:
        start = time.process_time()
        result = call()
        return time.process_time() - start, result

    return min((timed() for _ in range(repeats)), key=lambda pair: pair[0])


def grid(seeds: int, jobs: int) -> Iterator[dict[str, Any]]:
    start = time.perf_counter()
    with ProcessPoolExecutor(jobs) as pool:
        cells = list(pool.map(partial(_grid_panel, seeds=seeds), range(len(panels()))))
    runs, seconds, events = (sum(cell[index] for cell in cells) for index in range(3))
    yield {
        "runs": runs,
        "jobs": jobs,
        "wall_s": time.perf_counter() - start,
        "core_s": seconds,
        "core_s_per_run": seconds / runs,
        "events": events,
    }


def _grid_panel(index: int, seeds: int) -> tuple[int, float, int]:
    start = time.process_time()
    panel = panels()[index]
    ground, clusters = settings_of(panel).ground, clusters_of(panel)
    events = []
    for rate in RATES:
        for seed in range(seeds):
            arrivals = arrivals_of(ground, rate, seed)
            for cluster in clusters:
                run = cluster.simulate(arrivals, seed=seed)
                _attained(run, ground.slo)
                events.append(run.facts["num_events"])
    return len(events), time.process_time() - start, sum(events)


def scaling(most_sessions: int) -> Iterator[dict[str, Any]]:
    """Llama DuReader on workers of four GPUs, the rate growing with them; then more sessions on 16 GPUs."""
    settings = settings_of(panel_of(DETAIL_MODEL, "dureader"))
    ground = settings.ground
    sizes = [(gpus, max(100, 6 * gpus)) for gpus in (8, 16, 32, 64, 128, 256, 512, 1024)]
    sizes += [(16, num) for num in (100, 1000, 10_000, 100_000) if num <= most_sessions]
    for gpus, num in sizes:
        times = gpus // 8
        arrivals = arrivals_of(ground, 0.5 * times, 1, num_sessions=num)
        for build, own in APART[:2]:
            cluster = build(replace(settings, own=own), Deployment.disaggregated(4, times, 4, times))
            seconds, run = _best(1, partial(cluster.simulate, arrivals, seed=1))
            metrics_s, _ = _best(1, partial(_attained, run, ground.slo))
            yield {"gpus": gpus, "sessions": num, "system": cluster.name, **_pace(run, seconds), "metrics_s": metrics_s}


def _attained(run: ClusterRun, slo: Slo) -> object:
    return attainments(observe(run), slo)


def loop_s() -> float:
    """Seconds of this core for 10^7 additions in a Python loop."""

    def loop() -> None:
        total = 0
        for index in range(10**7):
            total += index

    return _best(1, loop)[0]


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("what", choices=("queues", "speed", "grid", "scaling"))
    parser.add_argument("--seed", type=int, default=1, help="of the queues")
    parser.add_argument("--out", type=Path, dest="json", help="as --json")
    add_counts(
        parser,
        arrivals=(10**6, "of each queue"),
        seeds=(10, "of the grid"),
        jobs=(2, "processes of the grid"),
        repeats=(5, "of speed; the best counts"),
        sessions=(100_000, "most of scaling"),
    )
    options = parser.parse_args()
    measured = {
        "queues": lambda: queues(options.arrivals, options.seed),
        "speed": lambda: speed(options.repeats),
        "grid": lambda: grid(options.seeds, options.jobs),
        "scaling": lambda: scaling(options.sessions),
    }
    rows = Rows(options.json, {"loop_s": loop_s()})
    for row in measured[options.what]():
        rows.add(row)
        print(said(row), flush=True)
    print(f"loop {rows.facts['loop_s']:.2f} s")


if __name__ == "__main__":
    run(main)
