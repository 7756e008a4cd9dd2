"""``repro ablate``: one component on and off, all else equal."""

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, NamedTuple

from engines.errors import require
from engines.knobs import Checked, Range
from repro.cli import options as opt
from repro.cli.output import number, print_json, print_table, ratio, say
from repro.cli.plots import check_plot, save_plot
from repro.cli.run_table import lengths_json, lengths_line, provenance_of
from repro.cli.sweep import require_alike, run_sweep, say_what_ran, say_what_runs, sweep_of, with_common_search
from repro.families.platforms import DllmPart, Platform, PrefillPart
from repro.families.platforms import platform as platform_of
from repro.files import read_yaml
from repro.reports.figures import View, default_reading
from repro.runs.cell import Cell
from repro.tasks.registry import TASKS

if TYPE_CHECKING:
    from repro.reports.ablation import Variant
    from repro.runs.store import StoredRun

Row = dict[str, Any]
Runs = Sequence["StoredRun"]
Columns = Mapping[str, Callable[[Row], str]]


@dataclass(frozen=True, kw_only=True)
class AblationOptions(Checked):
    panel: ClassVar[str] = opt.WHAT
    component: str
    """The component to switch: engine, scheduler, budgeting, sparsity or refresh; ladder switches all, one by one. For AMPD: routing or
    reordering. For LAPS: graphs, disaggregation, awd or reserve."""
    variant: list[str] | None = None
    """A policy of your own as one more variant: module:NAME, or module:NAME@name=value,... to set its knobs; several times."""
    dataset: list[str] | None = None
    """Data set to run on; several times [default: livebench, burst, osc; dureader, gaia for AMPD; lmsys-chat-1m for LAPS]."""
    platform: str | None = None
    """A platform of 'repro list', or a card's YAML file, to run on [default: cpu-tiny, h20x32 for AMPD, h200 for LAPS]."""
    reading: str | None = None
    """Reading of Sparse-dLLM: published, efficient or policy [default: published where simulated, else efficient]."""
    request_rate: str | None = None
    """Requests/s, or inf for all at once [default: the platform's highest rate, 2 for AMPD, 60 for LAPS]."""
    num_runs: Annotated[int, Range(1, 1000)] | None = None
    """Repeats, with seeds 0, 1, ... [default: 5 if measured, 10 on clusters, else 1]."""
    limit: Annotated[int, Range(0, 10**5)] | None = None
    """Problems per task, if variants are measured and commit different tokens; 0 skips accuracy [default: 200]."""
    model: str | None = None
    """Model for AMPD and LAPS [default: Llama-3.1-70B, Qwen2.5-14B]."""

    def refuse(self, *names: str, why: str = "") -> None:
        """Refuse options that have no effect on the chosen component."""
        for name in names:
            value = getattr(self, name)
            require(value is None, f"{name}={value!r} has no effect on component={self.component!r}{why}: leave it out")

    def own_variants(self) -> "list[Variant]":
        from repro.reports.ablation import own_variant

        policies = [text.partition("@") for text in dict.fromkeys(self.variant or ())]
        return [
            own_variant(self.component, name, opt.parse_knobs(knobs.split(",") if knobs else (), {}))
            for name, _, knobs in policies
        ]

    def rate(self, default: float) -> float | None:
        return default if self.request_rate is None else opt.parse_rate(self.request_rate)


