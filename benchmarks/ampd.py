"""What AMPD's paper prints against what the simulator says: python benchmarks/ampd.py --help

    planning  seconds to plan 8 to 256 GPUs, by source of coefficients and solver (Figure 7)
    table2    the planner's plans against Table 2, beside the rule of the largest even split
    realised  the attainment that every plan reaches when simulated, and where Table 2's and the planner's stand
    readings  every constant set and every reading of SLO attainment against Figure 4, beside the null
    cells     one constant set in one reading, cell by cell

Everything is simulated. The score of a reading is the mean over cells of |ln(simulated gain) - ln(printed gain)|, gains being
ratios of attainment; the null says that no system differs from another.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from panels import RATES, SESSIONS, Panel, largest_even_split, panels

from baselines.ar.dynamo import dynamo
from baselines.ar.search import disaggregated_shortlist, vllm_candidates
from engines.ampd.planner.coefficients import Method, coefficients
from engines.ampd.planner.planner import PlannerConfig, solve
from engines.ampd.planner.program import SolverName
from engines.ampd.planner.workload import PlanningWorkload
from engines.ampd.system import AmpdConfig, ampd
from engines.ar.cluster.cluster import Cluster
from engines.ar.constants import CONSTANTS, CostConstants, cost_constants
from engines.ar.deployment import Deployment
from engines.ar.metrics import observe
from engines.ar.slo import READINGS, Reading, attainments

PLANNING_SEED = 1000
"""Not a seed of the runs that are reported."""
FLOOR = 0.5 / SESSIONS
"""Half a session: what an attainment of 0 counts as in a ratio."""
DEFAULT_READING = Reading(scope="round", ttft="every", itl="p95")


# ---- planning -----------------------------------------------------------------------------------------


def planning(constants: CostConstants, largest_direct: int) -> Iterator[dict[str, Any]]:
    """Llama DuReader, 0.6 sessions/s and 99 sessions for every 16 GPUs."""
    panel = next(each for each in panels() if str(each) == "Llama-3.1-70B DuReader")
    hardware = panel.hardware(constants)
    for num_gpus in (8, 16, 32, 64, 128, 256):
        rate, num = 0.6 * num_gpus / 16, max(SESSIONS, SESSIONS * num_gpus // 16)
        start = time.process_time()
        model = panel.performance(hardware)
        profile_s = time.process_time() - start
        sessions = panel.workload(rate, PLANNING_SEED, num_sessions=num).sessions
        workload = PlanningWorkload(sessions=sessions, rate=rate, slo=panel.slo)
        methods: tuple[Method, ...] = ("direct", "cached", "closed") if num_gpus <= largest_direct else ("closed",)
        for method in methods:
            start = time.process_time()
            table = coefficients(model, workload, hardware.degrees(), num_gpus, method)
            row: dict[str, Any] = {
                "gpus": num_gpus,
                "method": method,
                "coefficients": len(table.prefill) + len(table.decode),
                "profile_s": profile_s,
                "coefficients_s": time.process_time() - start,
            }
            solvers: tuple[SolverName, ...] = ("enumeration", "highs", "scip")
            for solver in solvers:
                start = time.process_time()
                (found,) = solve(table, num_gpus, config=PlannerConfig(solver=solver))
                row[f"{solver}_s"] = time.process_time() - start
                row["plan" if solver == "enumeration" else f"{solver}_plan"] = str(found.deployment)
            yield row


# ---- Table 2 ------------------------------------------------------------------------------------------


class Planned(NamedTuple):
    first: bool
    """Whether #1 is Table 2's."""
    overlap: int
    """Of the top three, how many are among Table 2's."""
    plan: Deployment


