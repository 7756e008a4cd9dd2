"""Canvases against the same decoder one token a step: throughput by concurrency, and what mixed steps gain over synchronous ones."""

from collections.abc import Mapping
from dataclasses import replace

from paper_figures.common.caption import how_obtained, seeds_sentence
from paper_figures.common.contender import Contender
from paper_figures.common.figure import Page, Picture, Table, figure, seed_by_seed
from paper_figures.common.panel import Axis, Guide, Line, Panel
from paper_figures.common.runs import Measure, Runs
from paper_figures.common.words import shown
from repro.reports.claims import Finding
from repro.reports.figures import View
from repro.runs.cell import Cell, Scalar
from repro.runs.statistics import Interval

SOURCE = "vllm pull request 46212, vLLM's blog of 2026-06-10 (DiffusionGemma 26B-A4B in FP8)"
DATASET = "osc"
CONCURRENCY = (1, 2, 4, 8, 16, 32, 64)
THROUGHPUT = Measure(path="throughput_tok_s", label="throughput (tok/s)", better="higher")
LENGTHS: Mapping[str, Scalar] = {"input_len": 1024, "gen_length": 1024, "precision": "fp8"}
"""Lengths in the author's benchmark."""
STEPS = 16
OTHER = "trtllm"
"""Kernels of another framework that a server may run too: in vLLM's table, experts are slower in FP8 than in bfloat16."""

_SYSTEM = "block-diffusion"
FIXED = Contender(
    name="fixed",
    system=_SYSTEM,
    title=f"{STEPS} steps a canvas",
    knobs=(("confidence", 0.0), ("steps", STEPS)),
    color="#0072B2",
)
TOKENS = Contender(
    name="tokens",
    system=_SYSTEM,
    title="one token a step",
    knobs=(("autoregressive", True),),
    color="#009E73",
    marker="^",
)
DRAWN = Contender(name="drawn", system=_SYSTEM, title="drawn steps, mixed", color="#56B4E9", marker="v")
TOGETHER = Contender(
    name="together",
    system=_SYSTEM,
    title="drawn steps, synchronous",
    knobs=(("batching", "synchronous"),),
    color="#D55E00",
    marker="s",
)
WAYS = (FIXED, TOKENS, DRAWN, TOGETHER)


def by_others(way: Contender) -> Contender:
    return replace(
        way, title=f"{way.title}, TensorRT-LLM's kernels", knobs=(*way.knobs, ("kernels", OTHER)), linestyle="--"
    )


def cell_of(view: View, way: Contender, concurrency: int) -> Cell:
    """Ask for as many requests as run at once, all present from the beginning. With drawn steps, ask for four times as many: each enters
    when another ends."""
    rounds = 4 if way in (DRAWN, TOGETHER) else 1
    knobs = {**LENGTHS, "num_prompts": rounds * concurrency, "max_num_seqs": concurrency}
    return way.cell(view, DATASET, knobs)


def asked(view: View) -> list[tuple[Contender, int]]:
    pairs = [(way, n) for way in WAYS for n in CONCURRENCY]
    is_free = not any(name in ("cost", "kernels") for name, _ in view.knobs)
    return pairs + [(by_others(way), n) for way in (FIXED, TOKENS) for n in CONCURRENCY if is_free]


def cells(view: View) -> list[Cell]:
    return [cell_of(view, way, n) for way, n in asked(view)]


def ratio(runs: Runs, own: Contender, base: Contender, concurrency: int) -> Interval:
    """Return throughput over that of ``base``, seed by seed."""
    ours, others = (cell_of(runs.view, way, concurrency) for way in (own, base))
    return runs.versus(ours, others, THROUGHPUT, "ratio")