@dataclass(frozen=True, kw_only=True)
class Study:
    """A component's variants on data sets, and which numbers of their runs we show."""

    platform: Platform
    title: str
    """The platform's name above the table."""
    cells: "Mapping[tuple[str, Variant], Sequence[Cell]]"
    """Cells by data set and variant. We compare all variants of a data set with its first one."""
    dataset: str = "dataset"
    """The name of the column of data sets, in the family's own word."""
    said: str
    """Text for the title: the request rate, and which reading the baselines have."""
    about: Mapping[str, Any]
    """Facts that the JSON output holds besides the rows."""
    row: Callable[[Runs, Runs], Row]
    """Returns the numbers of a row, from a variant's runs and those of the first variant."""
    columns: Columns
    """Column -> its text in a row. A column without any text is left out."""
    notes: Callable[[Sequence[Row]], Iterable[str]]
    plotted: Mapping[str, str]
    """Plotted column -> the title of its axis. Each gets a panel."""
    halves: Mapping[str, str]
    """Plotted column -> the column with half the width of its interval."""
    guides: Mapping[str, float] = field(default_factory=dict)
    """Plotted column -> the value that means "no difference", where the plot draws a line."""

    def rows(self, runs: Runs) -> list[Row]:
        """Return a row for each data set and variant; ``runs`` are in the order of ``cells``."""
        remaining, base, label = iter(runs), dict[str, Runs](), dict[str, str]()
        rows = []
        for (dataset, variant), cells in self.cells.items():
            variant_runs = [next(remaining) for _ in cells]
            base_label = label.get(dataset)
            label.setdefault(dataset, variant.label)
            keys = {self.dataset: dataset, "variant": variant.label, "system": variant.system, "ours": variant.is_ours}
            numbers = self.row(variant_runs, base.setdefault(dataset, variant_runs))
            folders = [run.cell.folder_name for run in variant_runs]
            origin = {"num_runs": len(variant_runs), **provenance_of(variant_runs), "run_folders": folders}
            rows.append({**keys, "against": base_label, **numbers, **origin})
        return rows


def ablate(
    *,
    options: AblationOptions,
    knob: opt.KnobTexts = None,
    stored: opt.Stored,
    placement: opt.Placement,
    plot: opt.Plot = None,
    json: opt.Json = False,
) -> None:
    """Compare throughput, latency, memory, concurrency and accuracy with one component on and off."""
    from repro.reports.ablation import system_of

    model = opt.given_options(model=options.model)
    study = STUDIES[system_of(options.component)](options, model | opt.parse_knobs(knob or (), model))
    opened, store = placement.opened(), stored.store
    if plot is not None:
        check_plot(plot)
    with opened as pool:
        varied = dict.fromkeys(name for _, variant in study.cells for name, _ in variant.knobs)
        cells = with_common_search([cell for cells in study.cells.values() for cell in cells], [*varied])
        sweep = sweep_of(cells, store, force=stored.force, pool=pool)
        say_what_runs(sweep)
        outcomes = run_sweep(sweep, jobs=placement.jobs)
    require_alike(sweep.runs, f"ablate --component {options.component}")
    rows = study.rows(sweep.runs)
    title = f"Ablation of {options.component} on {study.title}"
    if json:
        facts = {"component": options.component, "platform": study.platform.name, **study.about}
        print_json({**facts, "lengths": lengths_json(sweep.runs), "rows": rows})
    else:
        _print(study, title, rows, sweep.runs)
    if plot is not None:
        titles = {name: axis for name, axis in study.plotted.items() if any(row[name] is not None for row in rows)}
        plotted = [
            {
                "label": f"{row[study.dataset]}: {row['variant']}",
                **row,
                **{f"{name}_half": row[half] for name, half in study.halves.items()},
            }
            for row in rows
        ]
        files = save_plot(plot, title, plotted, titles, study.guides)
        say(f"files: {', '.join(map(str, files))}", file=sys.stderr)
    say_what_ran(outcomes, store.root)


def _print(study: Study, title: str, rows: Sequence[Row], runs: Runs) -> None:
    columns = {
        study.dataset: [row[study.dataset] for row in rows],
        "variant": [row["variant"] + (" (ours)" if row["ours"] else "") for row in rows],
    }
    for name, text_of in study.columns.items():
        texts = [text_of(row) for row in rows]
        if set(texts) != {"-"}:
            columns[name] = texts
    columns["verdict"] = ["VALID" if row["valid"] else "INVALID" for row in rows]
    print_table(f"{title}, {study.said}", tuple(columns), list(zip(*columns.values(), strict=True)))
    say(lengths_line(runs))
    for note in study.notes(rows):
        say(note)
    for row in rows:
        if row["reasons"]:
            say(f"{row['variant']}: {row['reasons'][0]}")


def difference(low: float | None, high: float | None, neutral: float, words: Sequence[str]) -> str | None:
    """The word for an interval below ``neutral`` (``words[0]``) or above it (``words[1]``), where ``neutral`` means no difference. None without an
    interval."""
    if low is None or high is None:
        return None
    return words[0] if high < neutral else words[1] if low > neutral else "no difference shown"


def _difference_text(row: Row) -> str:
    return "-" if row["against"] is None else row["difference"] or "one repeat"