def planned(
    panel: Panel, constants: CostConstants, rate: float, configs: Sequence[PlannerConfig], method: Method
) -> list[Planned]:
    hardware = panel.hardware(constants)
    sessions = panel.workload(rate, PLANNING_SEED).sessions
    workload = PlanningWorkload(sessions=sessions, rate=rate, slo=panel.slo)
    table = coefficients(panel.performance(hardware), workload, hardware.degrees(), panel.num_gpus, method)
    found = []
    for config in configs:
        plans = [each.deployment for each in solve(table, panel.num_gpus, top=3, config=config)]
        found.append(Planned(plans[0] == panel.plans[0], len(set(plans) & set(panel.plans)), plans[0]))
    return found


def table2(constants: CostConstants, rates: Sequence[float], method: Method) -> Iterator[dict[str, Any]]:
    """Objectives and planning rates; the rule of the largest even split; then what is not told apart."""
    rule = [largest_even_split(panel) == panel.plans[0] for panel in panels()]
    yield {"planner": "rule: largest degree in an even split", "first": sum(rule), "of": len(rule)}
    configs = [
        PlannerConfig(latency=latency, objective=objective, solver="enumeration")
        for latency, objective in product(("of_slo", "seconds"), ("max", "sum"))  # type: ignore[arg-type]
    ]
    for rate in rates:
        by_panel = [planned(panel, constants, rate, configs, method) for panel in panels()]
        for index, config in enumerate(configs):
            mine = [each[index] for each in by_panel]
            yield {
                "planner": f"{config.objective} of {config.latency}",
                "rate": rate,
                "first": sum(each.first for each in mine),
                "top3": sum(each.overlap for each in mine),
                "misses": "; ".join(
                    f"{panel}: {each.plan}" for panel, each in zip(panels(), mine, strict=True) if not each.first
                ),
            }


def realised(constants: CostConstants, rate: float, seeds: int, jobs: int) -> Iterator[dict[str, Any]]:
    """AMPD on every deployment that uses all GPUs: where Table 2's and the planner's #1 stand, and how many are as good."""
    with ProcessPoolExecutor(jobs) as pool:
        yield from pool.map(partial(_realised, constants=constants, rate=rate, seeds=seeds), range(len(panels())))


def _realised(index: int, constants: CostConstants, rate: float, seeds: int) -> dict[str, Any]:
    panel = panels()[index]
    hardware = panel.hardware(constants)
    model = panel.performance(hardware)
    workload = PlanningWorkload(sessions=panel.workload(rate, PLANNING_SEED).sessions, rate=rate, slo=panel.slo)
    deployments = disaggregated_shortlist(hardware, model, workload, panel.num_gpus, size=10**6)
    by_plan = {
        plan: [
            _attained(ampd(hardware, plan, panel.slo, model), panel, rate, seed, (DEFAULT_READING,))[0]
            for seed in range(seeds)
        ]
        for plan in deployments
    }
    ours = planned(panel, constants, 0.6, [PlannerConfig(solver="enumeration")], "direct")[0].plan
    best = max(by_plan, key=lambda plan: np.mean(by_plan[plan]))

    def is_as_good(plan: Deployment) -> bool:
        """Not two standard errors of the paired difference below the best."""
        behind = np.array(by_plan[best]) - np.array(by_plan[plan])
        return bool(behind.mean() <= 2 * behind.std(ddof=1) / math.sqrt(seeds) + 1e-12)

    return {
        "panel": str(panel),
        "rate": rate,
        "plans": len(by_plan),
        "as_good_as_best": sum(map(is_as_good, by_plan)),
        "best": f"{best} {100 * np.mean(by_plan[best]):.0f} %",
        "table2": f"{panel.plans[0]} {100 * np.mean(by_plan[panel.plans[0]]):.0f} %",
        "planner": f"{ours} {100 * np.mean(by_plan[ours]):.0f} %",
        "table2_ok": is_as_good(panel.plans[0]),
        "planner_ok": is_as_good(ours),
    }


# ---- Figure 4 -------------------------------------------------------------------------------------------


