"""Block diffusion under SGLang: published throughput, and what one fitted constant predicts of it."""

from collections.abc import Mapping

import numpy as np

from engines.blockdiffusion.sequence import BlockStepPlan, Work
from engines.blockdiffusion.simulated import step_work
from engines.cost.roofline import PricedStep
from engines.errors import require
from paper_figures.common.contender import Contender, contenders_beside
from paper_figures.common.figure import Page, Picture, Table, figure, seed_by_seed
from paper_figures.common.panel import Axis, Line, Mark, Panel
from paper_figures.common.runs import Measure, Of, Runs
from paper_figures.common.style import Look
from paper_figures.common.words import shown
from repro.families.block.settings import MAX_NUM_LOGITS, resolve
from repro.families.block.system import cost_on
from repro.reports.claims import Finding, stated
from repro.reports.figures import View
from repro.runs.cell import Cell, Scalar
from repro.runs.store import StoredRun

SOURCE = "sgl-project/sglang issue 33322 (LLaDA2.1-mini, one H20)"
DATASET = "gsm8k"
CONCURRENCY = (1, 8, 32, 64, 128)
TOKENS_PER_FORWARD = 6.05
"""Fitted: one request's published throughput, by three seeds of composed steps. Drawn by request and forward, before blocks cut it."""
FITTED_PERCENT = 1.0
"""If the first point differs more from the published one, the runs are not those of the fit."""
PROMPT, SHARED, TOKENS = 900, 832, 256
"""Assumed lengths: five examples before every question, and an answer."""
GSM8K: Mapping[str, Scalar] = {"input_len": PROMPT, "shared_len": SHARED, "gen_length": TOKENS}
LONG: Mapping[str, Scalar] = {"input_len": 4096, "gen_length": 1536, "prefix_cache": False}
"""Published as 4K in and 1.5K out, without the radix cache."""
LONG_CONCURRENCY = (72, 128)
THROUGHPUT = Measure(path="throughput_tok_s", label="throughput (tok/s)", better="higher")
Knobs = Mapping[str, Scalar]


READINGS = tuple(contenders_beside(__file__, Contender).values())
"""Schedules that SGLang may have run. The sweep included all changes of its issue, also the scheduler's return after each denoise.
SGLang's default is synchronous."""
USUAL, SYNCHRONOUS, _ = READINGS


def cell_of(view: View, concurrency: int, reading: Contender = USUAL, asked: Knobs = GSM8K) -> Cell:
    """Clients send again after each answer: four requests per running one, two for long ones."""
    rounds = 4 if asked is GSM8K else 2
    knobs: dict[str, Scalar] = {
        **asked,
        "tokens_per_forward": TOKENS_PER_FORWARD,
        "max_num_seqs": concurrency,
        "num_prompts": max(8, rounds * concurrency),
        **({} if any(name in ("cost", "kernels") for name, _ in view.knobs) else {"kernels": "sglang"}),
    }
    return reading.cell(view, DATASET, knobs)


def cells(view: View) -> list[Cell]:
    require(
        view.platform.gpu == "h20",
        f"platform={view.platform.name!r} is not the card that SGLang's points were measured on: use h20-llada2-mini",
    )
    short = [cell_of(view, n, reading) for reading in READINGS for n in CONCURRENCY]
    return [*short, *(cell_of(view, n, reading, LONG) for reading in READINGS[:2] for n in LONG_CONCURRENCY)]


def published(concurrency: int) -> float:
    return stated("block", f"block-sglang-{concurrency}")