def _paired_notes(rows: Sequence[Row], column: str, neutral: int = 0) -> Iterator[str]:
    """Yield how variants were compared with the first: ``column`` names the column, and ``neutral`` is its value if nothing differs."""
    repeats = max(row["num_runs"] for row in rows)
    if repeats < 2:
        yield "one repeat has no interval, and says little of what another seed would give: add --num-runs 5"
        return
    first = ", ".join(dict.fromkeys(row["against"] for row in rows if row["against"] is not None))
    if first:
        yield (
            f"{column}: against {first}, paired by seed, with 95 % intervals over {repeats} repeats; an interval that holds {neutral} "
            "shows no difference"
        )


# -- AMPD and LAPS ----------------------------------------------------------------------------------------


class Number(NamedTuple):
    """A metric of the runs, or a ``part`` of it. Its mean is the value ``name`` of a row and goes to the column ``title``."""

    name: str
    title: str
    metric: str
    part: str | None = None
    digits: int = 1
    scale: float = 1.0


class PairedShare(NamedTuple):
    """How we compare the variants of a cluster's component with the first one: by a share, seed by seed, in points."""

    metric: str
    title: str
    words: Sequence[str]
    """Verdicts for a variant with a smaller share, and with a larger one."""
    numbers: Sequence[Number]
    rate: float
    """The rate if none is given, in ``unit`` per second."""
    unit: str
    plotted: Mapping[str, str]
    """Like ``Study.plotted``."""
    dataset: str = "dataset"
    facts: Sequence[str] = ()
    """Facts of the runs that rows hold besides."""
    uses_invalid: bool = False
    """Whether INVALID runs count too. Some of them show that a policy never ends."""

    def row(self, runs: Runs, base: Runs) -> Row:
        from repro.runs.statistics import mean_interval

        used = [run for run in runs if self.uses_invalid or run.validity.valid]
        share = mean_interval([run.summary[self.metric] for run in used if run.summary[self.metric] is not None])
        added = mean_interval(
            [
                100 * (run.summary[self.metric] - other.summary[self.metric])
                for run, other in zip(runs, base, strict=True)
                if self.uses_invalid or (run.validity.valid and other.validity.valid)
            ]
        )
        row: Row = {
            self.metric: share.mean,
            "half_width": share.half_width,
            "added_points": added.mean,
            "added_half_width": added.half_width,
            "difference": difference(added.low, added.high, 0, self.words),
        }
        for column in self.numbers:
            values = [run.summary[column.metric] for run in used if run.summary[column.metric] is not None]
            samples = [value if column.part is None else value[column.part] for value in values]
            row[column.name] = mean_interval([value for value in samples if value is not None]).mean
        return row | {name: runs[0].facts[name] for name in self.facts}

    def columns(self) -> Columns:
        def text(column: Number) -> Callable[[Row], str]:
            return lambda row: number(row[column.name], column.digits, scale=column.scale)

        return {
            self.title: lambda row: number(row[self.metric], scale=100, half_width=row["half_width"]),
            "added, points": lambda row: number(row["added_points"], half_width=row["added_half_width"]),
            "difference": _difference_text,
            **{column.title: text(column) for column in self.numbers},
        }


def _paired_share(system: str) -> PairedShare:
    settings = read_yaml(Path(__file__).with_suffix(".yaml"))[system]
    return PairedShare(**settings | {"numbers": [Number(**row) for row in settings["numbers"]]})


AMPD, LAPS = map(_paired_share, ("ampd", "laps"))


def _ampd_study(options: AblationOptions, knobs: Mapping[str, Any]) -> Study:
    platform = platform_of(options.platform or "h20x32")
    return _paired_study(AMPD, options, knobs, platform, platform.cluster_title, ("dureader", "gaia"), "all at once")


def _laps_study(options: AblationOptions, knobs: Mapping[str, Any]) -> Study:
    platform = platform_of(options.platform or "h200")
    part = platform.part(PrefillPart)
    return _paired_study(LAPS, options, knobs, platform, part.title, (part.dataset,), f"{part.clients} clients")


