"""AMPD Table 1 (§7.1): rounds, prefill and decode lengths of the traces, as generated and as printed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from paper_figures.ampd.panels import TRACES
from paper_figures.common.table import save_table
from repro.reports.claims import Finding
from repro.reports.figures import Rendered, View
from repro.reports.paper import load_table
from repro.runs.cell import Cell
from repro.runs.store import StoredRun
from repro.systems.ar.part import ArPart
from repro.workloads.arrivals import ArrivalConfig
from repro.workloads.sessions import SessionWorkloadConfig, build_sessions, load_session_card

NAME = "table1"
TITLE = "AMPD Table 1: the traces"
SOURCE = "AMPD, Table 1, §7.1"
PLATFORMS = ("h20x32",)
FIELDS = ("rounds", "prefill_tokens", "decode_tokens")


def cells(view: View) -> list[Cell]:
    """None: the generator alone."""
    return []


def means_of(trace: str, view: View, seed: int = 0) -> tuple[float, ...]:
    config = SessionWorkloadConfig(
        trace=trace,
        num_sessions=view.platform.part(ArPart).num_sessions,
        seed=seed,
        arrivals=ArrivalConfig(kind="poisson", rate=1.0),
    )
    means = build_sessions(config).provenance.means
    return tuple(means[name] for name in FIELDS)


def render(runs: Sequence[StoredRun], view: View, out: Path) -> Rendered:
    printed = {str(row["trace"]).lower(): row for row in load_table("ampd/table1.csv")}
    rows = []
    for trace in TRACES:
        card, row = load_session_card(trace), printed[trace]
        paper = (row["avg_rounds"], row["avg_prefill_length"], row["avg_decode_length"])
        pairs = [f"{ours:.2f} ({said})" for ours, said in zip(means_of(trace, view), paper, strict=True)]
        rows.append((card.title, *pairs, str(card.num_gpus), card.rounds.kind, f"{card.lengths.session_sigma:g}"))
    return save_table(
        out,
        f"{NAME}-{view.stem}",
        title=TITLE,
        columns=("trace", "rounds (paper)", "prefill (paper)", "decode (paper)", "GPUs", "rounds drawn", "sigma"),
        rows=rows,
        notes=(
            "Lengths are totals of a session: per round, GAIA's 529 decode tokens would take over 100 s, and Figure 8 ends at 16 s.",
            "Means of every sample are the printed ones by construction; kinds and spreads are assumed.",
        ),
    )


def findings(runs: Sequence[StoredRun], view: View) -> list[Finding]:
    found = []
    for trace in TRACES:
        found.append(
            Finding(
                claim=f"ampd-trace-{trace}",
                value=means_of(trace, view),
                how=f"means of a sample of {view.platform.part(ArPart).num_sessions} sessions, scaled to the printed ones",
                obtained="computed",
            )
        )
    return found
