"""dLLM-Serve Figure 6 (§6.4): accuracy of head-level and uniform selection under retention ratios.

The paper asks LLaDA-8B; here the embedded model answers its own held-out tasks, so that every point is measured
on any machine. Engine, scheduler and decoding are the same for all series: only the selection differs.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from engines.errors import UserError
from paper_figures.common import style
from paper_figures.common.caption import (
    figure_title,
    how_obtained,
    invalid_notes,
    missing_note,
    obtained_text,
    require_runs,
    validity_text,
)
from paper_figures.dllm_serve.retention import (
    DENSE,
    HEAD,
    PAPER_DATASETS,
    SELECTIONS,
    TASKS,
    UNIFORM,
    AccuracyPoint,
    PaperAccuracy,
    Share,
    compare,
    find,
    load_points,
    paper_values,
)
from repro.reports.claims import Finding
from repro.reports.figures import Knobs, Rendered, View
from repro.runs.cell import Cell, Scalar
from repro.runs.statistics import Discordance
from repro.runs.store import StoredRun
from repro.tasks.registry import task_entry

if TYPE_CHECKING:
    from matplotlib.axes import Axes

NAME = "fig6"
TITLE = "dLLM-Serve Figure 6: accuracy against retention ratio"
SOURCE = "dLLM-Serve (arXiv:2512.17077), Figure 6, §6.4"
PLATFORMS = ("cpu-tiny",)

IS_TIMED = False
RATIOS = (0.1, 0.2, 0.3, 0.4, 0.5)
"""The paper's range."""
TESTED = (0.1, 0.2)
"""Ratios at which the notes say the difference in words."""
NUM_PROBLEMS = 500
GENERATION: Knobs = (
    ("gen_length", 40),
    ("block_length", 8),
    ("steps", 40),
    ("stop_at_eos", True),
    ("num_prompts", NUM_PROBLEMS),
)
"""One protocol for both tasks. Answers have up to 38 tokens, so 40 hold them. Blocks of 8 make of an answer three to
five blocks, each denoised over a cache of its own; in one block of 32 nothing could be looked up between its 32 steps.
The rest is the published default: pooling over 3 rows, the cache built at a block's second step."""

LOOKS = {HEAD: style.system_look("dllm-serve"), UNIFORM: style.system_look("sparse-dllm")}
LABELS = {HEAD: "head-level (dLLM-Serve)", UNIFORM: "uniform (Sparse-dLLM's rule)", DENSE: "dense (every row kept)"}
CSV_COLUMNS = (
    "platform",
    "task",
    "selection",
    "retention_ratio",
    "criterion",
    "accuracy",
    "low",
    "high",
    "n",
    "obtained",
    "valid",
    "run_folder",
)
TABLE_COLUMNS = ("task", "kept", "head %", "uniform %", "only head / only uniform", "McNemar p", "dense %", "valid")


def cells(view: View) -> list[Cell]:
    if view.platform.executor != "torch":
        raise UserError(
            f"platform={view.platform.name!r} simulates, and accuracy needs a model that answers: use --platform cpu-tiny"
        )
    choices: list[dict[str, Scalar]] = [
        {"selection": selection, "retention_ratio": ratio} for selection in SELECTIONS for ratio in RATIOS
    ]
    choices.append({"selection": DENSE})
    return [
        view.cell(NAME, "dllm-serve", task, seed=seed, knobs=(*GENERATION, *choice.items()))
        for task in TASKS
        for choice in choices
        for seed in view.seeds
    ]


def render(runs: Sequence[StoredRun], view: View, out: Path) -> Rendered:
    require_runs(NAME, runs, view.platform)
    points, printed = load_points(runs), paper_values()
    stem = f"{NAME}-{view.stem}"
    files = _draw(points, printed, runs, view, out, stem)
    csv_rows = [row for point in points for row in _csv_rows(point, view)] + [_paper_row(value) for value in printed]
    return Rendered(
        files=(*files, style.save_csv(out / f"{stem}.csv", CSV_COLUMNS, csv_rows)),
        columns=TABLE_COLUMNS,
        rows=tuple(_table_row(points, task, ratio) for task in TASKS for ratio in RATIOS),
        notes=tuple(_notes(points, runs, view)),
    )


