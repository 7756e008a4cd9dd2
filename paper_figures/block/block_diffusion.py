"""Block diffusion against autoregressive decoding and full diffusion: throughput by concurrency."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from engines.models.block_config import block_config
from paper_figures.common.caption import how_obtained, seeds_sentence
from paper_figures.common.contender import Contender
from paper_figures.common.figure import Page, Picture, Table, figure, seed_by_seed
from paper_figures.common.panel import Axis, Guide, Line, Panel
from paper_figures.common.runs import Measure, Runs
from paper_figures.common.words import shown
from repro.families.platforms import BlockPart, Platform
from repro.reports.figures import View
from repro.runs.cell import Cell, Scalar
from repro.runs.statistics import Interval

SOURCE = "ours; LLaDA2 (arXiv:2512.15745), SDAR (arXiv:2510.06303), Fast-dLLM v2 (arXiv:2509.26328), dLLM-Serve (arXiv:2512.17077)"
DATASET, TOKENS = "osc", 256
CONCURRENCY = (1, 2, 4, 8, 16, 32, 64, 128)
THROUGHPUT = Measure(path="throughput_tok_s", label="throughput (tok/s)", better="higher")
FULL = "dllm-serve"


@dataclass(frozen=True, kw_only=True)
class Way(Contender):
    """A way to decode; every forward takes the same number of ``tokens``."""

    system: str = "block-diffusion"
    tokens: int = 1


AUTOREGRESSIVE = Way(
    name="ar", title="autoregressive, the same matrices", knobs=(("autoregressive", True),), color="#009E73", marker="^"
)


def ways(where: Platform) -> tuple[Way, ...]:
    """Full diffusion has eight billion parameters, so we show it only beside the dense model of that size."""
    part = where.part(BlockPart)
    few = int(part.tokens_per_forward)
    common = (
        Way(name="few", title=f"block diffusion, {few} tokens a forward", tokens=few, color="#0072B2", marker="o"),
        Way(name="one", title="block diffusion, 1 token a forward", color="#56B4E9", marker="v"),
        AUTOREGRESSIVE,
    )
    if part.model != "sdar-8b":
        return common
    title = "full diffusion (LLaDA-8B)"
    return (
        *common,
        Way(
            name="full few", title=f"{title}, {few} tokens a step", system=FULL, tokens=few, color="#D55E00", marker="s"
        ),
        Way(name="full one", title=f"{title}, 1 token a step", system=FULL, color="#E69F00", marker="D"),
    )


def cell_of(view: View, way: Way, concurrency: int) -> Cell:
    """Ask for as many requests as run at once, all present from the beginning."""
    own: dict[str, Scalar] = {"num_prompts": concurrency, "max_num_seqs": concurrency, "gen_length": TOKENS}
    if way.system == FULL:
        own |= {"steps": TOKENS // way.tokens, "selection": "dense", "refresh_delay": 0}
    elif way is not AUTOREGRESSIVE:
        own |= {"rule": "static", "steps": block_config(view.platform.part(BlockPart).model).block_length // way.tokens}
    cell = way.cell(view, DATASET, own)
    return replace(cell, platform=str(view.platform.gpu)) if way.system == FULL else cell


def cells(view: View) -> list[Cell]:
    return [cell_of(view, way, n) for way in ways(view.platform) for n in CONCURRENCY]


def against(runs: Runs, way: Way, concurrency: int) -> Interval:
    """Return throughput relative to the autoregressive decoder's, seed by seed."""
    own, base = (cell_of(runs.view, each, concurrency) for each in (way, AUTOREGRESSIVE))
    return runs.versus(own, base, THROUGHPUT, "ratio")


def page(runs: Runs) -> Page:
    view = runs.view
    contenders = ways(view.platform)
    about = [
        conclusion(runs),
        f"As many requests of OSC at once as run together, {TOKENS} tokens each. How many tokens a forward takes is assumed, the same in "
        "every one, of block and full diffusion; the latter refreshes once a block of 32. The autoregressive decoder runs in the engine of "
        "block diffusion, one row a token.",
    ]
    return Page(
        csv=Table(
            columns=(
                *("platform", "way", "tokens_per_forward", "concurrency", "seed", "throughput_tok_s"),
                *("obtained", "valid", "run"),
            ),
            rows=[
                (
                    *(view.platform.name, way.title, way.tokens, n, run.cell.seed, THROUGHPUT(run)),
                    *(run.obtained, run.validity.valid, run.cell.key),
                )
                for way in contenders
                for n in CONCURRENCY
                for run in runs.of(cell_of(view, way, n))
            ],
        ),
        picture=Picture(panels=[panel(runs, contenders), ratio_panel(runs, contenders)], caption=about),
        notes=about,
    )


def origin(runs: Runs) -> list[str]:
    labels = ["full diffusion" if run.cell.system == FULL else "the others" for run in runs.all]
    return [seeds_sentence(runs.all), *how_obtained(runs.all, labels)]


def conclusion(runs: Runs) -> str:
    """Tell up to which concurrency block diffusion beats the autoregressive decoder."""
    block = ways(runs.view.platform)[0]
    ahead = [n for n in CONCURRENCY if (against(runs, block, n).mean or 0.0) > 1]
    first, last = against(runs, block, CONCURRENCY[0]).mean, against(runs, block, CONCURRENCY[-1]).mean
    extent = f"up to {ahead[-1]} requests at once" if ahead else "nowhere"
    return (
        f"Block diffusion with {block.tokens} tokens a forward is ahead of the autoregressive decoder {extent}: "
        f"{shown(first, '.2f')} times its throughput with one request, {shown(last, '.2f')} times with {CONCURRENCY[-1]}."
    )


def panel(runs: Runs, contenders: Sequence[Way]) -> Panel:
    lines = [
        Line(
            label=way.title,
            places=CONCURRENCY,
            at=[runs.at(cell_of(runs.view, way, n), THROUGHPUT) for n in CONCURRENCY],
            look=way.look,
        )
        for way in contenders
    ]
    return Panel(
        title="throughput",
        layers=lines,
        x=_requests(),
        y=Axis(label=THROUGHPUT.label, better=THROUGHPUT.better, scale="plain log"),
    )


def ratio_panel(runs: Runs, contenders: Sequence[Way]) -> Panel:
    lines = [
        Line(label=way.title, places=CONCURRENCY, at=[against(runs, way, n) for n in CONCURRENCY], look=way.look)
        for way in contenders
        if way is not AUTOREGRESSIVE
    ]
    return Panel(
        title="times the autoregressive decoder's",
        layers=[Guide(value=1.0), *lines],
        x=_requests(),
        y=Axis(label="times as many tok/s", better="higher", limits=(0, None)),
    )


def _requests() -> Axis:
    return Axis(label="requests at once", scale="log2", ticks=CONCURRENCY)


FIGURE = figure(
    "block-diffusion",
    SOURCE,
    paper="block",
    platforms=("h200-sdar-8b",),
    page=page,
    cells=cells,
    in_order=seed_by_seed,
    num_runs=5,
    decides_on=(),
    origin=origin,
)
