"""dLLM-Serve readings: every baseline in every reading and batch rule."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from paper_figures.common.caption import basis_of, dataset_title, obtained_text, origin_of, prompt_sources
from paper_figures.common.figure import Page, Picture, Table, cell_by_cell
from paper_figures.common.panel import Axis, Guide, Layer, Mark, Panel, Points
from paper_figures.common.runs import Runs
from paper_figures.common.style import system_look
from paper_figures.common.words import ends, plural
from paper_figures.dllm_serve.answers import answer_notes
from paper_figures.dllm_serve.comparison import BASELINES, DATASETS, OURS, SYSTEMS
from paper_figures.dllm_serve.curve import FOLLOWS_LOAD, MEAN_LATENCY, THROUGHPUT
from paper_figures.dllm_serve.fig3 import paper_peaks
from paper_figures.dllm_serve.layout import SIMULATED_RUNS, TABLE_4_CARD, all_valid, dllm_figure, table4_rows
from repro.files import read_yaml
from repro.reports.figures import Knobs, View, at_dense_accuracy
from repro.runs.cell import Cell
from repro.runs.statistics import Interval, mean_interval
from repro.runs.store import StoredRun


@dataclass(frozen=True, kw_only=True)
class Setting:
    """How a system runs: one of the settings of dLLM-Serve, with which we compare all others, or a reading of a baseline with its
    batching rule."""

    label: str
    knobs: Knobs = ()
    line: str = "-"
    contender: str = OURS
    """For a setting of dLLM-Serve, the contender whose accuracy it has."""
    is_dense: bool = False
    """Whether each system keeps the fewest rows with which it answers as well as the model without a cache."""

    def knobs_of(self, system: str) -> Knobs:
        """Return the knobs for a system; published Sparse-dLLM serves one request at a time and has no batching rule."""
        base = PUBLISHED if system == "sparse-dllm" and PUBLISHED[0] in self.knobs else self.knobs
        dense_knobs = at_dense_accuracy(self.contender if system == OURS else system).knobs if self.is_dense else ()
        return tuple({**dict(base), **dict(dense_knobs)}.items())


RATIO_COLUMNS = ("of_dllm_serve", "of_single_refresh")
PUBLISHED: Knobs = (("reading", "published"),)
ENGINES, DENSE_ENGINES, SETTINGS = (
    tuple(Setting(**{**row, "knobs": tuple(row.get("knobs", {}).items())}) for row in rows)
    for rows in read_yaml(Path(__file__).with_suffix(".yaml")).values()
)
"""Settings of dLLM-Serve, the same at the accuracy of no cache, and settings of the baselines."""
MEANING = (
    "published: batches that published code's memory holds, and its copies of logits; efficient: our code, static batches; policy: "
    "the baseline's cache policy on dLLM-Serve's engine; as accurate as no cache: each system, dLLM-Serve too, keeps the least with "
    "which the embedded model answers as it does without a cache."
)
PAPER = "as the paper prints"
COLUMNS = 2
"""Panels per row; the first panel of a row names the settings."""
OFF_ROW = 0.26
"""dLLM-Serve's points, and printed values, are shifted by so many rows if they would cover others."""
LOWERED = ("sparse-dllm",)
"""Its printed values lie within a percent of dLLM-Cache's."""
DENSE = SETTINGS[-1]
Place = tuple[str, str, Setting]
"""Data set, system, and how it runs."""


def places(view: View) -> list[Place]:
    """Return every system in every setting on every data set; dLLM-Cache's policy can only be simulated."""
    all_places: list[Place] = []
    for dataset in DATASETS:
        all_places += [(dataset, OURS, engine) for engine in (*ENGINES, *DENSE_ENGINES)]
        all_places += [
            (dataset, system, setting)
            for system in BASELINES
            for setting in SETTINGS
            if view.is_simulated or can_be_measured(system, setting)
        ]
    return all_places


def can_be_measured(system: str, setting: Setting) -> bool:
    return ("batch_rule", "batch") not in setting.knobs and (
        system != "dllm-cache" or ("reading", "policy") not in setting.knobs
    )


def cell(view: View, dataset: str, system: str, how: Setting) -> Cell:
    """Return the cell at the platform's highest rate. Figure 3 and Table 4 share some of the runs."""
    return view.cell(None, system, dataset, rate=max(view.dllm.rates), knobs=how.knobs_of(system))


def cells(view: View) -> list[Cell]:
    return cell_by_cell((cell(view, *place) for place in places(view)), view)