def _paired_study(
    share: PairedShare,
    options: AblationOptions,
    knobs: Mapping[str, Any],
    platform: Platform,
    title: str,
    datasets: Sequence[str],
    at_once: str,
) -> Study:
    """``at_once`` is the text for who sends requests if there is no rate."""
    from repro.reports.ablation import paired_cells

    options.refuse("reading", "limit")
    # One seed says too little.
    seeds, names = range(options.num_runs or 10), options.dataset or datasets
    rate = options.rate(share.rate)
    return Study(
        platform=platform,
        title=title,
        cells=paired_cells(options.component, platform, names, rate, seeds, knobs, options.own_variants()),
        dataset=share.dataset,
        said=at_once if rate is None else f"{rate:g} {share.unit}{'' if rate == 1 else 's'}/s",
        about={"rate": rate},
        row=share.row,
        columns=share.columns(),
        notes=lambda rows: _paired_notes(rows, "added"),
        plotted=share.plotted,
        halves={share.metric: "half_width"},
    )


# -- dLLM-Serve -------------------------------------------------------------------------------------------

NUM_PROBLEMS = 200
"""Problems of a task if no limit is given."""
MEASURED_RUNS = 5
"""Default repeats. With 3 repeats, an interval is 2.5 times as wide as the spread of ratios (t = 4.3); with 5 repeats, 1.2 times."""
WORDS = ("slower", "faster")
DLLM_COLUMNS: Columns = {
    "tok/s": lambda row: _speed_text(row),
    "relative": lambda row: _ratio_text(row, "relative"),
    "difference": _difference_text,
    "tok/CPU s": lambda row: number(row["tokens_per_processor_s"]),
    "relative, CPU s": lambda row: _ratio_text(row, "relative_processor"),
    "mean s": lambda row: number(row["mean_latency_s"], 2),
    "p99 s": lambda row: number(row["p99_latency_s"], 2),
    "running": lambda row: number(row["mean_running"]),
    "KV rows": lambda row: "-" if row["kv_rows"] is None else f"{row['kv_rows']:,}",
    "accuracy": lambda row: "-" if row["accuracy"] is None else f"{100 * row['accuracy']:.1f} %",
    "obtained": lambda row: row["obtained"],
}


def _dllm_study(options: AblationOptions, knobs: Mapping[str, Any]) -> Study:
    from repro.reports.ablation import BASE, variants_of

    options.refuse("model")
    platform = platform_of(options.platform or "cpu-tiny")
    part, component = platform.part(DllmPart), options.component
    view = View(
        platform=platform,
        reading=default_reading(platform) if options.reading is None else options.reading,  # type: ignore[arg-type]
        num_runs=options.num_runs or (MEASURED_RUNS if platform.executor != "roofline" else 1),
        knobs=tuple(knobs.items()),
    )
    _check_varied(component, variants_of(component, view), knobs)
    variants = (*variants_of(component, view), *options.own_variants())
    has_baseline = any(variant.system == BASE for variant in variants)
    if not has_baseline:
        options.refuse("reading", why=", which compares with no baseline")
    rate = options.rate(max(part.rates))
    datasets = dict.fromkeys([*(options.dataset or part.num_requests), *_graded_tasks(options, platform)])
    problems = NUM_PROBLEMS if options.limit is None else options.limit
    return Study(
        platform=platform,
        title=platform.title,
        cells={
            (name, variant): _cells(variant, view, name, rate, component, problems)
            for name in datasets
            for variant in variants
        },
        said=("all at once" if rate is None else f"{rate:g} req/s")
        + (f", Sparse-dLLM as {view.reading}" if has_baseline else ""),
        about={"reading": view.reading if has_baseline else None},
        row=_dllm_row,
        columns=DLLM_COLUMNS,
        notes=_dllm_notes,
        plotted={
            "throughput_tok_s": "throughput (tok/s)",
            "relative": "relative throughput",
            "relative_processor": "relative, per processor second",
            "mean_latency_s": "mean latency (s)",
        },
        halves={"throughput_tok_s": "throughput_half_width"},
        guides={"relative": 1, "relative_processor": 1},
    )


STUDIES: Mapping[str, Callable[[AblationOptions, Mapping[str, Any]], Study]] = {
    "dllm-serve": _dllm_study,
    "ampd": _ampd_study,
    "laps": _laps_study,
}


def _check_varied(component: str, variants: "Sequence[Variant]", knobs: Mapping[str, Any]) -> None:
    """Refuse a knob, or a preset that sets it, if the component varies it: the variant labelled as without it would have it."""
    from engines.dllm.method import PRESETS

    varied = {name for variant in variants for name, _ in variant.knobs}
    for name, value in knobs.items():
        names = [name] if name != "preset" else [knob for knob in PRESETS.get(str(value), {}) if knob in varied]
        for knob in names:
            subject = f"{name}={value!r}" + ("" if knob == name else f" sets {knob}, which")
            require(
                knob not in varied,
                f"{subject} is what component={component!r} varies: leave it out"
                + ("" if knob == name else ", or give its other knobs one by one"),
            )