def findings(runs: Sequence[StoredRun], view: View) -> list[Finding]:
    """Answered by another model on other tasks: only which ratios were tried can be compared."""
    points = load_points(runs)
    found = [
        Finding(
            claim="dllm-retention-sweep",
            value=(100 * min(RATIOS), 100 * max(RATIOS)),
            obtained=view.obtained,
            how=f"ratios {', '.join(f'{100 * ratio:g} %' for ratio in RATIOS)} on the embedded model's tasks",
        )
    ]

    def add(claim: str, value: float, task: str, what: str) -> None:
        found.append(
            Finding(
                claim=claim,
                value=value,
                obtained=view.obtained,
                comparable=False,
                how=f"{what} on {task}, embedded model; the claim is about LLaDA-8B on {PAPER_DATASETS[task]}",
            )
        )

    for task, short in zip(TASKS, ("he", "gsm"), strict=True):
        head, uniform, uniform_twice = (
            _share(points, task, selection, ratio)
            for selection, ratio in ((HEAD, TESTED[0]), (UNIFORM, TESTED[0]), (UNIFORM, TESTED[1]))
        )
        if head is None or uniform is None:
            continue
        add(f"dllm-{short}-head", 100 * head.value, task, "head-level at 10 %")
        add(f"dllm-{short}-uniform", 100 * uniform.value, task, "uniform at 10 %")
        if short == "he" and uniform.value > 0:
            add("dllm-he-ratio", head.value / uniform.value, task, "head-level over uniform at 10 %")
        elif short == "he":
            # None is solved: the ratio is at least that to the most that the interval leaves.
            what = f"head-level over the upper end of uniform's interval ({100 * uniform.high:.2g} %; it solves none) at 10 %"
            add("dllm-he-ratio", head.value / uniform.high, task, what)
        if short == "gsm" and uniform.value > 0:
            add("dllm-gsm-gain", 100 * (head.value / uniform.value - 1), task, "relative gain at 10 %")
        if short == "gsm" and uniform_twice is not None:
            add(
                "dllm-gsm-match",
                100 * (head.value - uniform_twice.value),
                task,
                "head-level at 10 % less uniform at 20 %",
            )
    return found


# -- drawing ----------------------------------------------------------------------------------------------


def _draw(
    points: Sequence[AccuracyPoint],
    printed: Sequence[PaperAccuracy],
    runs: Sequence[StoredRun],
    view: View,
    out: Path,
    stem: str,
) -> tuple[Path, Path, Path]:
    with style.drawing():
        titles = [f"({letter}) {task}, {task_entry(task).criterion}" for letter, task in zip("ab", TASKS, strict=True)]
        figure, panels = style.row_of_panels(titles)
        for axes, task in zip(panels, TASKS, strict=True):
            _draw_panel(axes, [p for p in points if p.task == task], [v for v in printed if v.task == task])
        panels[0].set_ylabel("accuracy (%)")
        title = figure_title(TITLE, runs, view)
        return style.publish(figure, panels, out, stem, title=title, caption=_caption(runs, printed))


def _draw_panel(axes: Axes, points: Sequence[AccuracyPoint], printed: Sequence[PaperAccuracy]) -> None:
    axes.set_xlabel("context rows kept (%)")
    axes.set_xticks([100 * ratio for ratio in RATIOS])
    axes.set_ylim(-3, 108)
    for selection in SELECTIONS:
        look = LOOKS[selection]
        drawn = [(p.ratio, share) for p in points if p.selection == selection and p.ratio and (share := p.share())]
        if drawn:
            heights = [100 * share.value for _, share in drawn]
            # An empty or a full share is an end of its own interval, but for rounding.
            bars = [
                [max(0.0, height - 100 * share.low), max(0.0, 100 * share.high - height)]
                for height, (_, share) in zip(heights, drawn, strict=True)
            ]
            axes.errorbar(
                [100 * ratio for ratio, _ in drawn],
                heights,
                yerr=list(zip(*bars, strict=True)),
                capsize=2.5,
                marker=look.marker,
                color=look.color,
                label=LABELS[selection],
                zorder=3,
            )
    dense = next((share for p in points if p.selection == DENSE and (share := p.share())), None)
    if dense is not None:
        axes.axhline(
            100 * dense.value, linestyle="--", linewidth=1.2, color=style.GUIDE_COLOR, label=LABELS[DENSE], zorder=2
        )
        axes.axhspan(100 * dense.low, 100 * dense.high, color=style.GUIDE_COLOR, alpha=0.2, linewidth=0, zorder=1)
    for value in printed:
        look = LOOKS[value.selection]
        label = f"{value.selection}, paper (LLaDA-8B)"
        style.paper_marker(axes, 100 * value.ratio, value.percent, color=look.color, marker=look.marker, label=label)


def _caption(runs: Sequence[StoredRun], printed: Sequence[PaperAccuracy]) -> list[str]:
    return [
        "Only the selection differs between the series. Bars and band: Wilson's 95 % intervals.",
        "Hollow: the paper's, of LLaDA-8B on HumanEval and GSM8K, another model and other tasks: not to be compared in height.",
        f"Printed in {SOURCE}: {', '.join(_printed(value) for value in printed)}.",
        _protocol(runs),
        *how_obtained(runs, ["runs"] * len(runs)),
    ]


def _printed(value: PaperAccuracy) -> str:
    return f"{PAPER_DATASETS[value.task]} {value.selection} {value.percent:g} %"


def _protocol(runs: Sequence[StoredRun]) -> str:
    knobs = dict(GENERATION)
    counts = sorted({run.num_requests for run in runs})
    seeds = sorted({run.cell.seed for run in runs})
    return (
        f"{' or '.join(map(str, counts))} held-out problems a point and seed (seed {', '.join(map(str, seeds))}), the same "
        f"for every series. {knobs['gen_length']} tokens in blocks of "
        f"{knobs['block_length']}, one token a step, temperature 0, scores pooled over 3 rows, cache built at a block's second "
        f"step. The engine is the same for all series, dLLM-Serve's: only the selection differs."
    )