def _attained(cluster: Cluster, panel: Panel, rate: float, seed: int, readings: Sequence[Reading]) -> list[float]:
    observed = observe(cluster.simulate(panel.workload(rate, seed).arrivals, seed=seed))
    return list(attainments(observed, panel.slo, readings).values())


def contenders(panel: Panel, constants: CostConstants, config: AmpdConfig) -> dict[str, list[Cluster]]:
    """AMPD on Table 2's #1; Dynamo on that plan, and on it or the six likeliest; co-located ones at every degree."""
    hardware = panel.hardware(constants)
    model = panel.performance(hardware)
    workload = PlanningWorkload(sessions=panel.workload(1.6, PLANNING_SEED).sessions, rate=1.6, slo=panel.slo)
    same = dynamo(hardware, panel.plans[0], model)
    likely = disaggregated_shortlist(hardware, model, workload, panel.num_gpus, size=6)
    longest = max(session.context_tokens for session in workload.sessions) * 2
    return {
        "ampd": [ampd(hardware, panel.plans[0], panel.slo, model, config)],
        "dynamo": [same],
        "dynamo-tuned": [same, *(dynamo(hardware, plan, model) for plan in likely if plan != panel.plans[0])],
        "vllm": list(vllm_candidates(hardware, panel.num_gpus, longest_context=longest)),
        "continuum": list(
            vllm_candidates(
                hardware, panel.num_gpus, longest_context=longest, schedulings=("prefill-first",), is_continuum=True
            )
        ),
    }


def measure(index: int, constants: CostConstants, seeds: int, config: AmpdConfig) -> np.ndarray:
    """Attainment [system, rate, reading] of a panel, each system on its best deployment of a cell.

    The deployment is chosen on half of the seeds and reported on the other half.
    """
    panel = panels()[index]
    table = []
    for clusters in contenders(panel, constants, config).values():
        rows = []
        for rate in RATES:
            shares = np.array(
                [[_attained(each, panel, rate, seed, READINGS) for seed in range(2 * seeds)] for each in clusters]
            )
            best = shares[:, :seeds].mean(axis=1).argmax(axis=0)
            rows.append(shares[:, seeds:].mean(axis=1)[best, np.arange(len(READINGS))])
        table.append(rows)
    return np.array(table)


SYSTEMS = ("ampd", "dynamo", "dynamo-tuned", "vllm", "continuum")


def printed() -> dict[str, np.ndarray]:
    """Printed gains as ratios [panel, rate]."""
    return {
        name: np.array([[getattr(panel.gains[rate], name) for rate in RATES] for panel in panels()])
        for name in ("dynamo", "vllm", "continuum")
    }


def score(shares: np.ndarray) -> dict[str, float]:
    """Of attainments [panel, system, rate] in one reading."""
    floored = dict(zip(SYSTEMS, np.maximum(shares, FLOOR).transpose(1, 0, 2), strict=True))
    paper = printed()
    gains = {name: np.log(floored["ampd"] / floored[name]) for name in SYSTEMS[1:]}
    off = {
        name: float(np.abs(gains[name] - np.log(paper[name.removesuffix("-tuned")])).mean()) for name in SYSTEMS[1:4]
    }
    wins = floored["dynamo"] - floored["vllm"]
    said = paper["vllm"] - paper["dynamo"]
    return {
        "dynamo_off": off["dynamo"],
        "dynamo_tuned_off": off["dynamo-tuned"],
        "vllm_off": off["vllm"],
        "score": off["dynamo"] + off["vllm"],
        "score_tuned": off["dynamo-tuned"] + off["vllm"],
        "winner_right": float(((wins * said > 0) | (said == 0)).sum()),
        "ampd_not_worse": float((floored["ampd"] >= np.maximum(floored["dynamo"], floored["vllm"]) - 1e-9).sum()),
        "gain_dynamo_median": float(np.median(np.exp(gains["dynamo"]) - 1)),
        "gain_vllm_median": float(np.median(np.exp(gains["vllm"]) - 1)),
        "llama_vllm_off": float(np.abs(gains["vllm"] - np.log(paper["vllm"]))[_of_model("Llama-3.1-70B")].mean()),
    }


