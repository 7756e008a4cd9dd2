"""AMPD Figure 7: time of planning."""

import math
from collections.abc import Mapping
from dataclasses import replace

from paper_figures.ampd.contenders import DETAIL_MODEL
from paper_figures.ampd.layout import ampd_figure
from paper_figures.common.caption import device_text
from paper_figures.common.figure import Columns, Page, Picture, Table, cell_by_cell
from paper_figures.common.panel import Axis, Layer, Line, Mark, Panel
from paper_figures.common.runs import Measure, Runs
from paper_figures.common.style import Look, system_look
from paper_figures.common.words import number
from repro.families.cluster.ampd import PLANNER_SYSTEM
from repro.families.cluster.ampd_settings import PLANNING_RATE
from repro.reports.claims import Finding, load_table
from repro.reports.figures import View
from repro.runs.cell import Cell
from repro.runs.statistics import Interval, from_logarithms, mean_interval
from repro.runs.store import StoredRun

NUM_RUNS = 3
"""Number of samples of sessions, timed one after the other."""
GPUS = (8, 16, 32, 64, 128, 256)
TRACE, TRACE_GPUS, TRACE_SESSIONS = "dureader", 16, 99
"""A trace whose load grows with the GPUs."""
DECISIONS = {
    "routing_s": "routing to one of 8 workers, all without slack",
    "ordering_s": "ordering a window of 3, one of them late",
}
METHODS = {"direct": "direct simulation", "cached": "interpolated", "closed": "closed forms"}
MARKERS = ("o", "s", "^", "v")
COLUMNS: Columns[StoredRun] = {
    "seed": lambda run: run.cell.seed,
    "coefficients_s": Measure(path="coefficients_s"),
    "solve_s": Measure(path="solve_s"),
    "method": lambda run: run.facts["method"],
    "solver": lambda run: run.facts["solver"],
    "plan": lambda run: run.summary["plans"][0]["deployment"],
}


def cell(view: View, num_gpus: int) -> Cell:
    sessions = max(TRACE_SESSIONS, TRACE_SESSIONS * num_gpus // TRACE_GPUS)
    knobs = (("model", DETAIL_MODEL), ("num_gpus", num_gpus), ("num_prompts", sessions), ("timed", True))
    return view.cell(None, PLANNER_SYSTEM, TRACE, rate=PLANNING_RATE * num_gpus / TRACE_GPUS, knobs=knobs)


def cells(view: View) -> list[Cell]:
    return cell_by_cell((cell(view, num_gpus) for num_gpus in GPUS), view)


def seconds_of(run: StoredRun) -> float:
    return float(run.summary["coefficients_s"] + run.summary["solve_s"])


def seconds(runs: Runs, num_gpus: int) -> Interval:
    return runs.at(cell(runs.view, num_gpus), seconds_of)


def printed() -> Mapping[int, float]:
    return {int(str(row["n_gpus"])): float(str(row["planning_time_s"])) for row in load_table("ampd/fig7.csv")}


def machines(runs: Runs) -> str:
    return " and ".join(sorted({device_text(run) for run in runs.all}))


def page(runs: Runs) -> Page:
    paper, mark = printed(), Look(color="black", marker="D")
    marks = [Mark(label="paper", place=num, value=paper[num], look=mark) for num in GPUS]
    repeats = f"{len(runs.view.seeds)} samples of sessions: geometric mean, and bars for its 95 % interval (Student's t of the logarithms)."
    return Page(
        csv=Table(
            columns=("gpus", *COLUMNS, "paper_s", "obtained", "valid"),
            rows=[
                (num, *(column(run) for column in COLUMNS.values()), paper.get(num), run.obtained, run.validity.valid)
                for num in GPUS
                for run in runs.of(cell(runs.view, num))
            ],
        ),
        picture=Picture(
            panels=[
                Panel(
                    title=f"{DETAIL_MODEL} DuReader, load grows with the GPUs",
                    layers=[*lines(runs), *marks],
                    x=Axis(label="GPUs", scale="log2", ticks=GPUS),
                    y=Axis(label="processor seconds", better="lower", scale="plain log"),
                )
            ],
            caption=[
                f"Measured: processor seconds of one process on {machines(runs)}, for the coefficients and for the integer program, solved by "
                f"enumeration of all plans. {runs.view.obtained.capitalize()}: the cluster and its sessions.",
                "Direct simulation of every pool up to 32 GPUs, interpolated up to 64, closed forms beyond.",
                repeats,
                "The paper names neither its processor nor its simulator.",
            ],
            repeats=f"Geometric mean of {len(runs.view.seeds)} samples with its 95 % interval.",
        ),
        notes=[
            f"One decision, {label}: {1e6 * slowest(runs, name):.0f} us, measured." for name, label in DECISIONS.items()
        ],
    )


def lines(runs: Runs) -> list[Layer]:
    """Draw a line per method, not joined to the next. Means and intervals are of logarithms, so none reaches below zero."""
    by_method: dict[str, list[tuple[int, Interval]]] = {}
    for num in GPUS:
        values = list(runs.values(cell(runs.view, num), seconds_of).values())
        for method in dict.fromkeys(str(run.facts["method"]) for run in runs.of(cell(runs.view, num))):
            logs = from_logarithms(mean_interval([math.log(value) for value in values if value > 0]))
            by_method.setdefault(method, []).append((num, logs))
    return [
        Line(
            label=f"ours, measured: {METHODS.get(method, method)}",
            places=[num for num, _ in points],
            at=[interval for _, interval in points],
            look=replace(system_look("ampd"), marker=marker),
        )
        for (method, points), marker in zip(by_method.items(), MARKERS, strict=False)
    ]


def slowest(runs: Runs, name: str) -> float:
    return max((float(run.summary[name]) for run in runs.all), default=float("nan"))


def findings(runs: Runs) -> list[Finding]:
    least, most, paper = min(GPUS), max(GPUS), printed()
    elsewhere = "of another simulator on another machine, so that no number can be compared"
    gpu_ratio, time_ratio = most / least, number(seconds(runs, most)) / number(seconds(runs, least))
    slow = max(slowest(runs, name) for name in DECISIONS)
    incomparable = {
        **{f"ampd-plan-{num}": (num, f"processor seconds {elsewhere} (paper {paper[num]:g} s)") for num in GPUS},
        "ampd-plan-minute": (most, f"processor seconds for {most} GPUs {elsewhere}"),
    }
    return [
        *(
            runs.finding(claim, number(seconds(runs, num)), how, obtained="measured", comparable=False)
            for claim, (num, how) in incomparable.items()
        ),
        runs.finding(
            "ampd-plan-growth",
            time_ratio,
            f"seconds of {most} over {least} GPUs, which are {gpu_ratio:g} times as many; the method changes on the way",
            obtained="measured",
            holds=0.5 * gpu_ratio <= time_ratio <= 4 * gpu_ratio,
        ),
        runs.finding(
            "ampd-overhead",
            1e3 * slow,
            "ms of the slower of a routing decision over 8 prefill workers and an ordering of w = 3, in Python",
            obtained="measured",
            holds=slow < 1e-3,
        ),
    ]


FIGURE = ampd_figure(
    "fig7",
    "AMPD, Figure 7, App. A.2",
    page=page,
    cells=cells,
    findings=findings,
    num_runs=NUM_RUNS,
    origin=lambda runs: (),
    under_title=lambda runs: (
        f"measured: the seconds, on {machines(runs)}\n{runs.view.obtained}: what is planned for, {runs.view.platform.title}"
    ),
)
