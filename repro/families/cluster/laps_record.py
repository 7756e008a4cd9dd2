"""The family of prefill systems, which serve turns of conversations on prefill instances. A run has tables, metrics of turns and steps
(LAPS §4), and checks. TTFT is first token - arrival, and shares are in [0, 1].

A request is one turn, and ends with its first token. The window opens when a tenth of the turns have arrived. In a closed loop it
closes when a client finds no further conversation, so that all clients are busy in it. In an open loop it closes with the last arrival.
Requests that arrive in the window count, however late they finish. All metrics are over these turns, except padding, graphs and busy
time, which are over all steps. A turn that never gets its first token misses the objective.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from math import fsum
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from engines.cluster.record import rows_of
from engines.columns import Values
from engines.laps.cluster import PrefillRun
from repro.families.cluster.system import request_table
from repro.runs.cell import Cell
from repro.runs.family import Compute, Mask, column, distribution, family_in, mask, without_nan
from repro.runs.record import REQUESTS, RunRecord, Table

Floats = npt.NDArray[np.float64]
STEPS, MOVES, INSTANCES = "steps", "moves", "instances"

WARM_UP = 0.1
"""The share of turns that arrive before the window opens."""


class Window(NamedTuple):
    """The time in which arrivals count: [start_s, end_s)."""

    start_s: float
    end_s: float


def window_of(requests: Table, end_s: float, last_sessions: Sequence[int] = ()) -> Window:
    """The window of a run. ``last_sessions`` are the last conversations of the closed loops: the window closes when the first of them
    begins, at the latest at ``end_s``. Without closed loops it closes with the last arrival."""
    arrival = np.asarray(requests["arrival_s"], dtype=np.float64)
    closes_s = float(arrival.max()) if len(arrival) else 0.0
    if last_sessions:
        turns = rows_of(requests, "session_id", "turn", "arrival_s")
        started_s = {session: arrival_s for session, turn, arrival_s in turns if turn == 0}
        closes_s = min(started_s.get(session, end_s) for session in last_sessions)
    arrivals = np.sort(arrival[arrival <= closes_s])
    return Window(float(arrivals[int(WARM_UP * len(arrivals))]), closes_s) if len(arrivals) else Window(0.0, 0.0)


def tables_of(run: PrefillRun, window: Window) -> dict[str, Table]:
    requests = run.requests
    finished = requests["finished_s"]
    is_done = ~np.isnan(np.asarray(finished, dtype=np.float64))
    is_late = np.array([bool(late) for late in requests["violated"]], dtype=bool)
    arrival = np.asarray(requests["arrival_s"], dtype=np.float64)
    counted = (window.start_s <= arrival) & (arrival < window.end_s)
    return {
        REQUESTS: request_table(
            request_id=requests["request_id"],
            arrival_s=requests["arrival_s"],
            admitted_s=requests["started_s"],
            first_output_s=finished,
            finished_s=finished,
            prompt_len=requests["tokens"],
            output_len=Values(np.ones(len(finished), dtype=np.int64)),
            status=Values(is_done.astype(np.int8), names=("unfinished", "ok")),
            violated=Values(is_late | ~is_done),
            counted=Values(counted),
            **{name: requests[name] for name in ("session_id", "turn", "length_class", "history", "instance")},
        ),
        STEPS: run.steps,
        MOVES: run.moves,
        INSTANCES: run.instances,
    }


BUCKETS: tuple[tuple[str, int, float], ...] = (
    ("1-63", 1, 64),
    ("64-255", 64, 256),
    ("256-999", 256, 1000),
    ("1000+", 1000, np.inf),
)
"""Bands of prompt lengths: name, first length and the length above the last. They count tokens before a platform scales lengths."""
BUSY, WAITED = 0.999, 0.5
"""The rate outruns instances that are this busy, if the last quarter of the turns waits this many seconds longer than the first."""

# ---- metrics, each under the name that it has in metrics.csv ----------------------------------------------


def counted(record: RunRecord, length_class: str | None = None) -> Mask:
    """A mask of the turns that count, or of those in a class."""
    is_counted = mask(record, "counted")
    return is_counted if length_class is None else is_counted & mask(record, "length_class", length_class)


def ttft_of(record: RunRecord, chosen: Mask) -> Floats:
    """TTFTs of the chosen turns that finished."""
    return without_nan((column(record, "finished_s") - column(record, "arrival_s"))[chosen])


def violations(record: RunRecord, chosen: Mask) -> float | None:
    is_late = mask(record, "violated")[chosen]
    return float(is_late.mean()) if is_late.size else None


def _seconds_inside(record: RunRecord, begin_s: Floats, end_s: Floats) -> float:
    """The total seconds of these spans that lie in the window."""
    opens_s, closes_s = record.facts["window_s"]
    inside = np.minimum(end_s, closes_s) - np.maximum(begin_s, opens_s)
    return float(inside[inside > 0].sum())


def _over_window(amount: Callable[[RunRecord, float, float], float]) -> Compute:
    """A metric: ``amount`` between the window's ends, divided by the window's length."""

    def compute(record: RunRecord) -> float | None:
        start_s, end_s = record.facts["window_s"]
        return amount(record, start_s, end_s) / (end_s - start_s) if end_s > start_s else None

    return compute


def _over_steps(amount: Callable[[Table], float]) -> Compute:
    def compute(record: RunRecord) -> float | None:
        steps = record.tables[STEPS]
        return amount(steps) if steps["tokens"] else None

    return compute


def _sum(counts: Sequence[int]) -> int:
    return int(np.sum(np.asarray(counts, dtype=np.int64)))


def _finished(record: RunRecord, start_s: float, end_s: float) -> float:
    finished = column(record, "finished_s")
    return float(((start_s <= finished) & (finished < end_s)).sum())


def _waiting_s(record: RunRecord, *_: float) -> float:
    finished = column(record, "finished_s")
    return _seconds_inside(record, column(record, "arrival_s"), np.where(np.isnan(finished), np.inf, finished))


def _moves(record: RunRecord, start_s: float, end_s: float) -> float:
    return 60 * sum(start_s <= time < end_s for time in record.tables[MOVES]["time_s"])


rps, in_system, moves_per_minute = _over_window(_finished), _over_window(_waiting_s), _over_window(_moves)


def tokens_s(record: RunRecord) -> float | None:
    start_s, end_s = record.facts["window_s"]
    begun = column(record, "start_s", STEPS)
    if end_s <= start_s or not len(begun):
        return None
    tokens = column(record, "tokens", STEPS)[(start_s <= begun) & (begun < end_s)]
    return float(tokens.sum()) / (end_s - start_s)


def by_length(record: RunRecord) -> dict[str, dict[str, Any]]:
    is_counted = counted(record)
    tokens = column(record, "prompt_len") / record.facts.get("length_scale", 1.0)
    stats = {}
    for name, low, high in BUCKETS:
        chosen = is_counted & (low <= tokens) & (tokens < high)
        stats[name] = {"violations": violations(record, chosen), **distribution(ttft_of(record, chosen))}
    return stats


def mode_shares(record: RunRecord) -> dict[str, float]:
    kinds = Counter[str]()
    modes = Counter[str](record.tables[STEPS]["mode"])
    for mode, num in modes.items():
        kinds[mode.partition(" ")[0]] += num
    return {kind: kinds[kind] / kinds.total() for kind in ("eager", "fallback", "graph", "rung") if kinds}


def graph_share(record: RunRecord) -> float | None:
    shares = mode_shares(record)
    return shares["graph"] + shares["rung"] if shares else None


def busy_share(record: RunRecord) -> float | None:
    start_s, end_s = record.facts["window_s"]
    if not record.tables[STEPS]["tokens"] or end_s <= start_s:
        return None
    begun = column(record, "start_s", STEPS)
    busy = _seconds_inside(record, begun, begun + column(record, "duration_s", STEPS))
    return busy / (len(record.tables[INSTANCES]["instance"]) * (end_s - start_s))


def _ttft(length_class: str | None = None) -> Compute:
    return lambda record: distribution(ttft_of(record, counted(record, length_class)))


def _late_share(length_class: str | None = None) -> Compute:
    return lambda record: violations(record, counted(record, length_class))


ttft_all_s, ttft_short_s, ttft_long_s = _ttft(), _ttft("short"), _ttft("long")
slo_violations, slo_violations_short, slo_violations_long = _late_share(), _late_share("short"), _late_share("long")
requests_per_step = _over_steps(
    lambda steps: (_sum(steps["num_short"]) + _sum(steps["num_long"])) / len(steps["tokens"])
)
mixed_steps = _over_steps(lambda steps: sum(map(all, rows_of(steps, "num_short", "num_long"))) / len(steps["tokens"]))
padding = _over_steps(lambda steps: _sum(steps["padded_tokens"]) / _sum(steps["tokens"]) - 1)
busy_s = _over_steps(lambda steps: fsum(steps["duration_s"]))

# ---- checks: that a system lost no turn, held its own rules, and obeys Little's law -------------------------------


def _window_is_long_enough(record: RunRecord) -> Iterator[str]:
    num = int(counted(record).sum())
    if num < 10:
        yield f"too few turns count, {num} of at least 10: serve more of them, or fewer clients"


def tokens_are_whole(record: RunRecord) -> Iterator[str]:
    """Every token of a finished turn was computed once."""
    requests, steps, instances = record.requests, record.tables[STEPS], record.tables[INSTANCES]
    if "unfinished" in requests["status"] or record.facts["decode"] != "none":
        return
    requested, computed = _sum(requests["prompt_len"]), _sum(steps["tokens"])
    if requested != computed:
        yield f"{computed} tokens were prefilled of {requested}"
    if sum(instances["num_finished"]) != len(requests["status"]):
        yield f"{sum(instances['num_finished'])} turns finished of {len(requests['status'])}"


def _steps_do_not_overlap(record: RunRecord) -> Iterator[str]:
    steps = record.tables[STEPS]
    by_instance: dict[int, float] = {}
    for instance, start_s, duration_s in rows_of(steps, "instance", "start_s", "duration_s"):
        if start_s < by_instance.get(instance, 0.0) - 1e-9:
            yield f"instance {instance} runs two steps at {start_s:g} s"
            return
        by_instance[instance] = start_s + duration_s


def littles_law(record: RunRecord) -> Iterator[str]:
    """Check Little's law, L = X W. Over a window the two sides may differ only by the turns in the system at its ends. In a closed loop
    we also check that each client is in the system or thinking at all times."""
    start_s, end_s = record.facts["window_s"]
    mean, rate = in_system(record), rps(record)
    times = ttft_of(record, counted(record))
    if mean is None or rate is None or not times.size:
        return
    length_s = end_s - start_s
    arrival, finished = column(record, "arrival_s"), column(record, "finished_s")
    finished = np.where(np.isnan(finished), np.inf, finished)
    at_ends = ((arrival < start_s) & (finished > start_s)) | ((arrival < end_s) & (finished > end_s))
    spill = float(np.minimum(finished - arrival, length_s)[at_ends].sum()) / length_s
    # Arrivals and finishes in the window also differ by the turns at its ends.
    slack = spill + float(times.mean()) * int(at_ends.sum()) / length_s + 1e-6
    if abs(mean - rate * float(times.mean())) > slack:
        yield f"Little's law fails: {mean:.3f} turns in the system, {rate:.3f}/s x {times.mean():.4f} s"
    loops = record.facts["closed_loops"]
    if loops and record.facts["decode"] == "none":
        thinking = record.facts["think_s"]
        idle = np.minimum(finished + thinking, end_s) - np.maximum(finished, start_s)
        num_active = mean + float(idle[idle > 0].sum()) / length_s
        clients = sum(loops)
        if abs(num_active - clients) > 1e-6 * clients + 1e-9:
            yield f"{num_active:.4f} clients are in the system or thinking, of {clients}"


def _keeps_up(record: RunRecord) -> Iterator[str]:
    """Report an open loop whose rate lets the queue grow for as long as it lasts."""
    if record.facts["closed_loops"] or record.facts["is_transient"]:
        return
    busy = busy_share(record)
    arrival = column(record, "arrival_s")
    times = (column(record, "finished_s") - arrival)[np.argsort(arrival)]
    quarter = len(times) // 4
    if busy is None or quarter < 10:
        return
    first, last = np.nanmean(times[:quarter]), np.nanmean(times[-quarter:])
    if busy > BUSY and last > first + WAITED:
        yield (
            f"the rate never drains: TTFT is {first:.2f} s at first and {last:.2f} s at last; lower it, or set transient=true to "
            "read this number of turns alone"
        )


MOST_TRIED = 3000
"""The most turns per instance in a trial of a search."""


def trial(cell: Cell) -> Cell:
    """The cell with at most as many turns as a trial may have."""
    turns, instances = cell.requested.get("num_prompts"), cell.requested.get("num_instances", 1)
    if not isinstance(turns, int) or not isinstance(instances, int) or turns <= MOST_TRIED * instances:
        return cell
    knobs = tuple((name, MOST_TRIED * instances if name == "num_prompts" else value) for name, value in cell.knobs)
    return replace(cell, knobs=knobs)


def score(record: RunRecord) -> tuple[float, ...]:
    """The score of a trial, where less is better. At a rate: the share of late turns, then mean TTFT. In closed loops: minus turns/s,
    which says the same as mean TTFT if clients do not think."""
    if record.facts["closed_loops"]:
        return (-(rps(record) or 0.0),)
    times = ttft_of(record, counted(record))
    late_share = violations(record, counted(record))
    return 1.0 if late_share is None else late_share, float(times.mean()) if times.size else math.inf


PREFILL = family_in(
    Path(__file__).parent,
    "prefill",
    globals(),
    checks=(_window_is_long_enough, tokens_are_whole, _steps_do_not_overlap, littles_law, _keeps_up),
    score=score,
    trial=trial,
    unit="turns",
    ends_at_first_token=True,
)
