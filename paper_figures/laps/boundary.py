"""LAPS §2: the boundary of short prompts, and head-of-line blocking."""

import math
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from engines.cost.roofline import gpu
from engines.laps.cluster import PrefillCost
from engines.laps.latency import PaperForm, TwoClasses, fit_floor_form, fit_paper_form, fit_paper_totals, waits_s
from engines.models.shape import model_shape
from engines.policies.views import Chunk
from paper_figures.common.figure import Page, Table
from paper_figures.common.runs import Runs
from paper_figures.laps.contenders import MODELS
from paper_figures.laps.layout import laps_figure
from repro.families.platforms import PrefillPart
from repro.reports.claims import Finding
from repro.runs.statistics import Interval, mean_interval

LENGTHS = (1, 8, 16, 32, 64, 96, 128, 160, 192, 224, 256, 320, 384, 448, 512, 768, 1024, 2048, 4096)
HISTORIES = (0, 512, 2048, 8192)
QUEUE = TwoClasses(rate=8.0, short_share=0.8, short_s=0.02, long_s=0.2)
NUM_JOBS, NUM_QUEUES = 1_000_000, 10
FAR = 1e9
"""A history that is practically endless."""


class Boundaries(NamedTuple):
    """Boundaries of short prompts for one model, in tokens."""

    printed: float
    """The printed formula for first prompts, if compute and memory times are known apart."""
    printed_limit: float
    """The printed formula for an endless history."""
    from_totals: float
    """The same limit from total times, which one can observe."""
    floor: float
    """c / beta without launches; the floor is the read of the weights."""
    floor_far: float
    """Like ``floor``, over a history of 8,192 tokens."""
    eager: float
    """c / beta of steps that launch each kernel on its own."""


@lru_cache(maxsize=8)
def boundaries(model: str, card: str) -> Boundaries:
    shape, cost = model_shape(model), PrefillCost(model_shape(model), gpu(card))
    grid = [(tokens, history) for history in HISTORIES for tokens in LENGTHS]
    new, old = [float(tokens) for tokens, _ in grid], [float(history) for _, history in grid]
    constants = cost.constants
    flops = gpu(card).peak_flops
    token_s = shape.linear_flops_per_token / (flops * constants.matmul_efficiency)
    comp = [
        tokens * token_s
        + tokens * (history + tokens / 2) * shape.attention_flops_per_pair / (flops * constants.attention_efficiency)
        for tokens, history in grid
    ]
    kv_s = shape.kv_bytes_per_token / (gpu(card).bandwidth * constants.bandwidth_efficiency)
    mem = [(tokens + history) * kv_s for tokens, history in grid]
    graph = [cost.gpu_s((Chunk(history, tokens),), 0, 0) for tokens, history in grid]
    eager = [cost.step_s((Chunk(history, tokens),), 0, 0) for tokens, history in grid]
    form, totals = fit_paper_form(new, old, comp, mem), fit_paper_totals(new, old, graph)
    floor, launched = fit_floor_form(new, old, graph), fit_floor_form(new, old, eager)
    return Boundaries(
        printed=form.boundary(),
        printed_limit=form.boundary_limit,
        from_totals=totals.boundary_limit,
        floor=floor.boundary,
        floor_far=floor.boundary_over(HISTORIES[-1]),
        eager=launched.boundary,
    )


# -- the queue ----------------------------------------------------------------------------------------------


@lru_cache(maxsize=1)
def waits() -> tuple[Interval, Interval]:
    """Seconds over the simulated queues: the mean wait, and the head-of-line penalty in it. The penalty is the wait beyond that of the
    same arrivals if all take the mean time."""
    mixed_s, penalties_s = [], []
    for seed in range(NUM_QUEUES):
        gaps_s, service_s = QUEUE.draw(NUM_JOBS, seed)
        mixed_s.append(float(waits_s(gaps_s, service_s).mean()))
        penalties_s.append(mixed_s[-1] - float(waits_s(gaps_s, np.full_like(service_s, QUEUE.mean_s)).mean()))
    return mean_interval(mixed_s), mean_interval(penalties_s)


def in_ms(seconds: Interval, digits: int = 1) -> str:
    assert seconds.mean is not None
    assert seconds.half_width is not None
    return f"{1e3 * seconds.mean:.{digits}f} ± {1e3 * seconds.half_width:.{digits}f}"