# -- CSV, table, notes ------------------------------------------------------------------------------------


def _csv_rows(point: AccuracyPoint, view: View) -> list[tuple[object, ...]]:
    """One row for each criterion; repeats are pooled."""
    entry = task_entry(point.task)
    rows: list[tuple[object, ...]] = []
    for column, criterion in (("correct", entry.criterion), ("correct_strict", entry.strict)):
        share = point.share(column)
        rows.append(
            (
                view.platform.name,
                point.task,
                point.selection,
                point.ratio,
                criterion,
                *_numbers(share),
                obtained_text(point.runs),
                all(run.validity.valid for run in point.runs),
                " ".join(run.cell.folder_name for run in point.runs),
            )
        )
    return rows


def _numbers(share: Share | None) -> tuple[float | int | None, ...]:
    return (None,) * 4 if share is None else (share.value, share.low, share.high, share.n)


def _paper_row(value: PaperAccuracy) -> tuple[object, ...]:
    known = {
        "task": PAPER_DATASETS[value.task],
        "selection": value.selection,
        "retention_ratio": value.ratio,
        "accuracy": round(value.percent / 100, 4),
        "obtained": "paper",
    }
    return tuple(known.get(column) for column in CSV_COLUMNS)


def _table_row(points: Sequence[AccuracyPoint], task: str, ratio: float) -> tuple[str, ...]:
    head, uniform, dense = (
        find(points, task, HEAD, ratio),
        find(points, task, UNIFORM, ratio),
        find(points, task, DENSE),
    )
    pair = compare(head, uniform)
    runs = [run for point in (head, uniform, dense) if point is not None for run in point.runs]
    return (
        task,
        f"{100 * ratio:g} %",
        _text(head),
        _text(uniform),
        "-" if pair is None else f"{pair.only_first} / {pair.only_second}",
        "-" if pair is None else _p_value(pair),
        _text(dense),
        validity_text(runs),
    )


def _notes(points: Sequence[AccuracyPoint], runs: Sequence[StoredRun], view: View) -> list[str]:
    asked = [(task, selection, ratio) for task in TASKS for selection in SELECTIONS for ratio in RATIOS]
    missing = [f"{t} {s} at {100 * r:g} %" for t, s, r in asked if find(points, t, s, r) is None]
    missing += [f"{task} {DENSE}" for task in TASKS if find(points, task, DENSE) is None]
    return [
        *_difference_notes(points),
        *_match_notes(points),
        *invalid_notes(runs),
        *missing_note(missing, len(asked) + len(TASKS)),
        *how_obtained(runs, ["runs"] * len(runs)),
        _protocol(runs),
    ]


def _difference_notes(points: Sequence[AccuracyPoint]) -> list[str]:
    notes = []
    for task in TASKS:
        for ratio in RATIOS:
            pair = compare(find(points, task, HEAD, ratio), find(points, task, UNIFORM, ratio))
            one, other = _share(points, task, HEAD, ratio), _share(points, task, UNIFORM, ratio)
            if pair is None or one is None or other is None:
                continue
            gain = 100 * (one.value - other.value)
            if ratio in TESTED:
                notes.append(
                    f"{task} at {100 * ratio:g} %: head-level {100 * one.value:.1f} %, uniform {100 * other.value:.1f} % "
                    f"({gain:+.1f} points; {pair.only_first} problems solved by head-level alone, {pair.only_second} by uniform "
                    f"alone of {pair.n}; exact McNemar test {_p_value(pair)})."
                )
            elif gain < 0:
                notes.append(
                    f"{task} at {100 * ratio:g} %: uniform is ahead by {-gain:.1f} points (exact McNemar test {_p_value(pair)})."
                )
    return notes


def _match_notes(points: Sequence[AccuracyPoint]) -> list[str]:
    """The paper's halving: head-level at 10 % against uniform at 20 %."""
    notes = []
    for task in TASKS:
        pair = compare(find(points, task, HEAD, TESTED[0]), find(points, task, UNIFORM, TESTED[1]))
        one, other = _share(points, task, HEAD, TESTED[0]), _share(points, task, UNIFORM, TESTED[1])
        if pair is not None and one is not None and other is not None:
            notes.append(
                f"{task}: head-level at 10 % {100 * one.value:.1f} %, uniform at 20 % {100 * other.value:.1f} % "
                f"(exact McNemar test {_p_value(pair)}); the paper has the two equal on GSM8K."
            )
    return notes


def _p_value(pair: Discordance) -> str:
    return f"p = {pair.p_value:.2g}" if pair.p_value >= 1e-4 else "p < 0.0001"


def _text(point: AccuracyPoint | None) -> str:
    share = point.share() if point is not None else None
    return "-" if share is None else f"{100 * share.value:.1f} ({100 * share.low:.1f} to {100 * share.high:.1f})"


def _share(points: Sequence[AccuracyPoint], task: str, selection: str, ratio: float) -> Share | None:
    point = find(points, task, selection, ratio)
    return None if point is None else point.share()
