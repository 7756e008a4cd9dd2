"""LAPS Figure 2 (§1): lengths of prompts in first and in later turns, as generated and as printed."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

import numpy as np

from paper_figures.common import style
from paper_figures.laps.contenders import LMSYS
from paper_figures.laps.layout import finding, place_of
from repro.reports.claims import Finding
from repro.reports.figures import Rendered, View
from repro.reports.paper import load_claims
from repro.runs.cell import Cell
from repro.runs.store import StoredRun
from repro.workloads.conversations import ConversationConfig, draw_conversations, load_conversation_card
from repro.workloads.conversations.card import LONG, SHORT

NAME = "fig2"
TITLE = "LAPS Figure 2: lengths of prompts in first and later turns"
SOURCE = "LAPS, Figure 2, §1"
PLATFORMS = ("h200",)
place = place_of
NUM_TURNS = 20_000
EDGES = (4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8193)
DOZENS = 64
"""The longest of the lengths that §3.1 gives for most re-prefills."""
CLAIMS = {"first": "laps-first-turn-short", "later": "laps-later-turn-short"}


def cells(view: View) -> list[Cell]:
    """None: the generator alone."""
    return []


@lru_cache(maxsize=1)
def prompts() -> dict[str, tuple[int, ...]]:
    drawn = draw_conversations(ConversationConfig(dataset=LMSYS, num_turns=NUM_TURNS, seed=0))
    return {
        "first": tuple(session.rounds[0].prefill_tokens for session in drawn.sessions),
        "later": tuple(turn.prefill_tokens for session in drawn.sessions for turn in session.rounds[1:]),
    }


def share(name: str, below: int) -> float:
    """Percent of prompts of fewer tokens."""
    return 100 * float(np.mean(np.array(prompts()[name]) < below))


def printed(name: str) -> float:
    value = next(claim.expected.value for claim in load_claims("laps") if claim.id == CLAIMS[name])
    assert isinstance(value, int | float)
    return float(value)


def render(runs: Sequence[StoredRun], view: View, out: Path) -> Rendered:
    stem = f"{NAME}-{view.stem}"
    rows = []
    with style.drawing():
        figure, axes = style.row_of_panels(["first turn", "later turns"])
        for panel, name in zip(axes, CLAIMS, strict=True):
            lengths = np.array(prompts()[name])
            counts = 100 * np.histogram(lengths, EDGES)[0] / len(lengths)
            rows += [(name, low, high - 1, value) for low, high, value in zip(EDGES, EDGES[1:], counts, strict=False)]
            places = np.arange(len(counts))
            panel.bar(places, counts, 0.85, color="#56B4E9", label="generated")
            panel.set_xticks(places, [f"{edge}" for edge in EDGES[:-1]], rotation=60, fontsize=7)
            line = EDGES.index(SHORT) - 0.5
            panel.axvline(line, color=style.GUIDE_COLOR, linestyle="--", linewidth=1)
            panel.set_ylim(0, 30)
            panel.text(
                line - 0.2,
                28.5,
                f"{share(name, SHORT):.1f} % here\n{printed(name):.0f} % printed",
                ha="right",
                va="top",
                fontsize=8,
            )
            panel.set_xlabel("prompt tokens, from")
        axes[0].set_ylabel("prompts (%)")
        card = load_conversation_card(LMSYS)
        files = style.publish(
            figure,
            axes,
            out,
            stem,
            title=f"{TITLE}\nsimulated: drawn from the printed shares, {card.title} itself is gated",
            caption=[
                f"{share('first', SHORT):.1f} % of first and {share('later', SHORT):.1f} % of later prompts are below {SHORT} tokens, as printed, by construction.",
                "Log-normal through the printed share and an assumed one of 7 and 3 % above 1,000 tokens; the paper's histogram is not in its text.",
                f"{NUM_TURNS:,} turns.",
            ],
            width_inches=style.WIDE_INCHES + 0.6,
        )
    shown = [
        (
            name,
            f"{share(name, SHORT):.1f} %",
            f"{printed(name):.0f} %",
            f"{100 - share(name, LONG + 1):.1f} %",
            f"{np.median(prompts()[name]):.0f}",
            f"{np.mean(prompts()[name]):.0f}",
        )
        for name in CLAIMS
    ]
    return Rendered(
        files=(*files, style.save_csv(out / f"{stem}.csv", ("turn", "from_tokens", "to_tokens", "percent"), rows)),
        columns=("turn", f"below {SHORT}", "printed", f"above {LONG}", "median", "mean"),
        rows=tuple(shown),
    )


def findings(runs: Sequence[StoredRun], view: View) -> list[Finding]:
    basis = "log-normal through the printed share"
    few = share("later", DOZENS + 1)
    long = {name: 100 - share(name, LONG + 1) for name in CLAIMS}
    return [
        *(
            finding(claim, share(name, SHORT), f"generated: {basis}", obtained="computed")
            for name, claim in CLAIMS.items()
        ),
        finding(
            "laps-long-rare",
            long["first"],
            f"{long['first']:.1f} % of first and {long['later']:.1f} % of later prompts, assumed; they hold a quarter of all tokens",
            obtained="computed",
            holds=max(long.values()) < 10,
        ),
        finding(
            "laps-reprefill-dozens",
            float(np.median(prompts()["later"])),
            f"median of later prompts; {few:.0f} % have {DOZENS} tokens or fewer: {basis}",
            obtained="computed",
            holds=few > 50,
        ),
    ]