def step_of(view: View, concurrency: int) -> PricedStep:
    """A denoise in the middle of an answer, for this many requests at once, with logits of every row."""
    settings = resolve(view.applied(cell_of(view, concurrency)))
    block, context = settings.block, (PROMPT + TOKENS // 2) // settings.block * settings.block
    works = tuple(Work(i, i, context, 0, (0, block), False) for i in range(concurrency))
    wanted = np.ones((concurrency, block), dtype=bool)
    work = step_work(BlockStepPlan(works, (), (), 0), wanted, block, head_rows="all", max_num_logits=MAX_NUM_LOGITS)
    assert settings.platform.gpu is not None
    return cost_on(settings, settings.platform.gpu).step_time(work)


def page(runs: Runs) -> Page:
    view = runs.view
    steps = {n: step_of(view, n) for n in CONCURRENCY}
    tokens = runs.at(cell_of(view, CONCURRENCY[0]), Measure(path="tokens_per_forward")).mean
    about = [
        conclusion(runs),
        flattening(steps),
        f"{fit(runs)} ({shown(tokens, '.2f')} with blocks' ends and the forward that ends them). Assumed: prompts of {PROMPT} tokens, {SHARED} of them shared, "
        f"answers of {TOKENS}, whole; no time of the host.",
    ]
    return Page(csv=csv_of(runs), picture=Picture(panels=[panel(runs)], caption=about), notes=about)


def csv_of(runs: Runs) -> Table:
    """One row per run."""
    columns = (
        *("platform", "reading", "input_len", "gen_length", "concurrency", "seed", "throughput_tok_s", "tpot_ms"),
        *("published_tok_s", "obtained", "valid", "run"),
    )
    rows = [
        (
            *(runs.view.platform.name, reading.title, knobs["input_len"], knobs["gen_length"], n, run.cell.seed),
            *(THROUGHPUT(run), tpot_ms(run), stated("block", f"block-sglang-{'long-' if knobs is LONG else ''}{n}")),
            *(run.obtained, run.validity.valid, run.cell.key),
        )
        for knobs, readings, counts in ((GSM8K, READINGS, CONCURRENCY), (LONG, READINGS[:2], LONG_CONCURRENCY))
        for reading in readings
        for n in counts
        for run in runs.of(cell_of(runs.view, n, reading, knobs))
    ]
    return Table(columns=columns, rows=rows)


def _parts(step: PricedStep) -> tuple[float, ...]:
    return step.total_s, step.linear_s, step.attention_s, step.logits_s


def tpot_ms(run: StoredRun) -> float | None:
    """Return milliseconds between tokens of an answer, from its first block on."""
    summary, tokens = run.summary, run.cell.knob_values["gen_length"]
    assert isinstance(tokens, int)
    return 1e3 * float(summary["e2el_s"]["mean"] - summary["ttft_s"]["mean"]) / (tokens - 1)


def error(runs: Runs, concurrency: int) -> float | None:
    mean = runs.at(cell_of(runs.view, concurrency), THROUGHPUT).mean
    return None if mean is None else 100 * (mean / published(concurrency) - 1)


def is_fitted(runs: Runs) -> bool:
    """Whether these runs match the point that the constant was fitted to."""
    first = error(runs, CONCURRENCY[0])
    return first is not None and abs(first) <= FITTED_PERCENT


def fit(runs: Runs) -> str:
    text = f"{TOKENS_PER_FORWARD:g} tokens a forward"
    if is_fitted(runs):
        return f"Fitted: {text}, to the first point"
    return f"{text}, fitted to other runs: the first point is {shown(error(runs, CONCURRENCY[0]), '+.0f')} % off here"


def conclusion(runs: Runs) -> str:
    constant = f"one constant fitted to {'one request at a time' if is_fitted(runs) else 'other runs'}"
    errors = ", ".join(f"{shown(error(runs, n), '+.0f')} % at {n}" for n in CONCURRENCY[1:])
    return f"With {constant}, the published throughput of more is predicted with errors of {errors}."


def flattening(steps: Mapping[int, PricedStep]) -> str:
    """Tell what makes a step longer from the first concurrency to the last."""
    first, last = (steps[n] for n in (CONCURRENCY[0], CONCURRENCY[-1]))
    bound_from = next((n for n in CONCURRENCY if steps[n].bound == "compute"), None)
    grown = (1e3 * (b - a) for a, b in zip(_parts(first), _parts(last), strict=True))
    total, layers, attention, head = grown
    extent = "Nowhere" if bound_from is None else f"From {bound_from} requests on"
    return (
        f"{extent} a step is bound by the card's arithmetic, and more requests make it longer by as much: with {CONCURRENCY[-1]} it takes "
        f"{total:.0f} ms more than with one, {layers:.0f} of them in the layers' matrices, {attention:.0f} in attention, {head:.0f} in the head."
    )


def panel(runs: Runs) -> Panel:
    lines = [
        Line(
            label=reading.title,
            places=CONCURRENCY,
            at=[runs.at(cell_of(runs.view, n, reading), THROUGHPUT) for n in CONCURRENCY],
            look=reading.look,
        )
        for reading in READINGS
    ]
    look = Look(color="black", marker="D")
    points = [Mark(label="published", place=n, value=published(n), look=look, size=7) for n in CONCURRENCY]
    return Panel(
        title="GSM8K, LLaDA2-mini on one H20",
        layers=[*lines, *points],
        x=Axis(label="requests at once", scale="log2", ticks=CONCURRENCY),
        y=Axis(label=THROUGHPUT.label, better=THROUGHPUT.better, limits=(0, None)),
    )


def findings(runs: Runs) -> list[Finding]:
    view, results = runs.view, list[Finding]()

    def finding(claim: str, of: Of, concurrency: int, asked: Knobs) -> None:
        value, other = (runs.at(cell_of(view, concurrency, each, asked), of).mean for each in (USUAL, SYNCHRONOUS))
        if value is not None and other is not None:
            how = f"{USUAL.title}, {TOKENS_PER_FORWARD:g} tokens a forward"
            results.append(runs.finding(claim, value, how, readings=((SYNCHRONOUS.title, other),)))

    for n in CONCURRENCY:
        finding(f"block-sglang-{n}", THROUGHPUT, n, GSM8K)
    for n in LONG_CONCURRENCY:
        finding(f"block-sglang-long-{n}", THROUGHPUT, n, LONG)
    finding("block-sglang-long-tpot", tpot_ms, 128, LONG)
    (usual, synchronous) = (gains(runs, reading) for reading in (USUAL, SYNCHRONOUS))
    if usual is not None and synchronous is not None:
        previous, last = usual
        how = f"from 64 to 128 requests, after {previous:.0f} % from 32 to 64"
        results.append(
            runs.finding(
                "block-sglang-flattens",
                last,
                how,
                holds=0 <= last < previous,
                readings=((SYNCHRONOUS.title, synchronous[1]),),
            )
        )
    return results


def gains(runs: Runs, reading: Contender) -> tuple[float, float] | None:
    """Return by how many percent 64 requests give more than 32, and 128 more than 64."""
    low, middle, high = (runs.at(cell_of(runs.view, n, reading), THROUGHPUT).mean for n in CONCURRENCY[-3:])
    if not low or not middle or high is None:
        return None
    return 100 * (middle / low - 1), 100 * (high / middle - 1)


FIGURE = figure(
    "sglang",
    SOURCE,
    paper="block",
    platforms=("h20-llada2-mini",),
    page=page,
    cells=cells,
    in_order=seed_by_seed,
    findings=findings,
    num_runs=3,
)