# -- the table ----------------------------------------------------------------------------------------------


def page(runs: Runs) -> Page:
    card = runs.view.platform.part(PrefillPart).gpu
    wait, penalty = waits()
    return Page(
        table=Table(
            columns=(
                *("model", "printed, H = 0", "printed, H without end", "the same from total times"),
                *("with a floor (weights), H = 0", "H = 8192", "with a floor (launches)"),
            ),
            rows=[
                (model, *(f"{tokens:.0f}".replace("inf", "none") for tokens in boundaries(model, card)))
                for model in MODELS
            ],
        ),
        notes=(
            "Tokens; the paper says 150 to 512. Its formula knows no read of the weights: with grouped K/V heads a token's matrices take some hundred times as long as its K/V, "
            "so every first prompt is compute-bound. From total times a fit pours their floor into gamma_r, and the limit is what the sampled lengths make of it.",
            "With a floor T = max(c, beta L) + alpha L (L + 2H) + gamma_r H the boundary c / beta lies in the printed range, and falls with the history instead of growing.",
            f"Head-of-line blocking, M/G/1 with {100 * QUEUE.short_share:.0f} % short jobs at a load of {QUEUE.load:.2f}: {in_ms(penalty)} ms simulated, "
            f"{1e3 * QUEUE.hol_penalty_s:.1f} ms by the formula; mean wait {in_ms(wait)} ms, {1e3 * QUEUE.wait_s:.1f} by Pollaczek and Khinchine "
            f"({NUM_QUEUES} queues of {NUM_JOBS:,} jobs).",
            "Computed from the roofline of the card with assumed efficiencies; nothing here was timed.",
        ),
    )


def findings(runs: Runs) -> list[Finding]:
    card = runs.view.platform.part(PrefillPart).gpu
    bounds = {model: boundaries(model, card) for model in MODELS}
    middle, (_, hol) = bounds[MODELS[1]], waits()
    planted = PaperForm(alpha=1e-9, beta=2e-6, gamma_w=5e-6, gamma_r=4e-7)
    first, root = planted.boundary(), planted.boundary(1000)
    equation = planted.alpha * root**2 + (2 * planted.alpha * 1000 + planted.beta - planted.gamma_w) * root
    texts = ", ".join(f"{bound.floor:.0f} and {bound.eager:.0f}" for bound in bounds.values())
    limits = ", ".join(f"{bound.printed_limit:.0f}" for bound in bounds.values())
    assert hol.mean is not None
    assert hol.half_width is not None
    return [
        runs.finding(
            "laps-boundary-range",
            middle.floor,
            f"c / beta of Qwen2.5-14B by its weights; weights and launches give {texts} (7B, 14B, 32B); the printed formula gives {middle.printed:.0f}",
            obtained="computed",
        ),
        runs.finding(
            "laps-boundary-prefill",
            first,
            "planted coefficients give (gamma_w - beta) / alpha",
            obtained="computed",
            holds=math.isclose(first, (planted.gamma_w - planted.beta) / planted.alpha, rel_tol=1e-9),
        ),
        runs.finding(
            "laps-boundary-reprefill",
            root,
            "the root over 1,000 tokens of history solves the equation, planted coefficients",
            obtained="computed",
            holds=math.isclose(equation, planted.gamma_r * 1000, rel_tol=1e-9),
        ),
        runs.finding(
            "laps-boundary-limit",
            planted.boundary_limit,
            f"planted coefficients; on the H200 the limit is {limits} tokens (7B, 14B, 32B), outside 150 to 512",
            obtained="computed",
            holds=math.isclose(planted.boundary(FAR), planted.gamma_r / (2 * planted.alpha), rel_tol=1e-3),
        ),
        runs.finding(
            "laps-hol",
            hol.mean,
            f"{in_ms(hol, 2)} ms in simulated queues, {1e3 * QUEUE.hol_penalty_s:.2f} ms by the formula",
            obtained="simulated",
            holds=abs(hol.mean - QUEUE.hol_penalty_s) + hol.half_width <= 0.02 * QUEUE.hol_penalty_s,
        ),
    ]


FIGURE = laps_figure(
    "boundary",
    "LAPS, §2.1, §2.2",
    page=page,
    findings=findings,
    under_title=lambda runs: f"computed: the roofline of {runs.view.platform.part(PrefillPart).title}",
)
