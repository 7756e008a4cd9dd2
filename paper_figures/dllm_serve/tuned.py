"""dLLM-Serve tuned: every system as printed, and with its free knobs searched."""

from paper_figures.common.caption import dataset_title, obtained_text, prompt_sources
from paper_figures.common.figure import Page, Picture, Table, cell_by_cell
from paper_figures.common.panel import Axis, Bars, Guide, Layer, Panel
from paper_figures.common.runs import Measure, Runs
from paper_figures.common.words import ends, said
from paper_figures.dllm_serve.comparison import BASELINES, CONTENDERS, DATASETS, contender_knobs, look_of, system_of
from paper_figures.dllm_serve.curve import LONGEST_WAIT, MEAN_LATENCY, THROUGHPUT
from paper_figures.dllm_serve.layout import SIMULATED_RUNS, all_valid, compared_figure
from repro.reports.figures import TASKS, Knobs, Solved, View, configuration_of, solved_by
from repro.runs.cell import Cell
from repro.runs.statistics import Interval
from repro.runs.system import TUNE
from repro.runs.tuning import CANDIDATES, TRIALS

BASE = "fast-dllm"
"""We compare all with it, as printed or tuned like they are. It is the fastest baseline as published, and as accurate as no cache."""
NUM_REQUESTS = {"livebench": 128, "burst": 400, "osc": 400}
"""Several times as many as run at once. A search over the whole traces would take five times as long."""
FORMS = (False, True)
"""Whether a contender is tuned."""
FORM_NAMES = {False: "as printed, our defaults", True: "tuned"}
COLORS = {False: "#B8B8B8", True: "#0072B2"}
BAR_WIDTH = 0.46
RUNNING = Measure(path="mean_running")
Place = tuple[str, str, bool]
"""Data set, contender, and whether it is tuned."""


def cell(view: View, dataset: str, contender: str, is_tuned: bool) -> Cell:
    """Send all requests at once, so that all are saturated."""
    requests: Knobs = () if "num_prompts" in dict(view.knobs) else (("num_prompts", NUM_REQUESTS[dataset]),)
    tune: Knobs = ((TUNE, "search"),) if is_tuned else ()
    knobs = (*requests, *contender_knobs(view, contender), *tune)
    return view.cell(None, system_of(contender), dataset, knobs=knobs)


PLACES: tuple[Place, ...] = tuple(
    (dataset, contender, is_tuned) for dataset in DATASETS for contender in CONTENDERS for is_tuned in FORMS
)


def cells(view: View) -> list[Cell]:
    return cell_by_cell((cell(view, *place) for place in PLACES), view)


def over_base(runs: Runs, dataset: str, contender: str, is_tuned: bool) -> Interval:
    """Return throughput over Fast-dLLM's in the same form, paired by seed."""
    ours, theirs = (cell(runs.view, dataset, name, is_tuned) for name in (contender, BASE))
    return runs.versus(ours, theirs, THROUGHPUT, "ratio")


def gained(runs: Runs, dataset: str, contender: str) -> Interval:
    """Return tuned throughput over that as printed."""
    printed, tuned = (cell(runs.view, dataset, contender, is_tuned) for is_tuned in FORMS)
    return runs.versus(tuned, printed, THROUGHPUT, "ratio")


def chosen(runs: Runs, dataset: str, contender: str) -> str:
    repeats = runs.of(cell(runs.view, dataset, contender, True))
    search = repeats[0].facts.get("tuned") if repeats else None
    if not search:
        return "-"
    setting = " ".join(f"{knob}={value}" for knob, value in search["chosen"].items())
    return setting or ("the defaults" if search["trials"] else "nothing is free")


def solved(view: View, contender: str) -> list[Solved | None]:
    """Return what is solved, by task. Free knobs decide when tokens are made and never which, so both forms answer alike."""
    example = cell(view, DATASETS[0], contender, False)
    configuration = configuration_of(example.system, example.knob_values)
    return [None if configuration is None else solved_by(configuration, task) for task in TASKS]


