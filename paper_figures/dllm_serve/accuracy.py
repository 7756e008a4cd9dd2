"""dLLM-Serve accuracy: problems solved in every configuration that is compared."""

from paper_figures.common.caption import how_obtained, obtained_text, validity_text
from paper_figures.common.figure import Page, Table, cell_by_cell
from paper_figures.common.runs import Runs
from paper_figures.dllm_serve.answers import by_criterion, share, title_of
from paper_figures.dllm_serve.fig6 import GENERATION
from paper_figures.dllm_serve.layout import all_valid, check_answers, dllm_figure
from repro.reports.figures import CONFIGURATIONS, DENSE, TASKS, Configuration, Knobs, View, is_dense
from repro.reports.figures import Table as Solutions
from repro.runs.cell import Cell

NUM_PROBLEMS = 300
STATIC: Knobs = (("stop_at_eos", False),)
"""dLLM-Cache runs in batches that run to their end. Either way, answers end at their end of text."""
PACKED: Knobs = (("reading", "policy"),)
"""Other baselines run on dLLM-Serve's engine, where a policy commits the same tokens as in a batch of one."""
CSV_COLUMNS = (
    *("platform", "contender", "system", "rule", "task", "criterion", "is_strict", "accuracy", "low", "high", "n"),
    *("is_dense", "obtained", "valid", "run_folder"),
)


def cell(view: View, configuration: Configuration, task: str) -> Cell:
    system = configuration.system
    batching: Knobs = () if system == "dllm-serve" else STATIC if system == "dllm-cache" else PACKED
    knobs = {**dict(GENERATION), "num_prompts": NUM_PROBLEMS, **dict(batching), **dict(configuration.knobs)}
    return view.cell(None, system, task, knobs=tuple(knobs.items()))


def cells(view: View) -> list[Cell]:
    check_answers(view)
    return cell_by_cell((cell(view, config, task) for config in CONFIGURATIONS for task in TASKS), view)


def solutions(runs: Runs) -> Solutions:
    shares = {
        (config.contender, config.rule, task): share(runs.of(cell(runs.view, config, task)))
        for config in CONFIGURATIONS
        for task in TASKS
    }
    return {place: solved for place, solved in shares.items() if solved is not None}


def page(runs: Runs) -> Page:
    found = solutions(runs)
    pairs = [(config, task) for config in CONFIGURATIONS for task in TASKS]
    return Page(
        table=Table(
            columns=("system", "cache rule", *(f"{task} %" for task in TASKS), "as without a cache", "valid"),
            rows=[table_row(runs, config, found) for config in CONFIGURATIONS],
        ),
        csv=Table(columns=CSV_COLUMNS, rows=[row for each, task in pairs for row in csv_rows(runs, each, task, found)]),
        notes=[
            *first_dense_notes(found),
            *how_obtained(runs.all),
            f"In brackets: Wilson's 95 % intervals over {NUM_PROBLEMS} held-out problems of each task (seed "
            f"{', '.join(map(str, runs.view.seeds))}), the same for all. As without a cache: no fewer solved, of every task, "
            "than the interval of LLaDA without a cache leaves.",
            f"{dict(GENERATION)['gen_length']} tokens in blocks of {dict(GENERATION)['block_length']}, one token a step, temperature 0. "
            "Fast-dLLM, Sparse-dLLM and LLaDA on dLLM-Serve's engine, dLLM-Cache in static batches.",
        ],
        after_heading=f" - {runs.view.platform.title}",
    )


def table_row(runs: Runs, configuration: Configuration, found: Solutions) -> tuple[str, ...]:
    repeats = [run for task in TASKS for run in runs.of(cell(runs.view, configuration, task))]
    solved = [found.get((configuration.contender, configuration.rule, task)) for task in TASKS]
    return (
        title_of(configuration.contender),
        configuration.rule,
        *("-" if answer is None else str(answer) for answer in solved),
        "-" if None in solved else "yes" if is_dense(configuration, found) else "no",
        validity_text(repeats),
    )


def csv_rows(runs: Runs, configuration: Configuration, task: str, found: Solutions) -> list[tuple[object, ...]]:
    """Return one row for each criterion."""
    repeats = runs.of(cell(runs.view, configuration, task))
    return [
        (
            *(runs.view.platform.name, configuration.contender, configuration.system, configuration.rule, task),
            *(criterion, is_strict, *numbers, is_dense(configuration, found)),
            *(obtained_text(repeats), all_valid(repeats), " ".join(run.cell.folder_name for run in repeats)),
        )
        for criterion, is_strict, numbers in by_criterion(repeats, task)
    ]


def first_dense_notes(found: Solutions) -> list[str]:
    """Name, for each system, the cheapest rule that answers as well as the model without a cache."""
    texts = []
    for contender in dict.fromkeys(each.contender for each in CONFIGURATIONS):
        rules = [each.rule for each in CONFIGURATIONS if each.contender == contender and is_dense(each, found)]
        if contender != DENSE:
            texts.append(f"{title_of(contender)} {rules[0] if rules else 'in none'}")
    return [f"The least that answers as the model without a cache does: {'; '.join(texts)}."]


FIGURE = dllm_figure(
    "accuracy", "this project", platforms=("cpu-tiny",), page=page, cells=cells, is_timed=False, decides_on=()
)
