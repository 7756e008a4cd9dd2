"""All readings of the baselines beside dLLM-Serve, saturated, in one view; no figure of the paper."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from paper_figures.common import style
from paper_figures.common.caption import (
    figure_title,
    how_obtained,
    invalid_notes,
    missing_note,
    obtained_text,
    prompt_sources,
    require_runs,
    seeds_sentence,
    validity_text,
)
from paper_figures.common.curve import FOLLOWS_LOAD, dataset_title
from paper_figures.common.repeats import Repeats
from paper_figures.common.table import save_table
from paper_figures.dllm_serve.comparison import BASELINES, DATASETS, OURS
from paper_figures.dllm_serve.fig3 import paper_peaks
from paper_figures.dllm_serve.table4 import PAPER_PLATFORM as TABLE_4_PLATFORM
from paper_figures.dllm_serve.table4 import paper_rows
from repro.reports.claims import Finding
from repro.reports.figures import Knobs, Rendered, View
from repro.runs.cell import Cell
from repro.runs.store import StoredRun, over_repeats
from repro.systems.platforms import Platform

if TYPE_CHECKING:
    from matplotlib.axes import Axes

NAME = "readings"
TITLE = "dLLM-Serve readings: every baseline in every reading and batch rule"
SOURCE = "this project"
PLATFORMS = ("rtx4090", "l40s")
DECIDES_ON: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Engine:
    """dLLM-Serve, whose two settings everything is held against."""

    label: str
    line: str
    knobs: Knobs = ()


@dataclass(frozen=True, kw_only=True)
class Setting:
    """How a baseline batches: a reading, and within it a rule."""

    label: str
    knobs: Knobs

    def knobs_of(self, system: str) -> Knobs:
        """Published Sparse-dLLM serves one request at a time and heeds no rule."""
        if system == "sparse-dllm" and ("reading", "published") in self.knobs:
            return (("reading", "published"),)
        return self.knobs


ENGINES = (
    Engine(label="dLLM-Serve, two refreshes per block (as published)", line="-"),
    Engine(label="dLLM-Serve, one refresh per block", line="--", knobs=(("refresh_delay", 0),)),
)
PUBLISHED: Knobs = (("reading", "published"),)
SETTINGS = (
    Setting(label="published, batch of one", knobs=(*PUBLISHED, ("batch_rule", "one"))),
    Setting(label="published, for max_model_len", knobs=(*PUBLISHED, ("batch_rule", "max_model_len"))),
    Setting(label="published, for the workload", knobs=PUBLISHED),
    Setting(label="efficient, for the workload", knobs=(("reading", "efficient"),)),
    Setting(label="policy, packed", knobs=(("reading", "policy"),)),
)
"""Ordered from published code with the least memory to the baseline's rule on dLLM-Serve's own engine."""
PAPER = "as the paper prints"

CSV_COLUMNS = (
    "platform",
    "dataset",
    "system",
    "setting",
    "batch_size",
    "rate_req_s",
    "throughput_tok_s",
    "mean_latency_s",
    "of_dllm_serve",
    "of_single_refresh",
    "paper_throughput_tok_s",
    "num_runs",
    "obtained",
    "valid",
)
TABLE_COLUMNS = (
    "dataset",
    "baselines",
    *(style.system_look(system).title for system in BASELINES),
    "dLLM-Serve",
    "over best",
    "one refresh",
    "over best",
    "valid",
)

Found = dict[tuple[str, str, str], tuple[StoredRun, ...]]
"""(data set, system, label of the engine or setting) -> repeats."""


def cells(view: View) -> list[Cell]:
    """Every system in every setting at the platform's highest rate; Figure 3 and Table 4 share some of the runs."""
    grid = [
        cell
        for dataset in DATASETS
        for cell in (
            *(_cell(view, dataset, OURS, engine.knobs) for engine in ENGINES),
            *(
                _cell(view, dataset, system, setting.knobs_of(system))
                for system in BASELINES
                for setting in SETTINGS
                if _can_run(view, system, setting)
            ),
        )
    ]
    repeated = [cell for each in grid for cell in _seeds(each, view)]
    return list({cell.key: cell for cell in repeated}.values())