def throughput(runs: Runs, dataset: str, system: str, how: Setting) -> float | None:
    """The mean over repeats; None if the view does not ask for this."""
    is_asked = (dataset, system, how) in places(runs.view)
    return runs.at(cell(runs.view, dataset, system, how), THROUGHPUT).mean if is_asked else None


def engines_beside(setting: Setting) -> tuple[Setting, ...]:
    """The settings of dLLM-Serve that we compare with a setting of the baselines."""
    return DENSE_ENGINES if setting.is_dense else ENGINES


def gain(runs: Runs, dataset: str, engine: Setting, setting: Setting) -> Interval:
    """Return the throughput of dLLM-Serve over that of the baseline with the highest mean."""
    values = {system: throughput(runs, dataset, system, setting) for system in BASELINES}
    known = {system: value for system, value in values.items() if value is not None}
    return over(runs, dataset, engine, max(known, key=known.__getitem__), setting) if known else mean_interval([])


def over(runs: Runs, dataset: str, engine: Setting, system: str, setting: Setting) -> Interval:
    ours, theirs = cell(runs.view, dataset, OURS, engine), cell(runs.view, dataset, system, setting)
    return runs.versus(ours, theirs, THROUGHPUT, "ratio")


def paper_throughputs(view: View) -> dict[tuple[str, str], float]:
    """(data set, system) -> tok/s: Table 4 on its card, the peaks of Figure 3 on the other."""
    if view.platform.name == TABLE_4_CARD:
        return {key: float(row["throughput_tok_s"]) for key, row in table4_rows().items()}
    return {(value.dataset, value.system): value.value for value in paper_peaks(view)}


def page(runs: Runs) -> Page:
    rate, prompts = f"{max(runs.view.dllm.rates):g} req/s", prompt_sources(runs.all)
    return Page(
        table=Table(
            columns=(
                *("platform", "dataset", "system", "setting", "batch_size", "rate_req_s", "throughput_tok_s"),
                *("mean_latency_s", *(f"{name}{end}" for name in RATIO_COLUMNS for end in ("", "_low", "_high"))),
                *("paper_throughput_tok_s", "num_runs", "is_saturated"),
                *("obtained", "valid"),
            ),
            rows=[csv_row(runs, *place) for place in places(runs.view)],
        ),
        picture=Picture(
            panels=[panel(runs, dataset) for dataset in DATASETS],
            caption=[
                f"Means over {plural(runs.view.num_runs, 'seed')}; intervals, of ratios of throughput, are in the table.",
                f"{MEANING[0].upper()}{MEANING[1:]}",
                prompts,
            ],
            repeats="",
            after_title=f", {rate}",
            columns=COLUMNS,
        ),
        notes=[
            *gain_notes(runs),
            *load_notes(runs),
            f"All at {rate}. In brackets: members of a static batch; without, packed steps. {MEANING}",
            prompts,
        ],
    )


def gain_notes(runs: Runs) -> list[str]:
    """Tell the gains in words: the range over the data sets, by setting."""
    notes = []
    for index, engine in enumerate(ENGINES):
        texts = []
        for setting in SETTINGS:
            ours = engines_beside(setting)[index]
            gains = [value for dataset in DATASETS if (value := gain(runs, dataset, ours, setting).mean) is not None]
            if gains:
                texts.append(f"{min(gains):.2f} to {max(gains):.2f}x ({setting.label})")
        if texts:
            notes.append(f"{engine.label}, over the fastest baseline: {'; '.join(texts)}.")
    return notes


def offered_tok_s(view: View) -> float:
    """Tokens per second that arrive."""
    return max(view.dllm.rates) * view.dllm.gen_length


def is_unsaturated(runs: Runs, dataset: str, system: str, how: Setting) -> bool:
    return (throughput(runs, dataset, system, how) or 0.0) >= FOLLOWS_LOAD * offered_tok_s(runs.view)


def load_notes(runs: Runs) -> list[str]:
    """Name the points that are not saturated: arrivals limit them, so they could be ahead by more."""
    offered = offered_tok_s(runs.view)
    points = [
        f"{dataset_title(dataset)} {how.label if system == OURS else f'{system_look(system).title} {how.label}'}"
        for dataset, system, how in places(runs.view)
        if is_unsaturated(runs, dataset, system, how)
    ]
    if not points:
        return []
    return [
        f"Within {100 * (1 - FOLLOWS_LOAD):.0f} % of the {offered:g} tok/s that arrive, so not saturated: {'; '.join(points)}."
    ]