def page(runs: Runs) -> Page:
    about = (
        f"Tuned: the free knobs (docs/tuning.md) of every system set by one search of up to {CANDIDATES} candidates and {TRIALS} simulated "
        "trials on other seeds, for most tokens/s; they decide when tokens are made and never which, so it answers as it does as printed."
    )
    return Page(
        csv=csv_of(runs),
        picture=Picture(
            panels=[panel(runs, dataset, is_absolute) for dataset in DATASETS for is_absolute in (True, False)],
            columns=2,
            caption=[about, prompt_sources(runs.all), *conclusions(runs)],
            repeats="",
            after_title="; all requests at once",
        ),
        notes=[*conclusions(runs), about],
    )


def panel(runs: Runs, dataset: str, is_absolute: bool = False) -> Panel:
    """Draw throughput, or the ratio to Fast-dLLM for the panel below it."""
    layers: list[Layer] = []
    for side, is_tuned in zip((-1, 1), FORMS, strict=True):
        intervals = [
            runs.at(cell(runs.view, dataset, contender, is_tuned), THROUGHPUT)
            if is_absolute
            else over_base(runs, dataset, contender, is_tuned)
            for contender in CONTENDERS
        ]
        bars = Bars(
            label=FORM_NAMES[is_tuned],
            places=[place + side * BAR_WIDTH / 2 for place in range(len(CONTENDERS))],
            at=intervals,
            width=BAR_WIDTH,
            capsize=2,
            color=COLORS[is_tuned],
            is_numbered=True,
        )
        layers.append(bars)
    names = [look_of(contender).title.replace(" with ", "\n").replace("-", "-\n") for contender in CONTENDERS]
    label = "throughput (tok/s)" if is_absolute else "relative to Fast-dLLM (x)"
    return Panel(
        title=dataset_title(dataset),
        layers=layers if is_absolute else [*layers, Guide(value=1)],
        x=Axis(ticks=range(len(CONTENDERS)), names=names),
        y=Axis(label=label, better="higher", margin=0.12),
    )


def csv_of(runs: Runs) -> Table:
    rows = []
    for dataset, contender, is_tuned in PLACES:
        point = cell(runs.view, dataset, contender, is_tuned)
        repeats = runs.of(point)
        answers = [
            (None,) * 3 if each is None else (each.share, each.low, each.high) for each in solved(runs.view, contender)
        ]
        rows.append(
            (
                *(runs.view.platform.name, runs.view.reading if contender in BASELINES else None, dataset, contender),
                *(is_tuned, chosen(runs, dataset, contender) if is_tuned else None),
                *(runs.at(point, measure).mean for measure in (THROUGHPUT, MEAN_LATENCY, LONGEST_WAIT, RUNNING)),
                *ends(over_base(runs, dataset, contender, is_tuned)),
                *(ends(gained(runs, dataset, contender)) if is_tuned else (None,) * 3),
                *(number for answer in answers for number in answer),
                *(len(repeats), obtained_text(repeats), all_valid(repeats)),
            )
        )
    return Table(
        columns=(
            *("platform", "reading", "dataset", "system", "is_tuned", "chosen"),
            *("throughput_tok_s", "mean_latency_s", "longest_wait_s", "mean_running"),
            *(f"{name}{end}" for name in ("of_fast_dllm", "of_as_printed") for end in ("", "_low", "_high")),
            *(f"{task}{end}" for task in TASKS for end in ("", "_low", "_high")),
            *("num_runs", "obtained", "valid"),
        ),
        rows=rows,
    )


def conclusions(runs: Runs) -> list[str]:
    """Compare by data set, as printed and tuned, and tell what tuning alone gives."""
    notes = []
    for dataset in DATASETS:
        ratios, alone = [], []
        for contender in CONTENDERS:
            title = look_of(contender).title
            if contender != BASE:
                both = " -> ".join(said(over_base(runs, dataset, contender, is_tuned), "x", 2) for is_tuned in FORMS)
                ratios.append(f"{title} {both}")
            alone.append(
                f"{title} {said(gained(runs, dataset, contender), 'x', 2)} ({chosen(runs, dataset, contender)})"
            )
        title = dataset_title(dataset)
        notes.append(f"{title}, throughput over Fast-dLLM's, as printed -> tuned: {'; '.join(ratios)}.")
        notes.append(f"{title}, tuned over as printed: {'; '.join(alone)}.")
    return notes


FIGURE = compared_figure(
    "tuned",
    "this project; what dLLM-Serve §6.1 and Table 3 leave open",
    platforms=("rtx4090", "l40s"),
    page=page,
    cells=cells,
    decides_on=(),
    num_runs=SIMULATED_RUNS,
)
