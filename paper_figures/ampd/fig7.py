"""AMPD Figure 7 (App. A.2): seconds to plan 8 to 256 GPUs; and what routing and reordering take (§4)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from paper_figures.ampd.panels import DETAIL_MODEL
from paper_figures.common import style
from paper_figures.common.caption import device_text, invalid_notes
from paper_figures.common.repeats import Repeats
from repro.reports.claims import Finding
from repro.reports.figures import Rendered, View
from repro.reports.paper import load_table
from repro.runs.cell import Cell
from repro.runs.statistics import Interval, mean_interval
from repro.runs.store import StoredRun
from repro.systems.ar.planning import PLANNER_SYSTEM
from repro.systems.ar.settings import PLANNING_RATE

NAME = "fig7"
TITLE = "AMPD Figure 7: time of planning"
SOURCE = "AMPD, Figure 7, App. A.2"
PLATFORMS = ("h20x32",)
NUM_RUNS = 3
"""Other samples of sessions, timed one after the other."""
GPUS = (8, 16, 32, 64, 128, 256)
TRACE, TRACE_GPUS, TRACE_SESSIONS = "dureader", 16, 99
"""Its load grows with the GPUs."""
DECISIONS = (
    ("routing_s", "routing to one of 8 workers, all without slack"),
    ("ordering_s", "ordering a window of 3, one of them late"),
)
CSV_COLUMNS = ("gpus", "seed", "coefficients_s", "solve_s", "method", "solver", "plan", "paper_s", "obtained", "valid")


def cells(view: View) -> list[Cell]:
    return [_cell(view, num_gpus, seed) for num_gpus in GPUS for seed in view.seeds]


def _cell(view: View, num_gpus: int, seed: int = 0) -> Cell:
    return Cell(
        figure=NAME,
        system=PLANNER_SYSTEM,
        dataset=TRACE,
        platform=view.platform.name,
        executor=view.platform.executor,
        rate=PLANNING_RATE * num_gpus / TRACE_GPUS,
        seed=seed,
        knobs=(
            ("model", DETAIL_MODEL),
            ("num_gpus", num_gpus),
            ("num_prompts", max(TRACE_SESSIONS, TRACE_SESSIONS * num_gpus // TRACE_GPUS)),
            ("timed", True),
        ),
    )


def seconds_of(run: StoredRun) -> float:
    return float(run.summary["coefficients_s"] + run.summary["solve_s"])


def by_gpus(runs: Sequence[StoredRun], view: View) -> dict[int, tuple[StoredRun, ...]]:
    repeats = Repeats(runs, view)
    return {num_gpus: repeats.of(_cell(view, num_gpus)) for num_gpus in GPUS}


def seconds(runs: Sequence[StoredRun]) -> Interval:
    return mean_interval([seconds_of(run) for run in runs if run.validity.valid])


def printed() -> dict[int, float]:
    return {int(str(row["n_gpus"])): float(str(row["planning_time_s"])) for row in load_table("ampd/fig7.csv")}


def render(runs: Sequence[StoredRun], view: View, out: Path) -> Rendered:
    found, paper = by_gpus(runs, view), printed()
    stem = f"{NAME}-{view.stem}"
    at = [seconds(found[num]) for num in GPUS]
    where = " and ".join(sorted({device_text(run) for run in runs}))
    with style.drawing():
        figure, (axes,) = style.row_of_panels([f"{DETAIL_MODEL} DuReader, load grows with the GPUs"])
        axes.errorbar(
            GPUS,
            [each.mean or float("nan") for each in at],
            yerr=[each.half_width or 0.0 for each in at],
            marker="o",
            capsize=2,
            color="#0072B2",
            label="ours: seconds measured",
        )
        for num in GPUS:
            style.paper_marker(axes, num, paper[num], color="black", marker="D", label="paper")
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
            title=f"{TITLE}\nmeasured: the seconds, on {where}\nsimulated: what is planned for, {view.platform.title}",
            caption=[
                f"Measured: processor seconds of one process on {where}, for the coefficients and for the integer program, solved by "
                f"{_solvers(runs)}. Simulated, uncalibrated: the cluster and its sessions.",
                *invalid_notes(runs),
                "Direct simulation of every pool up to 32 GPUs, interpolated up to 64, closed forms beyond.",
                f"{len(view.seeds)} samples of sessions: mean, and bars for its 95 % interval (Student's t).",
                "The paper names neither its processor nor its simulator.",
            ],
            width_inches=style.WIDE_INCHES,
        )
    rows = [_csv_row(num, run, paper) for num, own in found.items() for run in own]
    return Rendered(
        files=(*files, style.save_csv(out / f"{stem}.csv", CSV_COLUMNS, rows)),
        columns=("GPUs", "seconds", "solver's part", "by", "plan", "paper s"),
        rows=tuple(
            (
                str(num),
                _pm(seconds(own)),
                f"{mean_interval([run.summary['solve_s'] for run in own]).mean or 0:.3f}",
                f"{own[0].facts['method']}, {own[0].facts['solver']}" if own else "-",
                own[0].summary["plans"][0]["deployment"] if own else "-",
                f"{paper[num]:g}",
            )
            for num, own in found.items()
        ),
        notes=(
            *(f"One decision, {what}: {1e6 * slowest(runs, name):.0f} us, measured." for name, what in DECISIONS),
            *invalid_notes(runs),
        ),
    )


def slowest(runs: Sequence[StoredRun], name: str) -> float:
    return max((float(run.summary[name]) for run in runs), default=float("nan"))


def findings(runs: Sequence[StoredRun], view: View) -> list[Finding]:
    found, paper = by_gpus(runs, view), printed()
    answers = [
        Finding(
            claim=f"ampd-plan-{num}",
            value=seconds(own).mean or float("nan"),
            obtained="measured",
            how=f"processor seconds of another simulator on another machine, so that no number can be compared (paper {paper[num]:g} s)",
            comparable=False,
        )
        for num, own in found.items()
    ]
    largest, smallest = (seconds(found[num]).mean or float("nan") for num in (max(GPUS), min(GPUS)))
    growth = max(GPUS) / min(GPUS)
    slow = max(slowest(runs, name) for name, _ in DECISIONS)
    return [
        *answers,
        Finding(
            claim="ampd-plan-minute",
            value=largest,
            obtained="measured",
            how=f"processor seconds for {max(GPUS)} GPUs of another simulator on another machine, so that no number can be compared",
            comparable=False,
        ),
        Finding(
            claim="ampd-plan-growth",
            value=largest / smallest,
            obtained="measured",
            how=f"seconds of {max(GPUS)} over {min(GPUS)} GPUs, which are {growth:g} times as many; the method changes on the way",
            holds=0.5 * growth <= largest / smallest <= 4 * growth,
        ),
        Finding(
            claim="ampd-overhead",
            value=1e3 * slow,
            obtained="measured",
            how="ms of the slower of a routing decision over 8 prefill workers and an ordering of w = 3, in Python",
            holds=slow < 1e-3,
        ),
    ]


def _csv_row(num: int, run: StoredRun, paper: dict[int, float]) -> tuple[object, ...]:
    summary, facts = run.summary, run.facts
    return (
        num,
        run.cell.seed,
        summary["coefficients_s"],
        summary["solve_s"],
        facts["method"],
        facts["solver"],
        summary["plans"][0]["deployment"],
        paper.get(num),
        run.obtained,
        run.validity.valid,
    )


def _solvers(runs: Sequence[StoredRun]) -> str:
    names = {"enumeration": "enumeration of all plans", "scip": "SCIP", "highs": "HiGHS"}
    return " and ".join(sorted({names[run.facts["solver"]] for run in runs}))


def _pm(interval: Interval) -> str:
    if interval.mean is None:
        return "-"
    return f"{interval.mean:.3f}" + ("" if interval.half_width is None else f" ± {interval.half_width:.3f}")