def panel(runs: Runs, dataset: str) -> Panel:
    """Draw a row per setting, the paper's first, with throughput to the right."""
    printed, offered = paper_throughputs(runs.view), offered_tok_s(runs.view)
    rows = [*([PAPER] if printed else []), *(setting.label for setting in SETTINGS)]
    layers: list[Layer] = []
    shown_values = [value for (data, _), value in printed.items() if data == dataset]
    for engine in ENGINES:
        if (value := throughput(runs, dataset, OURS, engine)) is not None:
            color = system_look(OURS).color
            layers.append(
                Guide(
                    value=value,
                    label=engine.label,
                    is_upright=True,
                    linestyle=engine.line,
                    width=1.4,
                    color=color,
                    zorder=1,
                )
            )
            shown_values.append(value)
    for system in BASELINES:
        by_setting = {setting.label: throughput(runs, dataset, system, setting) for setting in SETTINGS}
        known = {label: value for label, value in by_setting.items() if value is not None}
        look, heights = system_look(system), [rows.index(label) for label in known]
        layers.append(
            Points(label=look.title, places=list(known.values()), values=heights, look=replace(look, linestyle="none"))
        )
        shown_values += known.values()
    for system in SYSTEMS:
        if (value := printed.get((dataset, system))) is not None:
            look, height = system_look(system), rows.index(PAPER) + OFF_ROW * (system in LOWERED)
            layers.append(Mark(label=f"{look.title} (paper)", place=value, value=height, look=look, size=7))
    for engine, dense in zip(ENGINES, DENSE_ENGINES, strict=True):
        if (value := throughput(runs, dataset, OURS, dense)) is not None:
            look = replace(system_look(OURS), marker="o" if engine is ENGINES[0] else "P")
            height = rows.index(DENSE.label) + OFF_ROW
            layers.append(Points(label=dense.label, places=[value], values=[height], look=look, width=0))
            shown_values.append(value)
    layers += [Guide(value=row, linestyle="-", width=0.4, opacity=0.5, zorder=0) for row in range(len(rows))]
    if 1.05 * max(shown_values, default=0.0) > offered:
        layers.append(Guide(value=offered, label="offered load", is_upright=True, linestyle=":", zorder=1))
    names = [""] * len(rows) if DATASETS.index(dataset) % COLUMNS else rows
    return Panel(
        title=dataset_title(dataset),
        layers=layers,
        x=Axis(label=THROUGHPUT.label, better=THROUGHPUT.better, limits=(0, None)),
        y=Axis(ticks=range(len(rows)), names=names, limits=(len(rows) - 0.35, -0.6)),
    )


def batch_sizes(runs: Sequence[StoredRun]) -> str:
    """Tell the batch size if it is fixed, or the mean of sizes that differ."""
    sizes = sorted({size for run in runs if (size := run.facts.get("batch_size")) is not None})
    means = [run.facts["batch_ran"]["mean"] for run in runs if run.facts.get("batch_ran")]
    is_by_rule = any(run.cell.knob_values.get("batch_rule") == "batch" for run in runs)
    return f"mean {sum(means) / len(means):.0f}" if is_by_rule and means and not sizes else " or ".join(map(str, sizes))


def csv_row(runs: Runs, dataset: str, system: str, how: Setting) -> tuple[object, ...]:
    view, point = runs.view, cell(runs.view, dataset, system, how)
    repeats, value = runs.of(point), runs.at(point, THROUGHPUT).mean
    ratios = [as_ours(over(runs, dataset, engine, system, how)) for engine in engines_beside(how)]
    return (
        *(view.platform.name, dataset, system, how.label, batch_sizes(repeats), max(view.dllm.rates), value),
        runs.at(point, MEAN_LATENCY).mean,
        *(part for ratio in ratios for part in ratio),
        *(paper_throughputs(view).get((dataset, system)), len(repeats)),
        *(not is_unsaturated(runs, dataset, system, how), obtained_text(repeats), all_valid(repeats)),
    )


def as_ours(over: Interval) -> tuple[float | None, float | None, float | None]:
    """Return the inverse of the ratio."""
    mean, low, high = ends(over)
    return 1 / mean if mean else None, 1 / high if high else None, 1 / low if low else None


FIGURE = dllm_figure(
    "readings",
    "this project",
    platforms=("rtx4090", "l40s"),
    page=page,
    cells=cells,
    decides_on=(),
    num_runs=SIMULATED_RUNS,
    under_title=basis_of,
    origin=lambda runs: [*origin_of(runs), *answer_notes(runs.all)],
)
