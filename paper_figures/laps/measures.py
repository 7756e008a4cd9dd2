"""The numbers of a run by which LAPS's figures compare, and the CSV with all of them."""

from paper_figures.common.figure import Columns, Table, table
from paper_figures.common.panel import ANYWHERE, OF_SHARES, Bounds
from paper_figures.common.runs import Measure, Of, Runs
from paper_figures.laps.contenders import CONTENDERS
from repro.families.cluster.laps_record import BUCKETS
from repro.families.platforms import PrefillPart, platform
from repro.runs.cell import COMPARISON
from repro.runs.store import StoredRun

RPS = Measure(path="rps", label="turns/s", better="higher")
TOKENS_S = Measure(path="tokens_s")
WHOLE_S = Measure(path="end_s")
LATE = Measure(path="slo_violations", label="TTFT over 0.4 s (%)", scale=100, better="lower")
LATE_SHORT, LATE_LONG = (Measure(path=f"slo_violations_{length}", scale=100) for length in ("short", "long"))
MEAN = Measure(path="ttft_all_s/mean", label="mean TTFT (ms)", scale=1e3, better="lower")
P90 = Measure(path="ttft_all_s/p90", scale=1e3, better="lower")
P99 = Measure(path="ttft_all_s/p99", label="P99 TTFT (ms)", scale=1e3, better="lower")
LONGEST = Measure(path="ttft_all_s/max", label="longest TTFT (ms)", scale=1e3, better="lower")
P90_SHORT, P90_LONG = (
    Measure(path=f"ttft_{length}_s/p90", label=f"P90 TTFT, {length} (ms)", scale=1e3, better="lower")
    for length in ("short", "long")
)
LATE_1K = Measure(path="by_length/1000+/violations", label="late above 1,000 tokens (%)", scale=100, better="lower")
P90_1K = Measure(path="by_length/1000+/p90", scale=1e3)
"""For prompts above 1,000 tokens, which pay for an order by length."""
GRAPH_SHARE = Measure(path="graph_share", label="steps by a graph (%)", scale=100)
MOVES = Measure(path="moves_per_minute")

SHARES = (LATE, LATE_1K, GRAPH_SHARE)
CUT = "Intervals of shares are drawn from 0 to 100 %."


def bounds(of: Of) -> Bounds:
    """Return the bounds of a measure, to which intervals are drawn."""
    return OF_SHARES if of in SHARES else ANYWHERE


_SHOWN = frozenset({"model", "num_instances", "clients", "kappa", "basis", COMPARISON})
_OF_LENGTHS = {
    "ttft_mean_ms": "mean",
    "ttft_p90_ms": "p90",
    "ttft_p99_ms": "p99",
    "ttft_max_ms": "max",
    "violations_percent": "violations",
}
"""Column -> statistic, for each range of prompt lengths."""

COLUMNS: Columns[StoredRun] = {
    "model": lambda run: run.cell.knob_values.get("model", platform(run.cell.platform).part(PrefillPart).model),
    "instances": lambda run: run.cell.knob_values.get("num_instances", 1),
    "clients": lambda run: run.cell.knob_values.get("clients"),
    "rate_turns_s": lambda run: run.cell.rate,
    "contender": lambda run: next(
        (each.name for each in CONTENDERS.values() if each.system == run.cell.system), run.cell.system
    ),
    "kappa": lambda run: run.cell.knob_values.get("kappa", 0.0),
    "knobs": lambda run: " ".join(
        f"{name}={value}" for name, value in sorted(run.cell.knob_values.items()) if name not in _SHOWN
    ),
    "chosen": lambda run: " ".join(
        f"{name}={value}" for name, value in run.facts.get("tuned", {}).get("chosen", {}).items()
    ),
    "seed": lambda run: run.cell.seed,
    "rps": RPS,
    "ttft_mean_ms": MEAN,
    "ttft_p90_ms": P90,
    "ttft_p99_ms": P99,
    "ttft_p90_short_ms": P90_SHORT,
    "ttft_p90_long_ms": P90_LONG,
    "ttft_max_ms": LONGEST,
    "violations_percent": LATE,
    "violations_short_percent": LATE_SHORT,
    "violations_long_percent": LATE_LONG,
    **{
        f"{column}_{name}": Measure(path=f"by_length/{name}/{part}", scale=100 if part == "violations" else 1e3)
        for name, _, _ in BUCKETS
        for column, part in _OF_LENGTHS.items()
    },
    "in_system": Measure(path="in_system"),
    "graph_share": Measure(path="graph_share"),
    "padding": Measure(path="padding"),
    "moves_per_minute": MOVES,
    "obtained": lambda run: run.obtained,
    "valid": lambda run: run.validity.valid,
    "run": lambda run: run.cell.key,
}


def csv_of(runs: Runs, **more: Measure) -> Table:
    """One row per run."""
    return table(runs.all, {**COLUMNS, **more})
