"""What is checked of a run of prefill instances: that a system lost no turn, held its own rules, and obeys Little's law."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from engines.ar.record import rows_of
from repro.runs.record import RunRecord
from repro.systems.laps.columns import INSTANCES, STEPS
from repro.systems.laps.log import Window
from repro.systems.laps.metrics import busy_share, counted, in_system, rps, ttft_of
from repro.systems.simulated import column

BUSY, WAITED = 0.999, 0.5
"""Instances this busy while the last quarter of the turns waits this much longer than the first: the rate outruns them."""


def _window_is_long_enough(record: RunRecord) -> Iterator[str]:
    num = int(counted(record).sum())
    if num < 10:
        yield f"{num} turns count: give more num_prompts, or fewer clients"


def tokens_are_whole(record: RunRecord) -> Iterator[str]:
    """Every token of a finished turn was computed once."""
    requests, steps, instances = record.requests, record.tables[STEPS], record.tables[INSTANCES]
    if "unfinished" in requests["status"] or record.facts["decode"] != "none":
        return
    asked, computed = sum(requests["prompt_len"]), sum(steps["tokens"])
    if asked != computed:
        yield f"{computed} tokens were prefilled of {asked}"
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
    """L = X W. Over a window the two sides differ by turns that are in the system at its ends, no more; a closed loop besides has
    each of its clients in the system or thinking, all the time."""
    start_s, end_s = Window(*record.facts["window_s"])
    mean, rate = in_system(record), rps(record)
    times = ttft_of(record, counted(record))
    if mean is None or rate is None or not times.size:
        return
    length_s = end_s - start_s
    arrival, finished = column(record, "arrival_s"), column(record, "finished_s")
    finished = np.where(np.isnan(finished), np.inf, finished)
    at_ends = ((arrival < start_s) & (finished > start_s)) | ((arrival < end_s) & (finished > end_s))
    spill = float(np.minimum(finished - arrival, length_s)[at_ends].sum()) / length_s
    # What arrived and what finished in the window differ by those at its ends too.
    slack = spill + float(times.mean()) * int(at_ends.sum()) / length_s + 1e-6
    if abs(mean - rate * float(times.mean())) > slack:
        yield f"Little's law fails: {mean:.3f} turns in the system, {rate:.3f}/s x {times.mean():.4f} s"
    loops = record.facts["closed_loops"]
    if loops and record.facts["decode"] == "none":
        thinking = record.facts["think_s"]
        idle = np.minimum(finished + thinking, end_s) - np.maximum(finished, start_s)
        held = mean + float(idle[idle > 0].sum()) / length_s
        clients = sum(loops)
        if abs(held - clients) > 1e-6 * clients + 1e-9:
            yield f"{held:.4f} clients are in the system or thinking, of {clients}"


def _keeps_up(record: RunRecord) -> Iterator[str]:
    """An open loop's rate that grows the queue for as long as it lasts."""
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


PREFILL_CHECKS = (_window_is_long_enough, tokens_are_whole, _steps_do_not_overlap, littles_law, _keeps_up)