def render(runs: Sequence[StoredRun], view: View, out: Path) -> Rendered:
    require_runs(NAME, runs, view.platform)
    found = runs_by_setting(runs, view)
    printed = paper_throughputs(view.platform)
    stem = f"{NAME}-{view.stem}"
    missing = [
        f"{dataset_title(d)} {style.system_look(s).title} {label}" for (d, s, label), own in found.items() if not own
    ]
    notes = [
        *gain_notes(found),
        *load_notes(found, view),
        *invalid_notes(runs),
        *missing_note(missing, len(found)),
        *how_obtained(runs, ["runs"] * len(runs)),
        f"All at {max(view.dllm.rates):g} req/s. In brackets: members of a static batch; without, packed steps. "
        "published: batches that published code's memory holds, and its copies of logits; efficient: our code, static "
        "batches; policy: the baseline's cache policy on dLLM-Serve's engine.",
        prompt_sources(runs),
        seeds_sentence(runs),
    ]
    files = _draw(found, printed, runs, view, out, stem)
    table = save_table(
        out,
        stem,
        title=f"{TITLE} - {view.platform.title}, {max(view.dllm.rates):g} req/s, tok/s",
        columns=TABLE_COLUMNS,
        rows=[_table_row(found, dataset, setting) for dataset in DATASETS for setting in SETTINGS],
        notes=notes,
        csv_columns=CSV_COLUMNS,
        csv_rows=_csv_rows(found, printed, view),
    )
    return Rendered(files=(*files, *table.files), columns=table.columns, rows=table.rows, notes=table.notes)


def findings(runs: Sequence[StoredRun], view: View) -> list[Finding]:
    """No claim of the paper rests on it."""
    return []


def runs_by_setting(runs: Sequence[StoredRun], view: View) -> Found:
    repeats = Repeats(runs, view)
    found: Found = {}
    for dataset in DATASETS:
        for engine in ENGINES:
            found[dataset, OURS, engine.label] = repeats.of(_cell(view, dataset, OURS, engine.knobs))
        for system in BASELINES:
            for setting in SETTINGS:
                if _can_run(view, system, setting):
                    knobs = setting.knobs_of(system)
                    found[dataset, system, setting.label] = repeats.of(_cell(view, dataset, system, knobs))
    return found


def throughput(found: Found, dataset: str, system: str, label: str) -> float | None:
    """Mean over repeats."""
    return over_repeats(found.get((dataset, system, label), ()), "throughput_tok_s").mean


def best_baseline(found: Found, dataset: str, setting: Setting) -> float | None:
    """Throughput of the fastest."""
    values = [value for system in BASELINES if (value := throughput(found, dataset, system, setting.label)) is not None]
    return max(values, default=None)


def gain(found: Found, dataset: str, engine: Engine, setting: Setting) -> float | None:
    """Throughput of dLLM-Serve over that of the fastest baseline."""
    own, best = throughput(found, dataset, OURS, engine.label), best_baseline(found, dataset, setting)
    return own / best if own is not None and best else None


def gain_notes(found: Found) -> list[str]:
    """What the view shows, in words: the range over the data sets, by setting."""
    notes = []
    for engine in ENGINES:
        texts = []
        for setting in SETTINGS:
            gains = [value for dataset in DATASETS if (value := gain(found, dataset, engine, setting)) is not None]
            if gains:
                texts.append(f"{min(gains):.2f} to {max(gains):.2f}x ({setting.label})")
        if texts:
            notes.append(f"{engine.label}, over the fastest baseline: {'; '.join(texts)}.")
    return notes


def offered_tok_s(view: View) -> float:
    """Tokens per second that arrive."""
    return max(view.dllm.rates) * view.dllm.gen_length


def load_notes(found: Found, view: View) -> list[str]:
    """Names the points that are not saturated: the arrivals hold them back, and they would be ahead by more."""
    offered = offered_tok_s(view)
    points = [
        f"{dataset_title(dataset)} {label if system == OURS else f'{style.system_look(system).title} {label}'}"
        for dataset, system, label in found
        if (value := throughput(found, dataset, system, label)) is not None and value >= FOLLOWS_LOAD * offered
    ]
    if not points:
        return []
    return [
        f"Within {100 * (1 - FOLLOWS_LOAD):.0f} % of the {offered:g} tok/s that arrive, so not saturated: {'; '.join(points)}."
    ]


def paper_throughputs(platform: Platform) -> dict[tuple[str, str], float]:
    """(data set, system) -> tok/s: Table 4 on its card, the peaks of Figure 3 on the other."""
    if platform.name == TABLE_4_PLATFORM:
        return {key: float(row["throughput_tok_s"]) for key, row in paper_rows().items()}
    return {(value.dataset, value.system): value.value for value in paper_peaks(platform)}


def _can_run(view: View, system: str, setting: Setting) -> bool:
    """dLLM-Cache's policy can only be simulated."""
    return view.obtained == "simulated" or system != "dllm-cache" or ("reading", "policy") not in setting.knobs


def _cell(view: View, dataset: str, system: str, knobs: Knobs) -> Cell:
    return view.cell(NAME, system, dataset, rate=max(view.dllm.rates), knobs=knobs)


def _seeds(cell: Cell, view: View) -> list[Cell]:
    return [replace(cell, seed=seed) for seed in view.seeds]


# -- drawing ----------------------------------------------------------------------------------------------