def _graded_tasks(options: AblationOptions, platform: Platform) -> Sequence[str]:
    """Return the generated tasks if variants commit different tokens and are measured, else nothing."""
    from repro.reports.ablation import CHANGES_TOKENS

    has_tasks = options.component in CHANGES_TOKENS and platform.executor == "torch"
    if not has_tasks:
        options.refuse("limit", why=f" of platform={platform.name!r}, where nothing is graded")
    return [entry.name for entry in TASKS.values() if entry.is_generated and has_tasks and options.limit != 0]


def _cells(variant: "Variant", view: View, name: str, rate: float | None, component: str, problems: int) -> list[Cell]:
    if name in TASKS and TASKS[name].is_generated:
        cells = [variant.cell(view, name, None, seed) for seed in view.seeds]
        cells = [replace(cell, knobs=(*cell.knobs, ("num_prompts", problems))) for cell in cells]
    else:
        cells = [variant.cell(view, name, rate, seed, f"ablate-{component}") for seed in view.seeds]
    return [view.applied(cell) for cell in cells]


def _dllm_row(runs: Runs, base: Runs) -> Row:
    from repro.runs.statistics import mean_interval
    from repro.runs.store import by_seed, over_repeats

    throughput = over_repeats(runs, "throughput_tok_s")
    speeds, first = (by_seed(group, lambda run: run.summary["throughput_tok_s"]) for group in (runs, base))
    per_processor_s, first_s = (by_seed(group, lambda run: run.tokens_per_processor_s) for group in (runs, base))
    return {
        "throughput_tok_s": throughput.mean,
        "throughput_half_width": throughput.half_width,
        "throughput_by_seed": speeds,
        **_relative_row(speeds, first, "relative", "difference"),
        "tokens_per_processor_s": mean_interval(list(per_processor_s.values())).mean,
        **_relative_row(per_processor_s, first_s, "relative_processor", "difference_processor"),
        "mean_latency_s": over_repeats(runs, "e2el_s", "mean").mean,
        "p99_latency_s": over_repeats(runs, "e2el_s", "p99").mean,
        "std_latency_s": over_repeats(runs, "e2el_s", "std").mean,
        "mean_running": over_repeats(runs, "mean_running").mean,
        "kv_rows": runs[0].record.manifest.get("facts", {}).get("kv_rows"),
        "accuracy": over_repeats(runs, "accuracy", "value").mean,
    }


def _relative_row(ours: Mapping[int, float], first: Mapping[int, float], name: str, difference_name: str) -> Row:
    """The ratio to the first variant, as the mean over pairs of equal seed, with its interval."""
    from repro.runs.statistics import paired_ratio

    speedup = paired_ratio(ours, first)
    return {
        name: speedup.mean,
        f"{name}_low": speedup.low,
        f"{name}_high": speedup.high,
        difference_name: difference(speedup.low, speedup.high, 1, WORDS),
    }


def _speed_text(row: Row) -> str:
    """The mean speed with its interval. An interval that reaches 0 says nothing, so then we show the slowest and fastest repeat."""
    mean, half = row["throughput_tok_s"], row["throughput_half_width"]
    if half is None or half < mean:
        return number(mean, half_width=half)
    speeds = row["throughput_by_seed"].values()
    return f"{number(mean)} ({number(min(speeds))} to {number(max(speeds))})"


def _ratio_text(row: Row, name: str) -> str:
    return "-" if row["against"] is None else ratio(row[name], row[f"{name}_low"], row[f"{name}_high"])


def _dllm_notes(rows: Sequence[Row]) -> Iterator[str]:
    yield from _paired_notes(rows, "relative", 1)
    if any(row["tokens_per_processor_s"] is not None for row in rows):
        yield "tok/CPU s: tokens for each second of a processor, which other work on the machine changes less than tokens a second"
    differing = [
        f"{row['variant']} on {row['dataset']} ({row['difference_processor']})"
        for row in rows
        if row["against"] is not None and row["difference_processor"] not in (None, row["difference"])
    ]
    if differing:
        yield f"by processor seconds it is otherwise: {', '.join(differing)}"
