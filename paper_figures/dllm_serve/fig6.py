"""dLLM-Serve Figure 6: accuracy against retention ratio.

The paper asks LLaDA-8B. Here the embedded model answers its own held-out tasks, so that any machine can measure every point. Engine,
scheduler and decoding are the same for all series: only the selection differs.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from paper_figures.common.caption import obtained_text
from paper_figures.common.figure import Page, Picture, Table, cell_by_cell
from paper_figures.common.panel import Axis, Band, Guide, Layer, Line, Mark, Panel
from paper_figures.common.runs import Runs
from paper_figures.common.style import system_look
from paper_figures.common.words import exactly
from paper_figures.dllm_serve.answers import by_criterion, share, verdicts
from paper_figures.dllm_serve.layout import PAPER, all_valid, check_answers, dllm_figure, printed_in
from repro.reports.claims import Finding
from repro.reports.figures import TASKS, Knobs, Solved, View
from repro.runs.cell import Cell
from repro.runs.statistics import Discordance, discordance
from repro.runs.store import StoredRun
from repro.tasks.registry import task_entry

SOURCE = f"{PAPER}, Figure 6, §6.4"
HEAD, UNIFORM, DENSE = "head", "uniform", "dense"
SELECTIONS = (HEAD, UNIFORM)
PAPER_DATASETS = {"mini-code": "HumanEval", "mini-gsm": "GSM8K"}
"""Our task for the embedded model -> the paper's data set in the same panel."""
RATIOS = (0.1, 0.2, 0.3, 0.4, 0.5)
"""The paper's range."""
TESTED = (0.1, 0.2)
"""Ratios at which the notes tell the difference in words."""
PLACES = [(task, ratio) for task in TASKS for ratio in RATIOS]
KEPT = [*((selection, ratio) for selection in SELECTIONS for ratio in RATIOS), (DENSE, None)]
"""Points of the series: how rows are selected, and which share of them is kept; dense keeps every row."""
NUM_PROBLEMS = 500
GENERATION: Knobs = (
    ("gen_length", 40),
    ("block_length", 8),
    ("steps", 40),
    ("stop_at_eos", True),
    ("num_prompts", NUM_PROBLEMS),
)
"""One protocol for both tasks. Answers have up to 38 tokens, so 40 hold them. With blocks of 8, an answer takes three to five blocks,
each denoised over its own cache. One block of 32 would look up nothing between its 32 steps. The rest is the published default: pooling
over 3 rows, and building the cache at a block's second step."""

PRINTED_BESIDE = 2.2
"""Printed values are shifted by this percent of rows, to cover none of ours."""
LOOKS = {HEAD: system_look("dllm-serve"), UNIFORM: system_look("sparse-dllm")}
LABELS = {HEAD: "head-level (dLLM-Serve)", UNIFORM: "uniform (Sparse-dLLM's rule)", DENSE: "dense (every row kept)"}
CSV_COLUMNS = (
    *("platform", "task", "selection", "retention_ratio", "criterion", "accuracy", "low", "high", "n"),
    *("obtained", "valid", "run_folder"),
)


@dataclass(frozen=True, kw_only=True)
class PaperAccuracy:
    task: str
    selection: str
    ratio: float
    percent: float


def paper_values() -> list[PaperAccuracy]:
    """Return the points that the paper's text prints, for LLaDA-8B-Instruct."""
    values = printed_in("fig6")
    return [
        PaperAccuracy(task=task, selection=selection, ratio=float(percent) / 100, percent=float(printed[selection]))
        for task, dataset in PAPER_DATASETS.items()
        for percent, printed in values[dataset].items()
        for selection in SELECTIONS
    ]


def cell(view: View, task: str, selection: str, ratio: float | None = None) -> Cell:
    retention: Knobs = () if ratio is None else (("retention_ratio", ratio),)
    return view.cell(None, "dllm-serve", task, knobs=(*GENERATION, ("selection", selection), *retention))


def cells(view: View) -> list[Cell]:
    check_answers(view)
    return cell_by_cell((cell(view, task, *kept) for task in TASKS for kept in KEPT), view)


def own_runs(runs: Runs, task: str, selection: str, ratio: float | None = None) -> tuple[StoredRun, ...]:
    """All repeats of one point."""
    return runs.of(cell(runs.view, task, selection, ratio))


