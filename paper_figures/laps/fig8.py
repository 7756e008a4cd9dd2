"""LAPS Figure 8: throughput with decoding apart and mixed in."""

from paper_figures.common.figure import Page
from paper_figures.common.panel import Axis, Panel
from paper_figures.common.runs import Runs
from paper_figures.common.words import is_below, number, plural, said
from paper_figures.laps.contenders import CONTENDERS, MIDDLE, SHAREGPT
from paper_figures.laps.layout import doubling, laps_figure, laps_page, line
from paper_figures.laps.measures import RPS
from repro.reports.claims import Finding
from repro.reports.figures import View
from repro.runs.cell import Cell, Scalar
from repro.runs.statistics import Interval

INSTANCES = (1, 2)
CLIENTS = (4, 16, 64, 128)
NAMES = ("sglang", "laps")
MODES = {"apart": ("-", "decoding apart"), "mixed": (":", "decoding mixed in")}
TURNS = 1200
PLACES = [(instances, clients) for instances in INSTANCES for clients in CLIENTS]


def cell(view: View, name: str, instances: int, clients: int, decode: str) -> Cell:
    size: dict[str, Scalar] = {"model": MIDDLE, "num_instances": instances, "clients": clients}
    return CONTENDERS[name].cell(view, SHAREGPT, {**size, "decode": decode, "num_prompts": TURNS})


def cells(view: View) -> list[Cell]:
    return [cell(view, name, *place, decode) for place in PLACES for decode in MODES for name in NAMES]


def change(runs: Runs, name: str, instances: int, clients: int) -> Interval:
    """Return turns/s with decoding mixed in over those with it apart, in percent."""
    apart, mixed = (cell(runs.view, name, instances, clients, decode) for decode in MODES)
    return runs.versus(mixed, apart, RPS)


def panel(runs: Runs, instances: int) -> Panel:
    lines = [
        line(
            runs,
            name,
            CLIENTS,
            [cell(runs.view, name, instances, clients, decode) for clients in CLIENTS],
            RPS,
            f"{CONTENDERS[name].title}, {text}",
            linestyle=linestyle,
        )
        for name in NAMES
        for decode, (linestyle, text) in MODES.items()
    ]
    return Panel(
        title=plural(instances, "instance"),
        layers=lines,
        x=doubling(CLIENTS, "clients"),
        y=Axis(label=RPS.label, better=RPS.better),
    )


def page(runs: Runs) -> Page:
    texts = []
    for name in NAMES:
        falls = sorted((change(runs, name, *place) for place in PLACES), key=number)
        texts.append(f"{said(falls[0], '%')} to {said(falls[-1], '%')} ({CONTENDERS[name].title})")
    return laps_page(
        runs,
        panels=[panel(runs, instances) for instances in INSTANCES],
        conclusions=[f"Mixing decoding in changes turns/s by {' and '.join(texts)}: it costs either system alike."],
        about="Qwen2.5-14B, ShareGPT's turns; the next turn comes after the whole answer. Apart: as many other GPUs decode, at the pace of a batch of all clients. "
        "Mixed in: prefills go first and decode steps run between them. The paper's text states no value of this figure.",
    )


def findings(runs: Runs) -> list[Finding]:
    falls = [change(runs, "laps", *place) for place in PLACES]
    down, most = sum(map(is_below, falls)), min(falls, key=number)
    how = f"LAPS's turns/s with decoding mixed in are lower outside noise in {down} of {len(falls)} settings, by up to {said(most, '%')}"
    return [runs.finding("laps-fig8-mix", number(most), how, holds=2 * down > len(falls))]


FIGURE = laps_figure("fig8", "LAPS, Figure 8, §4.1", page=page, cells=cells, findings=findings)
