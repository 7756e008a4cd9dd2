"""Export stored runs to formats of other tools: llm-d's benchmark report (schema 0.2.1), and a trace of events that Perfetto opens."""

import json
from collections.abc import Iterator, Mapping, Sequence
from heapq import heappop, heappush
from pathlib import Path
from typing import Any, NamedTuple

from engines.errors import RunError, UserError
from repro import __version__
from repro.runs.record import REQUESTS, Table
from repro.runs.store import UNREADABLE, StoredRun, read_run

VERSION = "0.2.1"
_PARTS = {"mean": "mean", "std": "stddev", "p50": "p50", "p90": "p90", "p95": "p95", "p99": "p99", "max": "max"}
"""The parts of a distribution -> their names in the report."""
LATENCIES = {
    "time_to_first_token": ("ttft_s", "s"),
    "time_per_output_token": ("tpot_s", "s/token"),
    "inter_token_latency": ("itl_s", "s/token"),
    "request_latency": ("e2el_s", "s"),
}
"""The report's name of each latency -> our distribution, and the unit in the report."""


def report_of(run: StoredRun) -> dict[str, Any]:
    """Return one run as a benchmark report. It leaves out all that we do not have, and its description gives our definition of times."""
    summary = run.summary
    latency = {
        name: _statistics(summary[ours], units)
        for name, (ours, units) in LATENCIES.items()
        if isinstance(summary.get(ours), Mapping) and summary[ours].get("mean") is not None
    }
    rates = {
        "output_token_rate": (summary.get("throughput_tok_s"), "tokens/s"),
        "request_rate": (summary.get("request_throughput"), "queries/s"),
    }
    requests: Mapping[str, int] = summary["num_requests"]
    lengths = {
        name: {"units": "count", "mean": total / num}
        for name, column in (("input_length", "prompt_len"), ("output_length", "output_len"))
        for num, total in [run.sum_of(column)]
        if num
    }
    aggregate = {
        "requests": {
            "total": sum(requests.values()),
            "failures": requests["failed"],
            "incomplete": requests["unfinished"],
            **lengths,
        },
        "latency": latency,
        "throughput": {name: {"units": unit, "mean": rate} for name, (rate, unit) in rates.items() if rate is not None},
    }
    started, finished = run.provenance.get("started_utc"), run.provenance.get("finished_utc")
    return {
        "version": VERSION,
        "run": {
            "uid": run.file.name.partition(".")[0],
            "time": {"start": started, "end": finished, "duration": f"PT{run.provenance['elapsed_s']:.3f}S"},
            "description": f"{run.obtained} by repro {__version__}; times count from when a request was due",
            "keywords": [run.cell.system, run.cell.dataset, run.cell.platform, run.obtained],
        },
        "scenario": {
            "load": {
                "metadata": {"cfg_id": run.cell.key},
                "standardized": {
                    "tool": "repro",
                    "tool_version": __version__,
                    "source": "unknown",
                    "input_seq_len": {
                        "distribution": "other",
                        "value": lengths["input_length"]["mean"] if lengths else 0,
                    },
                    **({} if run.cell.rate is None else {"rate_qps": run.cell.rate}),
                },
                "native": {"config": run.cell.written()},
            }
        },
        "results": {"request_performance": {"aggregate": aggregate}},
    }


def _statistics(stats: Mapping[str, float | None], units: str) -> dict[str, Any]:
    return {"units": units} | {theirs: stats[ours] for ours, theirs in _PARTS.items() if stats.get(ours) is not None}


# -- traces -----------------------------------------------------------------------------------------------


class Span(NamedTuple):
    """An event for each row of a table. All fields are names of columns."""

    start: str
    end: str = ""
    """The column of end times, or of durations if it is ``duration_s``."""
    track: str = ""
    title: str = ""
    """The column that names the event, or the name itself."""


SPANS: Mapping[str, Sequence[Span]] = {
    REQUESTS: (
        Span("arrival_s", "admitted_s", title="waits"),
        Span("admitted_s", "first_output_s", title="first output"),
        Span("first_output_s", "finished_s", title="other output"),
    ),
    "steps": (Span("start_s", "duration_s", "instance", "step"),),
    "tasks": (Span("started_s", "finished_s", "worker_id", "kind"),),
    "transfers": (Span("start_s", "end_s", "source", "content"),),
}


def trace_of(path: Path) -> tuple[str, int]:
    """Return the JSON of a run's trace, and its number of events. Raises UserError if the file holds no whole run."""
    try:
        run = read_run(path)
        events = [*_events(run)]
    except RunError as error:
        raise UserError(f"run={str(path)!r}: {error}") from error
    except UNREADABLE as error:
        raise UserError(f"run={str(path)!r} holds no run ({error}): give a file of a --result-dir") from error
    other = {"cell": run.cell.written(), "obtained": run.obtained}
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms", "otherData": other}), len(events)


def _events(run: StoredRun) -> Iterator[dict[str, Any]]:
    """Yield complete events in microseconds. Each table is a process. Each worker is a thread, as is each lane of requests under way."""
    tables = [name for name in SPANS if name in run.family.columns]
    for process, name in enumerate(tables, start=1):
        yield {"ph": "M", "pid": process, "name": "process_name", "args": {"name": name}}
        table = run.record.tables[name]
        length = len(next(iter(table.values()), ()))
        lanes = _lanes(table) if name == REQUESTS else []
        for row in range(length):
            values = {column: table[column][row] for column in table if table[column][row] is not None}
            for span in SPANS[name]:
                start = values.get(span.start)
                if name == REQUESTS and span.start == "admitted_s" and start is None:
                    start = values.get("arrival_s")
                if start is None or values.get(span.end) is None:
                    continue
                took = values[span.end] if span.end == "duration_s" else values[span.end] - start
                yield {
                    "ph": "X",
                    "pid": process,
                    "tid": lanes[row] if lanes else int(values.get(span.track, 0)),
                    "ts": round(1e6 * start, 3),
                    "dur": round(1e6 * max(0.0, took), 3),
                    "name": str(values.get(span.title, span.title)),
                    "cat": name,
                    "args": {column: value for column, value in values.items() if not column.endswith("_s")},
                }


def _lanes(requests: Table) -> list[int]:
    """For each request, the first lane that is free when it arrives."""
    lanes, busy, free = [0] * len(requests["request_id"]), list[tuple[float, int]](), list[int]()
    arrivals = sorted(range(len(lanes)), key=lambda row: requests["arrival_s"][row])
    for row in arrivals:
        arrived, ended = requests["arrival_s"][row], requests["finished_s"][row]
        while busy and busy[0][0] <= arrived:
            heappush(free, heappop(busy)[1])
        lane = heappop(free) if free else len(busy)
        lanes[row] = lane
        heappush(busy, (float("inf") if ended is None else ended, lane))
    return lanes
