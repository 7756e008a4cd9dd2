"""AMPD Figure 7 (App. A.2): seconds to plan 8 to 256 GPUs, timed here; and what routing and reordering take (§4)."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

from engines.ampd.planner.coefficients import coefficients, default_method
from engines.ampd.planner.planner import solve
from engines.ampd.planner.program import available_solver
from engines.ampd.planner.workload import PlanningWorkload
from engines.ampd.reordering import best_ordering
from engines.ampd.routing import AdaptiveRouter, RoutingConfig
from engines.ar.cluster.policy import WorkerSnapshot
from engines.ar.slo import Slo
from engines.ar.task import PrefillTask
from paper_figures.ampd.panels import DETAIL_MODEL
from paper_figures.ampd.said import finding
from paper_figures.common import style
from repro.reports.claims import Finding
from repro.reports.figures import Rendered, View
from repro.reports.paper import load_table
from repro.runs.cell import Cell
from repro.runs.store import StoredRun
from repro.systems.ar.part import ArPart
from repro.systems.ar.settings import PLANNING_RATE, hardware_of, performance_of
from repro.workloads.arrivals import ArrivalConfig
from repro.workloads.sessions import SessionWorkloadConfig, build_sessions

NAME = "fig7"
TITLE = "AMPD Figure 7: time of planning"
SOURCE = "AMPD, Figure 7, App. A.2"
PLATFORMS = ("h20x32",)
GPUS = (8, 16, 32, 64, 128, 256)
TRACE, TRACE_GPUS = "dureader", 16
"""Its load grows with the GPUs."""
CONTEXT = 1600


class Timed(NamedTuple):
    num_gpus: int
    coefficients_s: float
    solve_s: float
    method: str
    solver: str
    plan: str

    @property
    def seconds(self) -> float:
        return self.coefficients_s + self.solve_s


def cells(view: View) -> list[Cell]:
    """None: the planner is timed where the figure is drawn."""
    return []


@cache
def timed(card: str, constants: str, objectives: tuple[float, float]) -> tuple[Timed, ...]:
    return tuple(_timed(card, constants, Slo(ttft_s=objectives[0], itl_s=objectives[1]), num_gpus) for num_gpus in GPUS)


def _timed(card: str, constants: str, slo: Slo, num_gpus: int) -> Timed:
    """CPU seconds of this process, so that neighbours count less; profiling the hardware is not planning."""
    hardware = hardware_of(DETAIL_MODEL, card, constants)
    model = performance_of(DETAIL_MODEL, card, constants, num_gpus, CONTEXT)
    rate, num = PLANNING_RATE * num_gpus / TRACE_GPUS, max(99, 99 * num_gpus // TRACE_GPUS)
    config = SessionWorkloadConfig(
        trace=TRACE, num_sessions=num, seed=10**6, arrivals=ArrivalConfig(kind="poisson", rate=rate)
    )
    workload = PlanningWorkload(sessions=build_sessions(config).sessions, rate=rate, slo=slo)
    start = time.process_time()
    table = coefficients(model, workload, hardware.degrees(), num_gpus)
    between = time.process_time()
    (best,) = solve(table, num_gpus)
    end = time.process_time()
    method = default_method(num_gpus)
    return Timed(num_gpus, between - start, end - between, method, available_solver(), str(best.deployment))


def times(view: View) -> tuple[Timed, ...]:
    part = view.platform.part(ArPart)
    assert view.platform.gpu is not None
    found = part.objectives[DETAIL_MODEL, TRACE]
    return timed(view.platform.gpu, part.constants, (found.ttft_ms / 1e3, found.itl_ms / 1e3))


def printed() -> dict[int, float]:
    return {int(str(row["n_gpus"])): float(str(row["planning_time_s"])) for row in load_table("ampd/fig7.csv")}


def render(runs: Sequence[StoredRun], view: View, out: Path) -> Rendered:
    found, paper = times(view), printed()
    stem = f"{NAME}-{view.stem}"
    with style.drawing():
        figure, (axes,) = style.row_of_panels([f"{DETAIL_MODEL} {TRACE}, load grows with the GPUs"])
        axes.plot(GPUS, [each.seconds for each in found], marker="o", color="#0072B2", label="ours (measured)")
        axes.plot(
            GPUS,
            [paper[num] for num in GPUS],
            linestyle="none",
            marker="D",
            fillstyle="none",
            color="black",
            label="paper",
        )
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xticks(GPUS, list(map(str, GPUS)))
        axes.set_xlabel("GPUs")
        axes.set_ylabel("seconds")
        files = style.publish(
            figure,
            [axes],
            out,
            stem,
            title=TITLE,
            caption=[
                "Ours: CPU seconds of one process where this was drawn, coefficients and solver; direct simulation of every pool up to "
                "32 GPUs, interpolated up to 64, closed forms beyond.",
                "Paper: an unstated CPU.",
            ],
            width_inches=style.WIDE_INCHES,
        )
    columns = ("gpus", "coefficients_s", "solve_s", "method", "solver", "plan", "paper_s", "obtained")
    rows = [(*each, paper.get(each.num_gpus), "measured") for each in found]
    return Rendered(
        files=(*files, style.save_csv(out / f"{stem}.csv", columns, rows)),
        columns=("GPUs", "coefficients s", "solver s", "by", "plan", "paper s"),
        rows=tuple(
            (
                str(each.num_gpus),
                f"{each.coefficients_s:.2f}",
                f"{each.solve_s:.2f}",
                f"{each.method}, {each.solver}",
                each.plan,
                f"{paper[each.num_gpus]:g}",
            )
            for each in found
        ),
        notes=tuple(f"{what}: {1e6 * seconds:.0f} us, measured." for what, seconds in overheads().items()),
    )


def findings(runs: Sequence[StoredRun], view: View) -> list[Finding]:
    found = {each.num_gpus: each for each in times(view)}
    answers = [
        finding(
            f"ampd-plan-{num}",
            each.seconds,
            f"CPU seconds here, by {each.method} coefficients and {each.solver}: another simulator on another machine, so that only "
            f"being faster can be said (paper {printed()[num]:g} s)",
            because="",
            obtained="measured",
            comparable=False,
        )
        for num, each in found.items()
    ]
    largest = found[max(GPUS)]
    answers.append(
        finding(
            "ampd-plan-minute",
            largest.seconds,
            f"CPU seconds here for {max(GPUS)} GPUs, by {largest.method} coefficients: another simulator on another machine",
            because="",
            obtained="measured",
            comparable=False,
        )
    )
    ratio = largest.seconds / max(found[min(GPUS)].seconds, 1e-9)
    growth = max(GPUS) / min(GPUS)
    answers.append(
        finding(
            "ampd-plan-growth",
            ratio,
            f"time of {max(GPUS)} over {min(GPUS)} GPUs, which are {growth:g} times as many; the method changes on the way",
            because="closed forms do not grow with the load of the sample",
            holds=ratio <= 4 * growth,
            obtained="measured",
        )
    )
    slowest, seconds = max(overheads().items(), key=lambda pair: pair[1])
    answers.append(
        finding(
            "ampd-overhead",
            1e3 * seconds,
            f"ms of the slower of a routing decision over 8 prefill workers and an ordering of w = 3 ({slowest}), in Python",
            because="it takes over a millisecond",
            holds=seconds < 1e-3,
            obtained="measured",
        )
    )
    return answers


@cache
def overheads() -> dict[str, float]:
    """Seconds of one decision."""
    model = performance_of(DETAIL_MODEL, "h20", "physical", TRACE_GPUS, CONTEXT)
    router = AdaptiveRouter(model, RoutingConfig(slo=Slo(ttft_s=1.0, itl_s=0.05)))
    busy = [WorkerSnapshot(worker_id=index, degree=4, ttft_s=2.0, backlog_s=float(index)) for index in range(1, 9)]
    home = WorkerSnapshot(worker_id=0, degree=4, itl_s=1.0)
    tasks = [
        PrefillTask(index, index, index, 1, "incremental", 1000, 500, 0.0, estimate_s=0.2 * (index + 1))
        for index in range(3)
    ]
    return {
        "Routing to one of 8 workers, all without slack": _each(lambda: router.route(tasks[0], home, busy, 1.0)),
        "Ordering a window of 3, one of them late": _each(lambda: best_ordering(tasks, 0.7, 1.0, 3)),
    }


def _each(call: Callable[[], object], repeats: int = 2000) -> float:
    start = time.process_time()
    for _ in range(repeats):
        call()
    return (time.process_time() - start) / repeats