def null_score() -> dict[str, float]:
    """If every system attained the same."""
    return score(np.ones((len(panels()), len(SYSTEMS), len(RATES))))


def _of_model(model: str) -> list[int]:
    return [index for index, panel in enumerate(panels()) if panel.model == model]


def readings(names: Sequence[str], seeds: int, jobs: int, config: AmpdConfig) -> Iterator[dict[str, Any]]:
    yield {"constants": "null", "reading": "-", **null_score()}
    with ProcessPoolExecutor(jobs) as pool:
        for name in names:
            constants = cost_constants(name)
            call = partial(measure, constants=constants, seeds=seeds, config=config)
            shares = np.array(list(pool.map(call, range(len(panels())))))
            for index, reading in enumerate(READINGS):
                yield {"constants": name, "reading": str(reading), **score(shares[:, :, :, index])}


def cells(
    constants: CostConstants, reading: Reading, seeds: int, jobs: int, config: AmpdConfig
) -> Iterator[dict[str, Any]]:
    with ProcessPoolExecutor(jobs) as pool:
        call = partial(measure, constants=constants, seeds=seeds, config=config)
        shares = list(pool.map(call, range(len(panels()))))
    place = READINGS.index(reading)
    for panel, table in zip(panels(), shares, strict=True):
        for column, rate in enumerate(RATES):
            found = dict(zip(SYSTEMS, (100 * table[:, column, place]).tolist(), strict=True))
            gain = panel.gains[rate]
            yield {
                "panel": str(panel),
                "rate": rate,
                **found,
                "paper_over_dynamo": gain.dynamo,
                "ours_over_dynamo": max(found["ampd"] / 100, FLOOR) / max(found["dynamo"] / 100, FLOOR),
                "paper_over_vllm": gain.vllm,
                "ours_over_vllm": max(found["ampd"] / 100, FLOOR) / max(found["vllm"] / 100, FLOOR),
            }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("planning", "table2", "realised", "readings", "cells"))
    parser.add_argument("--constants", default="trial-r2", help="one set, or several with commas, or all")
    parser.add_argument("--rate", type=float, default=1.6, help="of realised")
    parser.add_argument("--seeds", type=int, default=3, help="for choosing deployments, and as many for reporting")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--method", choices=("direct", "cached", "closed"), default="direct", help="of table2")
    parser.add_argument("--largest-direct", type=int, default=64, help="GPUs up to which planning simulates")
    parser.add_argument("--route-order", choices=("random", "load"), default="random")
    parser.add_argument("--window", choices=("done", "age", "backlog"), default="done")
    parser.add_argument("--out", type=Path, help="JSON with all rows")
    options = parser.parse_args()
    names = [each.name for each in CONSTANTS] if options.constants == "all" else options.constants.split(",")
    constants = cost_constants(names[0])
    config = AmpdConfig(route_order=options.route_order, window=options.window)
    rows_of: dict[str, Callable[[], Iterator[dict[str, Any]]]] = {
        "planning": lambda: planning(constants, options.largest_direct),
        "table2": lambda: table2(constants, (0.3, 0.6, 0.9, 1.2), options.method),
        "realised": lambda: realised(constants, options.rate, options.seeds, options.jobs),
        "readings": lambda: readings(names, options.seeds, options.jobs, config),
        "cells": lambda: cells(constants, DEFAULT_READING, options.seeds, options.jobs, config),
    }
    rows = []
    for row in rows_of[options.what]():
        rows.append(row)
        shown = (f"{key} {value:.3g}" if isinstance(value, float) else f"{key} {value}" for key, value in row.items())
        print("  ".join(shown), flush=True)
    if options.out is not None:
        options.out.write_text(json.dumps({"options": vars(options), "rows": rows}, indent=2, default=str) + "\n")


if __name__ == "__main__":
    main()