def solved(runs: Runs, task: str, selection: str, ratio: float | None = None) -> Solved | None:
    return share(own_runs(runs, task, selection, ratio))


def compare(first: Sequence[StoredRun], second: Sequence[StoredRun]) -> Discordance | None:
    """Compare two points problem by problem; None if they did not ask the same problems."""
    checksums, other_checksums = (
        [run.record.manifest["dataset"]["checksum"] for run in runs if run.validity.valid] for runs in (first, second)
    )
    graded = verdicts(first)
    return discordance(graded, verdicts(second)) if graded and checksums == other_checksums else None


def page(runs: Runs) -> Page:
    printed = paper_values()
    stated = ", ".join(f"{PAPER_DATASETS[value.task]} {value.selection} {value.percent:g} %" for value in printed)
    return Page(
        csv=Table(
            columns=CSV_COLUMNS,
            rows=[
                *(row for task in TASKS for kept in KEPT for row in csv_rows(runs, task, *kept)),
                *map(paper_row, printed),
            ],
        ),
        picture=Picture(
            panels=[panel(runs, task, printed) for task in TASKS],
            caption=[
                "Only the selection differs between the series. Bars and band: Wilson's 95 % intervals.",
                "Hollow, beside its ratio: the paper's, of LLaDA-8B on HumanEval and GSM8K, another model and other tasks: not to be compared in height.",
                f"Printed in {SOURCE}: {stated}.",
                protocol(runs),
            ],
            repeats="",
        ),
        notes=[*difference_notes(runs), protocol(runs)],
    )


def panel(runs: Runs, task: str, printed: list[PaperAccuracy]) -> Panel:
    layers: list[Layer] = []
    for selection in SELECTIONS:
        shares = {ratio: point for ratio in RATIOS if (point := solved(runs, task, selection, ratio))}
        # At a share of 0 or 1, the interval ends at the share itself, up to rounding.
        spread = [
            (max(0.0, 100 * (point.share - point.low)), max(0.0, 100 * (point.high - point.share)))
            for point in shares.values()
        ]
        if shares:
            layers.append(
                Line(
                    label=LABELS[selection],
                    places=[100 * ratio for ratio in shares],
                    at=[exactly(100 * point.share) for point in shares.values()],
                    spread=spread,
                    look=LOOKS[selection],
                    capsize=2.5,
                    zorder=3,
                )
            )
    if dense := solved(runs, task, DENSE):
        layers.append(Guide(value=100 * dense.share, label=LABELS[DENSE], width=1.2, zorder=2))
        layers.append(Band(low=100 * dense.low, high=100 * dense.high))
    for value in printed:
        if value.task == task:
            label = f"{value.selection}, paper (LLaDA-8B)"
            percent, look = 100 * value.ratio, LOOKS[value.selection]
            place = percent + PRINTED_BESIDE
            layers.append(Mark(label=label, place=place, value=value.percent, look=look, name=f"{percent:g}"))
    letter = "ab"[TASKS.index(task)]
    return Panel(
        title=f"({letter}) {task}, {task_entry(task).criterion}",
        layers=layers,
        x=Axis(label="context rows kept (%)", ticks=[100 * ratio for ratio in RATIOS]),
        y=Axis(label="accuracy (%)" if letter == "a" else None, limits=(-3, 108)),
    )


def protocol(runs: Runs) -> str:
    knobs = dict(GENERATION)
    counts = sorted({run.num_requests for run in runs.all})
    seeds = sorted({run.cell.seed for run in runs.all})
    return (
        f"{' or '.join(map(str, counts))} held-out problems a point and seed (seed {', '.join(map(str, seeds))}), the same "
        f"for every series. {knobs['gen_length']} tokens in blocks of "
        f"{knobs['block_length']}, one token a step, temperature 0, scores pooled over 3 rows, cache built at a block's second "
        f"step. The engine is the same for all series, dLLM-Serve's: only the selection differs."
    )


# -- CSV, table, notes ------------------------------------------------------------------------------------


