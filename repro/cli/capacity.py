"""``repro capacity``: the largest rate a deployment serves under objectives, or the fewest GPUs that serve a rate."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import typer

from engines.knobs import Checked, Range
from repro.cli import options as opt
from repro.cli.output import counted, counting, number, print_json, print_table, say
from repro.workloads.knobs import TimeUnit

if TYPE_CHECKING:
    from repro.capacity.answers import Answer
    from repro.capacity.objectives import Objective

Plot = Annotated[
    Path | None,
    typer.Option(
        help="Draw rates against GPUs into this file, .png or .pdf, with a CSV of the same name beside it.",
        rich_help_panel=opt.RUNS,
    ),
]


@dataclass(frozen=True, kw_only=True)
class CapacityGoal(Checked):
    panel: ClassVar[str] = opt.WHAT
    workload: str
    """Your requests, sessions or conversations, a file or module:NAME as repro bench takes it; or a trace by name: toolbench, gaia,
    hotpotqa, dureader."""
    columns: str | None = None
    """Which of the file's columns is what, as repro bench takes it."""
    time_unit: TimeUnit | None = None
    """Unit of the file's times, where its columns do not say it: s, ms, us or ns."""
    sort: bool = False
    """Sort the file's rows by their times."""
    slo: str
    """Objectives: metric, percentile and limit in ms, like 'ttft:p95:2000 itl:p95:50'. TTFT, TPOT and E2EL are of rounds, ITL of all
    tokens."""
    gpus: str = "1..64"
    """How many, or from and to. Of a range without a rate the largest is answered for, and halves of it."""
    rate: Annotated[float, Range(1e-4, 1e6)] | None = None
    """Sessions/s, of prefill systems turns/s: asks for the fewest GPUs that serve them."""
    system: list[str] | None = None
    """Several times: ampd, dynamo-sim, vllm-sim, continuum-sim; or laps and what it is compared with [default: dynamo-sim, vllm-sim]."""
    platform: list[str] | None = None
    """Several times: a card (h20, h100, h200, a100, b200, l40s), h20x32, h200x32, the YAML file of a card of yours,
    or module:NAME [default: h200]."""
    dataset_name: str | None = None
    """Whose card says what a file of its own format is, and draws what it lacks [default: none]."""
    model: str | None = None
    """A shape: Qwen3-32B, Llama-3.1-70B, Mixtral-8x7B, Qwen2.5-7B, ... [default: the platform's]."""


@dataclass(frozen=True, kw_only=True)
class Searched(Checked):
    """How rates are found."""

    panel: ClassVar[str] = opt.ENGINE
    num_prompts: Annotated[int, Range(1, 10**5)] | None = None
    """Sessions, or turns, of a run [default: more for more GPUs]."""
    seeds: Annotated[int, Range(1, 20)] = 3
    """Seeds whose rounds are judged together; all rates and plans have the same."""
    resolution: Annotated[float, Range(0.005, 0.5)] = 0.05
    """A rate is served where this much more is not."""


def capacity(
    *,
    asked: CapacityGoal,
    charged: opt.Charged,
    searched: Searched,
    knob: opt.KnobTexts = None,
    plot: Plot = None,
    json: opt.Json = False,
) -> None:
    """The largest rate that deployments serve under objectives, or the fewest GPUs for a rate. Simulated."""
    from repro.capacity.answers import Search
    from repro.capacity.question import Question, parse_sizes
    from repro.cli.data_file import check_regular, readable
    from repro.cli.plots import check_plot

    sizes = parse_sizes(asked.gpus)
    given = opt.given(model=asked.model) | charged.charged
    question = Question(
        systems=asked.system or ["dynamo-sim", "vllm-sim"],
        platforms=asked.platform or ["h200"],
        workload=asked.workload,
        dataset=asked.dataset_name,
        file_knobs={"columns": asked.columns, "time_unit": asked.time_unit, "sort": asked.sort or None},
        slo=asked.slo,
        knobs=given | opt.parse_knobs(knob or (), given),
        num_prompts=searched.num_prompts,
        num_seeds=searched.seeds,
    )
    objectives = question.objectives()
    if plot is not None:
        check_plot(plot, asked.workload, *(asked.platform or ()))
    check_regular("workload", Path(asked.workload))
    with readable("workload", question.path, [] if asked.dataset_name is None else [asked.dataset_name]):
        sites = question.sites(sizes)
    search = Search(question=question, sizes=sizes, rate=asked.rate, resolution=searched.resolution)
    with counting("deployments") as advance:
        answers = search.answers(sites, advance)
    if question.is_given:
        say(answers[0].site.provenance.description, file=sys.stderr)
    rows = [_row(answer, objectives) for answer in answers]
    about = {
        "workload": asked.workload,
        "slo": " ".join(map(str, objectives)),
        "unit": sites[0].unit,
        "seeds": searched.seeds,
        "resolution": searched.resolution,
    }
    if json:
        print_json({**about, "answers": rows})
    else:
        _show(rows, about, sites[0].hardware()[0].name, objectives)
        for line in _notes(answers, rows, asked):
            say(line)
    if plot is not None and rows:
        from repro.cli.capacity_plot import save_capacity_plot

        drawn = save_capacity_plot(plot, f"{Path(asked.workload).name}: {about['slo']}", rows, sites[0].unit)
        say(f"files: {', '.join(map(str, drawn))}", file=sys.stderr)


