"""AMPD Table 1: the traces."""

from paper_figures.ampd.contenders import TRACES
from paper_figures.ampd.layout import ampd_figure
from paper_figures.common.figure import Page, Table
from paper_figures.common.runs import Runs
from repro.families.platforms import ArPart
from repro.reports.claims import Finding, load_table
from repro.reports.figures import View
from repro.workloads.draws import ArrivalConfig
from repro.workloads.sessions import SessionWorkloadConfig, build_sessions, load_session_card

FIELDS = {"rounds": "avg_rounds", "prefill_tokens": "avg_prefill_length", "decode_tokens": "avg_decode_length"}
"""Our field -> column of the printed table."""


def means_of(trace: str, view: View) -> tuple[float, ...]:
    config = SessionWorkloadConfig(
        trace=trace,
        num_sessions=view.platform.part(ArPart).num_sessions,
        seed=0,
        arrivals=ArrivalConfig(kind="poisson", rate=1.0),
    )
    means = build_sessions(config).provenance.means
    return tuple(means[name] for name in FIELDS)


def page(runs: Runs) -> Page:
    printed = {str(row["trace"]).lower(): row for row in load_table("ampd/table1.csv")}
    rows = []
    for trace in TRACES:
        card, paper = load_session_card(trace), (printed[trace][column] for column in FIELDS.values())
        pairs = [f"{ours:.2f} ({theirs})" for ours, theirs in zip(means_of(trace, runs.view), paper, strict=True)]
        rows.append((card.title, *pairs, card.num_gpus, card.rounds.kind, f"{card.lengths.session_sigma:g}"))
    return Page(
        table=Table(
            columns=("trace", "rounds (paper)", "prefill (paper)", "decode (paper)", "GPUs", "rounds drawn", "sigma"),
            rows=rows,
        ),
        notes=(
            "Lengths are totals of a session: per round, GAIA's 529 decode tokens would take over 100 s, and Figure 8 ends at 16 s.",
            "Means of every sample are the printed ones by construction; kinds and spreads are assumed.",
        ),
    )


def findings(runs: Runs) -> list[Finding]:
    how = f"means of a sample of {runs.view.platform.part(ArPart).num_sessions} sessions, scaled to the printed ones"
    return [
        runs.finding(f"ampd-trace-{trace}", means_of(trace, runs.view), how, obtained="computed") for trace in TRACES
    ]


FIGURE = ampd_figure("table1", "AMPD, Table 1, §7.1", page=page, findings=findings)