def csv_rows(runs: Runs, task: str, selection: str, ratio: float | None) -> list[tuple[object, ...]]:
    """Return one row for each criterion, with repeats pooled; no rows for a point without runs."""
    repeats = own_runs(runs, task, selection, ratio)
    end = obtained_text(repeats), all_valid(repeats), " ".join(run.cell.folder_name for run in repeats)
    return [
        (runs.view.platform.name, task, selection, ratio, criterion, *numbers, *end)
        for criterion, _, numbers in (by_criterion(repeats, task) if repeats else ())
    ]


def paper_row(value: PaperAccuracy) -> tuple[object, ...]:
    values = {
        "task": PAPER_DATASETS[value.task],
        "selection": value.selection,
        "retention_ratio": value.ratio,
        "accuracy": round(value.percent / 100, 4),
        "obtained": "paper",
    }
    return tuple(values.get(column) for column in CSV_COLUMNS)


def difference_notes(runs: Runs) -> list[str]:
    notes = []
    for task, ratio in PLACES:
        head, uniform = (own_runs(runs, task, selection, ratio) for selection in SELECTIONS)
        pair, head_solved, uniform_solved = compare(head, uniform), share(head), share(uniform)
        if pair is None or head_solved is None or uniform_solved is None:
            continue
        gain = 100 * (head_solved.share - uniform_solved.share)
        if ratio in TESTED:
            notes.append(
                f"{task} at {100 * ratio:g} %: head-level {100 * head_solved.share:.1f} %, uniform {100 * uniform_solved.share:.1f} % "
                f"({gain:+.1f} points; {pair.only_first} problems solved by head-level alone, {pair.only_second} by uniform "
                f"alone of {pair.n}; exact McNemar test {p_value(pair)})."
            )
        elif gain < 0:
            notes.append(
                f"{task} at {100 * ratio:g} %: uniform is ahead by {-gain:.1f} points (exact McNemar test {p_value(pair)})."
            )
    return notes


def p_value(pair: Discordance) -> str:
    return f"p = {pair.p_value:.2g}" if pair.p_value >= 1e-4 else "p < 0.0001"


# -- claims -------------------------------------------------------------------------------------------------


def findings(runs: Runs) -> list[Finding]:
    """Another model answers other tasks here, so only the ratios that were tried can be compared."""
    tried = f"ratios {', '.join(f'{100 * ratio:g} %' for ratio in RATIOS)} on the embedded model's tasks"
    results = [runs.finding("dllm-retention-sweep", (100 * min(RATIOS), 100 * max(RATIOS)), tried)]
    for task, short in zip(TASKS, ("he", "gsm"), strict=True):
        head, uniform = (solved(runs, task, selection, TESTED[0]) for selection in SELECTIONS)
        if head is None or uniform is None:
            continue
        rows = {
            f"dllm-{short}-head": (100 * head.share, "head-level at 10 %"),
            f"dllm-{short}-uniform": (100 * uniform.share, "uniform at 10 %"),
            **(
                of_code(head, uniform)
                if short == "he"
                else of_math(head, uniform, solved(runs, task, UNIFORM, TESTED[1]))
            ),
        }
        setting = f"on {task}, embedded model; the claim is about LLaDA-8B on {PAPER_DATASETS[task]}"
        for claim, (value, label) in rows.items():
            results.append(runs.finding(claim, value, f"{label} {setting}", comparable=False))
    return results


def of_code(head: Solved, uniform: Solved) -> dict[str, tuple[float, str]]:
    if uniform.share > 0:
        return {"dllm-he-ratio": (head.share / uniform.share, "head-level over uniform at 10 %")}
    # Uniform solves none, so the ratio is at least head-level's share over the upper end of uniform's interval.
    what = f"head-level over the upper end of uniform's interval ({100 * uniform.high:.2g} %; it solves none) at 10 %"
    return {"dllm-he-ratio": (head.share / uniform.high, what)}


def of_math(head: Solved, uniform: Solved, uniform_twice: Solved | None) -> dict[str, tuple[float, str]]:
    rows = {}
    if uniform.share > 0:
        rows["dllm-gsm-gain"] = (100 * (head.share / uniform.share - 1), "relative gain at 10 %")
    if uniform_twice is not None:
        match = 100 * (head.share - uniform_twice.share)
        rows["dllm-gsm-match"] = (match, "head-level at 10 % less uniform at 20 %")
    return rows


FIGURE = dllm_figure("fig6", SOURCE, platforms=("cpu-tiny",), page=page, cells=cells, findings=findings, is_timed=False)
