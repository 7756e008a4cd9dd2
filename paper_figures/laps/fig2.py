"""LAPS Figure 2: lengths of prompts in first and later turns."""

from collections.abc import Callable
from functools import lru_cache

import numpy as np

from paper_figures.common.figure import Page, Picture, Table, table
from paper_figures.common.panel import Axis, Bars, Guide, Panel, Text
from paper_figures.common.runs import Runs
from paper_figures.common.words import exactly
from paper_figures.laps.contenders import LMSYS
from paper_figures.laps.layout import laps_figure
from repro.reports.claims import Finding, stated
from repro.workloads.conversations import LONG, SHORT, ConversationConfig, draw_conversations, load_conversation_card

NUM_TURNS = 20_000
EDGES = (4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8193)
DOZENS = 64
"""The longest of the lengths that §3.1 states for most re-prefills."""
TURNS = {"first": "laps-first-turn-short", "later": "laps-later-turn-short"}
"""Turn -> the claim that states how many of its prompts are short."""


@lru_cache(maxsize=1)
def prompts() -> dict[str, tuple[int, ...]]:
    drawn = draw_conversations(ConversationConfig(dataset=LMSYS, num_turns=NUM_TURNS, seed=0))
    return {
        "first": tuple(session.rounds[0].prefill_tokens for session in drawn.sessions),
        "later": tuple(turn.prefill_tokens for session in drawn.sessions for turn in session.rounds[1:]),
    }


def share(name: str, below: int) -> float:
    """Return the percent of prompts with fewer tokens."""
    return 100 * float(np.mean(np.array(prompts()[name]) < below))


def histogram(name: str) -> list[float]:
    """Return the percent of prompts between each two edges."""
    lengths = np.array(prompts()[name])
    return (100 * np.histogram(lengths, EDGES)[0] / len(lengths)).tolist()


def panel(name: str) -> Panel:
    line, counts = EDGES.index(SHORT) - 0.5, histogram(name)
    text = f"{share(name, SHORT):.1f} % here\n{stated('laps', TURNS[name]):.0f} % printed"
    places = range(len(counts))
    return Panel(
        title="first turn" if name == "first" else "later turns",
        layers=[
            Bars(label="generated", places=places, at=list(map(exactly, counts)), width=0.85, color="#56B4E9"),
            Guide(value=line, is_upright=True),
            Text(text=text, x=line - 0.2, y=28.5, is_at_values=True),
        ],
        x=Axis(
            label="prompt tokens, from", ticks=places, names=[f"{edge}" for edge in EDGES[:-1]], rotation=60, size=7
        ),
        y=Axis(label="prompts (%)" if name == "first" else None, limits=(0, 30)),
    )


def page(runs: Runs) -> Page:
    columns: dict[str, Callable[[str], object]] = {
        "turn": lambda name: name,
        f"below {SHORT}": lambda name: f"{share(name, SHORT):.1f} %",
        "printed": lambda name: f"{stated('laps', TURNS[name]):.0f} %",
        f"above {LONG}": lambda name: f"{100 - share(name, LONG + 1):.1f} %",
        "median": lambda name: f"{np.median(prompts()[name]):.0f}",
        "mean": lambda name: f"{np.mean(prompts()[name]):.0f}",
    }
    return Page(
        table=table(TURNS, columns),
        csv=Table(
            columns=("turn", "from_tokens", "to_tokens", "percent"),
            rows=[
                (name, low, below - 1, percent)
                for name in TURNS
                for low, below, percent in zip(EDGES, EDGES[1:], histogram(name), strict=False)
            ],
        ),
        picture=Picture(
            panels=list(map(panel, TURNS)),
            caption=[
                f"{share('first', SHORT):.1f} % of first and {share('later', SHORT):.1f} % of later prompts are below {SHORT} tokens, as printed, by construction.",
                "Log-normal through the printed share and an assumed one of 7 and 3 % above 1,000 tokens; the paper's histogram is not in its text.",
                f"{NUM_TURNS:,} turns.",
            ],
        ),
    )


def findings(runs: Runs) -> list[Finding]:
    basis = "log-normal through the printed share"
    few = share("later", DOZENS + 1)
    first, later = (100 - share(name, LONG + 1) for name in TURNS)
    return [
        *(
            runs.finding(claim, share(name, SHORT), f"generated: {basis}", obtained="computed")
            for name, claim in TURNS.items()
        ),
        runs.finding(
            "laps-long-rare",
            first,
            f"{first:.1f} % of first and {later:.1f} % of later prompts, assumed; they hold a quarter of all tokens",
            obtained="computed",
            holds=max(first, later) < 10,
        ),
        runs.finding(
            "laps-reprefill-dozens",
            float(np.median(prompts()["later"])),
            f"median of later prompts; {few:.0f} % have {DOZENS} tokens or fewer: {basis}",
            obtained="computed",
            holds=few > 50,
        ),
    ]


FIGURE = laps_figure(
    "fig2",
    "LAPS, Figure 2, §1",
    page=page,
    findings=findings,
    under_title=lambda runs: (
        f"simulated: drawn from the printed shares, {load_conversation_card(LMSYS).title} itself is gated"
    ),
)