def _draw(
    found: Found, printed: dict[tuple[str, str], float], runs: Sequence[StoredRun], view: View, out: Path, stem: str
) -> tuple[Path, Path, Path]:
    labels = [*([PAPER] if printed else []), *(setting.label for setting in SETTINGS)]
    with style.drawing():
        figure, panels = style.row_of_panels([dataset_title(dataset) for dataset in DATASETS])
        for axes, dataset in zip(panels, DATASETS, strict=True):
            _draw_panel(axes, found, printed, dataset, labels)
            if axes.get_xlim()[1] > (offered := offered_tok_s(view)):
                axes.axvline(
                    offered, linestyle=":", linewidth=1, color=style.GUIDE_COLOR, label="offered load", zorder=1
                )
        panels[0].set_yticks(range(len(labels)), labels)
        for axes in panels[1:]:
            axes.set_yticks(range(len(labels)), [""] * len(labels))
        title = f"{figure_title(TITLE, runs, view)}, {max(view.dllm.rates):g} req/s"
        sentences = [*how_obtained(runs, ["runs"] * len(runs)), f"{prompt_sources(runs)} {seeds_sentence(runs)}"]
        return style.publish(figure, panels, out, stem, title=title, caption=sentences)


def _draw_panel(
    axes: Axes, found: Found, printed: dict[tuple[str, str], float], dataset: str, labels: Sequence[str]
) -> None:
    """A row a setting, the paper's first; throughput to the right."""
    own = style.system_look(OURS)
    for engine in ENGINES:
        if (value := throughput(found, dataset, OURS, engine.label)) is not None:
            axes.axvline(value, linestyle=engine.line, linewidth=1.4, color=own.color, label=engine.label, zorder=1)
    for system in BASELINES:
        look = style.system_look(system)
        points = [
            (value, labels.index(setting.label))
            for setting in SETTINGS
            if (value := throughput(found, dataset, system, setting.label)) is not None
        ]
        axes.plot(
            *(zip(*points, strict=True) if points else ([], [])),
            linewidth=0.7,
            marker=look.marker,
            color=look.color,
            label=look.title,
            zorder=3,
        )
    for system in (OURS, *BASELINES):
        if (value := printed.get((dataset, system))) is not None:
            look = style.system_look(system)
            style.paper_marker(
                axes, value, labels.index(PAPER), color=look.color, marker=look.marker, label=f"{look.title} (paper)"
            )
    for row in range(len(labels)):
        axes.axhline(row, linewidth=0.4, color=style.GUIDE_COLOR, alpha=0.5, zorder=0)
    axes.set_xlim(left=0)
    axes.set_ylim(len(labels) - 0.5, -0.5)
    axes.set_xlabel("throughput (tok/s)")


# -- table and CSV ----------------------------------------------------------------------------------------


def _table_row(found: Found, dataset: str, setting: Setting) -> tuple[str, ...]:
    own = [run for system in BASELINES for run in found.get((dataset, system, setting.label), ())]
    ours = [run for engine in ENGINES for run in found[dataset, OURS, engine.label]]
    return (
        dataset_title(dataset),
        setting.label,
        *(_baseline_text(found, dataset, system, setting) for system in BASELINES),
        *(
            text
            for engine in ENGINES
            for text in (
                _text(throughput(found, dataset, OURS, engine.label)),
                _text(gain(found, dataset, engine, setting), "{:.2f}x"),
            )
        ),
        validity_text([*own, *ours]),
    )


def _baseline_text(found: Found, dataset: str, system: str, setting: Setting) -> str:
    own = found.get((dataset, system, setting.label), ())
    sizes = _batch_sizes(own)
    return _text(throughput(found, dataset, system, setting.label)) + (f" ({sizes})" if sizes else "")


def _batch_sizes(runs: Sequence[StoredRun]) -> str:
    return " or ".join(map(str, sorted({size for run in runs if (size := run.facts.get("batch_size")) is not None})))


def _csv_rows(found: Found, printed: dict[tuple[str, str], float], view: View) -> list[tuple[object, ...]]:
    rows: list[tuple[object, ...]] = []
    for (dataset, system, label), own in found.items():
        value = throughput(found, dataset, system, label)
        ours = [throughput(found, dataset, OURS, engine.label) for engine in ENGINES]
        rows.append(
            (
                view.platform.name,
                dataset,
                system,
                label,
                _batch_sizes(own),
                max(view.dllm.rates),
                value,
                over_repeats(own, "e2el_s", "mean").mean,
                *(value / each if value is not None and each else None for each in ours),
                printed.get((dataset, system)),
                len(own),
                obtained_text(own),
                all(run.validity.valid for run in own),
            )
        )
    return rows


def _text(value: float | None, form: str = "{:.1f}") -> str:
    return "-" if value is None else form.format(value)