def _row(answer: Answer, objectives: Sequence[Objective]) -> dict[str, Any]:
    site, plan, at = answer.site, answer.plan, answer.at
    row: dict[str, Any] = {
        "system": site.title,
        "platform": site.cell.platform.rpartition(":")[2].lower(),
        "gpus": answer.gpus,
        "plan": None if plan is None else plan.name,
        "rate": answer.rate,
        "attainment": None if at is None else at.attainment,
    }
    for each in objectives:
        row[f"{each.metric}_p{each.percentile:g}_s"] = None if at is None else at.values[str(each)]
    cell = None if plan is None or answer.rate is None else site.of_run(plan, answer.rate, 0).written()
    return row | {
        "longest_ttft_s": None if at is None else at.longest_s,
        "binds": answer.binds,
        "arrivals_over_stay": None if at is None or math.isinf(at.stays) else at.stays,
        "num_prompts": site.cell.knob_values["num_prompts"],
        "is_monotone": answer.is_monotone,
        "plans": answer.num_plans,
        "simulated_plans": answer.num_simulated,
        "runs": answer.num_runs,
        "obtained": site.obtained,
        "cell": cell,
    }


def _show(
    rows: Sequence[Mapping[str, Any]], about: Mapping[str, Any], model: str, objectives: Sequence[Objective]
) -> None:
    columns: dict[str, list[str]] = {
        "system": [row["system"] for row in rows],
        "card": [row["platform"] for row in rows],
        "GPUs": [str(row["gpus"]) for row in rows],
        "plan": [row["plan"] or "none" for row in rows],
        "rate /s": ["-" if row["rate"] is None else f"{row['rate']:.4g}" for row in rows],
        "met %": [number(row["attainment"], scale=100) for row in rows],
    }
    for each in objectives:
        name = f"{each.metric}_p{each.percentile:g}"
        columns[f"{each.metric.upper()} p{each.percentile:g} ms"] = [
            number(row[f"{name}_s"], 0, scale=1e3) for row in rows
        ]
    columns["longest wait s"] = [number(row["longest_ttft_s"], 2) for row in rows]
    columns["binds"] = [_binding(row["binds"]) for row in rows]
    obtained = ", ".join(sorted({row["obtained"] for row in rows}))
    title = (
        f"{model}, {Path(about['workload']).name}: {about['slo']}; {about['unit']} within {100 * about['resolution']:g} %, "
        f"{counted(about['seeds'], 'seed')} ({obtained})"
    )
    print_table(title, tuple(columns), list(zip(*columns.values(), strict=True)))


def _binding(name: str | None) -> str:
    """Without the limit, which the title has."""
    if name is None or ":" not in name:
        return name or "-"
    metric, percentile, _ = name.split(":")
    return f"{metric.upper()} {percentile}"


def _notes(answers: Sequence[Answer], rows: Sequence[Mapping[str, Any]], asked: CapacityGoal) -> list[str]:
    """How the answers were found, and what is doubtful about them."""
    from repro.capacity.site import LASTING

    plans, simulated, runs = (sum(row[name] for row in rows) for name in ("plans", "simulated_plans", "runs"))
    said = [f"{counted(plans, 'plan')}, {simulated} of them simulated, in {counted(runs, 'run')}"]
    bursts = {}
    for answer, row in zip(answers, rows, strict=True):
        where = f"{row['system']} on {row['gpus']} x {row['platform']}"
        if answer.plan is None:
            what = "any rate" if asked.rate is None else f"{asked.rate:g} {answer.site.unit}"
            told = f" ({row['binds']} is beyond its limit at the lowest)" if row["binds"] else ""
            said.append(f"{where}: no plan serves {what} within the objectives{told}")
        elif (row["arrivals_over_stay"] or LASTING) < LASTING:
            bursts[where] = (
                row["arrivals_over_stay"],
                math.ceil(row["num_prompts"] * LASTING / row["arrivals_over_stay"]),
            )
        if not answer.is_monotone:
            said.append(f"{where}: a fifth less is not served, so the rate is no capacity: add seeds or requests")
    if bursts:
        told = ", ".join(f"{where} {times:.1f}" for where, (times, _) in bursts.items())
        said.append(
            f"arrivals last fewer than {LASTING} times as long as a session ({told}), so these rates are bursts' and too "
            f"high: --num-prompts {max(num for _, num in bursts.values())} mends it"
        )
    return said
