"""The family of live clusters: that of simulated ones, with a client's metrics, the simulator's prediction and lost workers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from repro.runs.family import Shown
from repro.runs.metrics import Metric, distribution, known, metric, window_s
from repro.runs.record import RunRecord
from repro.systems.cluster.ampd_record import AR, ROUNDS, slo_attainment
from repro.systems.cluster.ampd_record import round_ttft_s as ttft_of


def workers_lived(record: RunRecord) -> Iterator[str]:
    facts = record.facts
    if lost := facts["lost_workers"]:
        roles = facts["roles"]
        names = ", ".join(f"{roles[str(each)]} worker {each}" for each in lost)
        yield f"{names} died or fell silent: what was measured is less than {facts['deployment']}"


@metric("s", "distribution over rounds of first token - ready", "no round")
def round_ttft_s(record: RunRecord) -> dict[str, Any]:
    return distribution(known(ttft_of(record)))


@metric("1/s", "rounds or sessions that meet both objectives / (last end - first arrival)", "no session ended")
def goodput(record: RunRecord) -> float | None:
    share = slo_attainment.compute(record)
    is_of_rounds = record.facts["attainment_reading"].startswith("round/")
    counted = record.tables[ROUNDS]["round"] if is_of_rounds else record.requests["status"]
    seconds = window_s(record)
    return None if share is None or seconds is None else round(share * len(counted)) / seconds


def _tokens(column: str) -> Any:
    return lambda record: distribution(record.tables[ROUNDS][column])


LIVE = replace(
    AR,
    name="live",
    metrics=(
        *AR.metrics,
        round_ttft_s,
        goodput,
        Metric(
            "input_len", "tokens", "distribution over rounds of what each adds", "no round", _tokens("prefill_tokens")
        ),
        Metric(
            "output_len",
            "tokens",
            "distribution over rounds of what each asks for",
            "no round",
            _tokens("decode_tokens"),
        ),
        Metric("lost_workers", "workers", "losses of workers", "never", lambda r: len(r.facts["lost_workers"])),
    ),
    checks=(*AR.checks, workers_lived),
    shown=(
        Shown("in tok", "input_len", stat="mean"),
        Shown("out tok", "output_len", stat="mean"),
        Shown("ttft ms", "round_ttft_s", stat="mean", scale=1e3),
        Shown("sim ttft", "ttft_s mean", scale=1e3, is_predicted=True),
        Shown("tpot ms", "itl_s", stat="mean", scale=1e3),
        Shown("sim tpot", "itl_s mean", scale=1e3, is_predicted=True),
        Shown("itl p95 ms", "itl_p95_s", stat="mean", scale=1e3),
        Shown("sim itl p95", "itl_p95_s mean", scale=1e3, is_predicted=True),
        Shown("goodput/s", "goodput"),
        Shown("local", "local_share", is_share=True),
        Shown("sim local", "local_share", is_share=True, is_predicted=True),
        *(each for each in AR.shown if each.metric != "local_share"),
        Shown("lost", "lost_workers"),
    ),
)
"""ITL is the 95th percentile of a round's gaps, TPOT their mean; both are averaged over rounds."""
