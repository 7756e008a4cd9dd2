"""Times the cluster simulator and holds it against queueing theory: python benchmarks/cluster.py --help

    queues    a million arrivals through prefill workers: mean waits and tails against the exact ones
    speed     events a second of single runs, with and without macro-steps, and of their metrics
    grid      Figure 4's grid: 12 panels x 5 rates x 5 systems x 2 plans x seeds, with all metrics, on several processes
    scaling   GPUs from 8 to 1,024 and sessions from 10^2 to 10^5

Times are of the process, so that neighbours count less; ``loop`` is what this core takes for 10^7 additions in a loop.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from panels import RATES, SESSIONS, Panel, panels
from waits import Draw, deterministic, markov, sampled

from baselines.ar.dynamo import ConditionalConfig, dynamo
from baselines.ar.vllm import continuum, vllm
from engines.ampd.system import ampd
from engines.ar.cluster.batching import ONE_BY_ONE
from engines.ar.cluster.cluster import Cluster
from engines.ar.cluster.dispatch import RemoteOnly
from engines.ar.cluster.policy import LeastKvMemory
from engines.ar.cluster.prefill_worker import PrefillWorker
from engines.ar.cluster.queue import PrefillQueue
from engines.ar.cluster.simulation import Simulation
from engines.ar.cluster.sink import Sink
from engines.ar.constants import PHYSICAL
from engines.ar.cost import Chunk, DecodeLine
from engines.ar.deployment import Deployment
from engines.ar.metrics import observe
from engines.ar.session import OpenLoop, Round, Session
from engines.ar.slo import attainments


@dataclass(frozen=True)
class MicroCost:
    """A microsecond a token."""

    def prefill_s(self, history: int, tokens: int) -> float:
        return tokens * 1e-6

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
"""Of each server, by their number: light enough that the mean of a million waits has a standard error below 1 %."""


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
    simulation = Simulation(binder=LeastKvMemory(), router=RemoteOnly("shared"))
    simulation.add_home(Sink(simulation, worker_id=0))
    shared = PrefillQueue()
    for index in range(servers):
        simulation.add_prefill(
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


def systems(panel: Panel) -> list[Cluster]:
    """Five systems on two plans each: Table 2's first two, and TP 8 and TP 4 for co-located ones."""
    hardware = panel.hardware(PHYSICAL)
    model = panel.performance(hardware)
    found = []
    for plan in panel.plans[:2]:
        found.append(ampd(hardware, plan, panel.slo, model))
        found.append(dynamo(hardware, plan, model))
        found.append(dynamo(hardware, plan, model, conditional=ConditionalConfig()))
    for degree in (8, 4):
        plan = Deployment.colocated(degree, panel.num_gpus // degree)
        found.extend((vllm(hardware, plan), continuum(hardware, plan)))
    return found


def speed(repeats: int) -> Iterator[dict[str, Any]]:
    for panel in panels():
        if panel.model == "Llama-3.1-70B":
            clusters = {each.name: each for each in reversed(systems(panel))}
            yield from (_speed_of(clusters[name], panel, repeats) for name in ("ampd", "dynamo", "vllm"))


def _speed_of(cluster: Cluster, panel: Panel, repeats: int) -> dict[str, Any]:
    arrivals = panel.workload(2.0, 1).arrivals
    seconds, run = _best(repeats, lambda: cluster.simulate(arrivals, seed=1))
    micro_s, micro = _best(repeats, lambda: cluster.simulate(arrivals, seed=1, max_run_steps=1))
    metrics_s, _ = _best(repeats, lambda: attainments(observe(run), panel.slo))
    return {
        "panel": str(panel),
        "system": cluster.name,
        "events": run.facts["num_events"],
        "ms": 1e3 * seconds,
        "events_per_s": run.facts["num_events"] / seconds,
        "micro_events": micro.facts["num_events"],
        "micro_ms": 1e3 * micro_s,
        "metrics_ms": 1e3 * metrics_s,
    }


def _best(repeats: int, call: Callable[[], Any]) -> tuple[float, Any]:
    return min((_timed(call) for _ in range(repeats)), key=lambda timed: timed[0])


def _timed(call: Callable[[], Any]) -> tuple[float, Any]:
    start = time.process_time()
    result = call()
    return time.process_time() - start, result


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
    clusters = systems(panel)
    runs = events = 0
    for rate in RATES:
        for seed in range(seeds):
            arrivals = panel.workload(rate, seed).arrivals
            for cluster in clusters:
                run = cluster.simulate(arrivals, seed=seed)
                attainments(observe(run), panel.slo)
                runs += 1
                events += run.facts["num_events"]
    return runs, time.process_time() - start, events


def scaling(most_sessions: int) -> Iterator[dict[str, Any]]:
    """Llama DuReader on workers of four GPUs, the rate growing with them; then more sessions on 16 GPUs."""
    panel = next(each for each in panels() if str(each) == "Llama-3.1-70B DuReader")
    hardware = panel.hardware(PHYSICAL)
    model = panel.performance(hardware)
    sizes = [(gpus, max(100, 6 * gpus)) for gpus in (8, 16, 32, 64, 128, 256, 512, 1024)]
    sizes += [(16, num) for num in (100, 1000, 10_000, 100_000) if num <= most_sessions]
    for gpus, num in sizes:
        times = gpus // 8
        plan = Deployment.disaggregated(4, times, 4, times)
        arrivals = panel.workload(0.5 * times, 1, num_sessions=num).arrivals
        for cluster in (ampd(hardware, plan, panel.slo, model), dynamo(hardware, plan, model)):
            seconds, run = _timed(partial(cluster.simulate, arrivals, seed=1))
            metrics_s, _ = _timed(partial(lambda run: attainments(observe(run), panel.slo), run))
            yield {
                "gpus": gpus,
                "sessions": num,
                "system": cluster.name,
                "events": run.facts["num_events"],
                "seconds": seconds,
                "events_per_s": run.facts["num_events"] / seconds,
                "metrics_s": metrics_s,
            }


def loop_s() -> float:
    """Seconds of this core for 10^7 additions in a Python loop."""
    start = time.process_time()
    total = 0
    for index in range(10**7):
        total += index
    return time.process_time() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("queues", "speed", "grid", "scaling"))
    parser.add_argument("--arrivals", type=int, default=10**6, help="of each queue")
    parser.add_argument("--seeds", type=int, default=10, help="of the grid")
    parser.add_argument("--seed", type=int, default=1, help="of the queues")
    parser.add_argument("--jobs", type=int, default=2, help="processes of the grid")
    parser.add_argument("--repeats", type=int, default=5, help="of speed; the best counts")
    parser.add_argument("--sessions", type=int, default=100_000, help="most of scaling")
    parser.add_argument("--out", type=Path, help="JSON with all rows")
    options = parser.parse_args()
    rows_of = {
        "queues": lambda: queues(options.arrivals, options.seed),
        "speed": lambda: speed(options.repeats),
        "grid": lambda: grid(options.seeds, options.jobs),
        "scaling": lambda: scaling(options.sessions),
    }
    rows = []
    for row in rows_of[options.what]():
        rows.append(row)
        print(
            "  ".join(
                f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}" for key, value in row.items()
            )
        )
    loop = loop_s()
    print(f"loop {loop:.2f} s; {SESSIONS} sessions a run of the grid")
    if options.out is not None:
        options.out.write_text(json.dumps({"loop_s": loop, "rows": rows}, indent=2, default=float) + "\n")


if __name__ == "__main__":
    main()