def page(runs: Runs) -> Page:
    view = runs.view
    ways = list(dict.fromkeys(way for way, _ in asked(view)))
    about = [
        crossing(runs),
        gain(runs),
        f"Prompts and answers of 1,024 tokens, layers in FP8. {STEPS} steps a canvas of 256 are what was published; drawn ones have that mean "
        "and a Poisson number of sure places each. One token a step is the same decoder without what a canvas' logits give the next step.",
    ]
    columns = (
        "platform",
        "way",
        "concurrency",
        "seed",
        "throughput_tok_s",
        "tokens_per_forward",
        "obtained",
        "valid",
        "run",
    )
    rows = [
        (
            *(view.platform.name, way.title, n, run.cell.seed, THROUGHPUT(run), run.summary["tokens_per_forward"]),
            *(run.obtained, run.validity.valid, run.cell.key),
        )
        for way, n in asked(view)
        for run in runs.of(cell_of(view, way, n))
    ]
    speeds = [
        Line(
            label=way.title,
            places=CONCURRENCY,
            at=[runs.at(cell_of(view, way, n), THROUGHPUT) for n in CONCURRENCY],
            look=way.look,
        )
        for way in ways
    ]
    times = [
        Line(label=way.title, places=CONCURRENCY, at=[ratio(runs, way, base, n) for n in CONCURRENCY], look=way.look)
        for way, base in [(FIXED, TOKENS), (DRAWN, TOGETHER), (by_others(FIXED), by_others(TOKENS))]
        if way in ways
    ]
    x = Axis(label="requests at once", scale="log2", ticks=CONCURRENCY)
    panels = [
        Panel(
            title="throughput", layers=speeds, x=x, y=Axis(label=THROUGHPUT.label, better="higher", scale="plain log")
        ),
        Panel(
            title="times one token a step's; of mixed steps synchronous ones'",
            layers=[Guide(value=1.0), *times],
            x=x,
            y=Axis(label="times as many tok/s", better="higher", limits=(0, None)),
        ),
    ]
    return Page(csv=Table(columns=columns, rows=rows), picture=Picture(panels=panels, caption=about), notes=about)


def crossing(runs: Runs) -> str:
    ahead = [n for n in CONCURRENCY if (ratio(runs, FIXED, TOKENS, n).mean or 0.0) > 1]
    first, last = (shown(ratio(runs, FIXED, TOKENS, n).mean, ".2f") for n in (CONCURRENCY[0], CONCURRENCY[-1]))
    extent = f"up to {ahead[-1]} requests at once" if ahead else "nowhere"
    return (
        f"Canvases of {STEPS} steps are ahead of one token a step {extent}: {first} times its throughput with one request, {last} times "
        f"with {CONCURRENCY[-1]}."
    )


def gain(runs: Runs) -> str:
    text = ", ".join(f"{shown(ratio(runs, DRAWN, TOGETHER, n).mean, '.2f')} at {n}" for n in CONCURRENCY[1:])
    return f"Mixed steps over synchronous ones, steps drawn: {text}."


def origin(runs: Runs) -> list[str]:
    return [seeds_sentence(runs.all), *how_obtained(runs.all, ["every way" for _ in runs.all])]


_SPEEDS = {
    "h100-diffusiongemma": ("block-canvas-46212", "block-canvas-blog-h100", "block-diffusion-gemma-speed"),
    "h200-diffusiongemma": ("block-canvas-blog-h200",),
}


def findings(runs: Runs) -> list[Finding]:
    """Findings by vLLM's kernels, with TensorRT-LLM's as another reading."""
    view, pairs = runs.view, ((FIXED, TOKENS), (by_others(FIXED), by_others(TOKENS)))
    speeds = [runs.at(cell_of(view, way, 1), THROUGHPUT).mean for way, _ in pairs]
    times = [ratio(runs, way, base, 1).mean for way, base in pairs]
    how = f"one request, {STEPS} steps a canvas, prompt and answer of 1,024 tokens, vLLM's kernels"
    claims = [(claim, speeds) for claim in _SPEEDS.get(view.platform.name, ())]
    claims += [("block-canvas-times-ar", times)] if view.platform.gpu == "h100" else []
    return [
        runs.finding(claim, value, how, readings=() if other is None else (("TensorRT-LLM's kernels", other),))
        for claim, (value, other) in claims
        if value is not None
    ]


FIGURE = figure(
    "canvases",
    SOURCE,
    paper="block",
    platforms=("h100-diffusiongemma", "h200-diffusiongemma"),
    page=page,
    cells=cells,
    in_order=seed_by_seed,
    findings=findings,
    num_runs=3,
    origin=origin,
)
