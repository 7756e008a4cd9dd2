"""``repro trace``: what a file of requests or sessions holds, before you serve it."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, ClassVar

import typer

from engines.cluster.prefix import Reuse, reuse_of
from engines.errors import UserError, require
from engines.knobs import Checked, Tokens
from repro.cli import options as opt
from repro.cli.output import number, percent, print_json, print_table, say
from repro.cli.sweep import check_regular
from repro.runs.family import distribution
from repro.workloads.knobs import TimeUnit
from repro.workloads.rounds import Trace, TraceFile

SIZES = (1_000, 10_000, 50_000)
_BIN_S = 60.0


@dataclass(frozen=True, kw_only=True)
class ReadAs(Checked):
    panel: ClassVar[str] = opt.WORKLOAD
    columns: str | None = None
    """Which column of the file holds what, as repro bench takes it."""
    time_unit: TimeUnit | None = None
    """Unit of the file's times, if its columns do not tell it: s, ms, us or ns."""
    sort: bool = False
    """Sort the file's rows by their times."""
    gen_length: Tokens | None = None
    """Length in tokens of answers whose length the file does not tell."""
    cache_blocks: list[int] | None = None
    """Size of a prefix cache, in the file's own blocks; several times [default: 1000, 10000, 50000]."""


def trace(
    *,
    file: Annotated[
        Path,
        typer.Argument(help="Requests or sessions, as repro bench takes them for --workload: CSV, JSON or parquet."),
    ],
    read: ReadAs,
    json: opt.Json = False,
) -> None:
    """Show a file's time window, rates and lengths, and how much of its prompts a prefix cache could reuse."""
    from repro.workloads.table import read_trace

    check_regular("file", file)
    sizes = tuple(dict.fromkeys(read.cache_blocks or SIZES))
    require(min(sizes) >= 1, f"cache_blocks={min(sizes)} must be at least 1: a cache holds some blocks")
    trace_file = TraceFile(
        where=str(file), columns=read.columns, time_unit=read.time_unit, sort=read.sort, gen_length=read.gen_length
    )
    facts = facts_of(read_trace(trace_file), sizes)
    if facts["reuse"] is None and read.cache_blocks is not None:
        reason = next((remark for remark in facts["remarks"] if remark.startswith("hash_ids")), "it has no hash_ids")
        raise UserError(f"cache_blocks={read.cache_blocks} has no effect on {file.name}: {reason}: leave it out")
    if json:
        print_json(facts)
    else:
        _print(facts)


def facts_of(trace: Trace, sizes: Sequence[int]) -> dict[str, Any]:
    """Return the facts of a trace, as JSON holds them; ``sizes`` are cache sizes in blocks."""
    rounds = [turn for session in trace.sessions for turn in session.rounds]
    answers = [turn.decode_tokens for turn in rounds if turn.decode_tokens is not None]
    return {
        "file": trace.origin.location,
        "revision": trace.origin.revision,
        "columns": dict(trace.columns),
        "num_sessions": len(trace.sessions),
        "num_rounds": len(rounds),
        "num_dropped": trace.num_dropped,
        "remarks": [*trace.remarks, *filter(None, [trace.unclear]), *_order_remarks(trace)],
        "times": _times_of(trace),
        "prompt_len": distribution([turn.prefill_tokens for turn in rounds]),
        "gen_length": distribution(answers) if answers else None,
        "reuse": _reuse_of(trace, sizes),
    }


def _order_remarks(trace: Trace) -> list[str]:
    stamps = [session.arrival_s for session in trace.sessions if session.arrival_s is not None]
    if all(earlier <= later for earlier, later in pairwise(stamps)):
        return []
    return ["times fall, and blocks are counted in the file's order: sort the file, or give --sort"]


def _times_of(trace: Trace) -> dict[str, Any] | None:
    """Facts about the arrival times of sessions; None if there are no times, or their unit is unknown."""
    arrivals_s = sorted(session.arrival_s for session in trace.sessions if session.arrival_s is not None)
    if trace.time is None or trace.unclear is not None or not arrivals_s:
        return None
    span_s = arrivals_s[-1] - arrivals_s[0]
    gaps = distribution([later - earlier for earlier, later in pairwise(arrivals_s)])
    in_bins = [0] * (int(span_s / _BIN_S) + 1)
    for arrival_s in arrivals_s:
        in_bins[int((arrival_s - arrivals_s[0]) / _BIN_S)] += 1
    return {
        "column": trace.time,
        "unit": trace.time_unit,
        "span_s": span_s,
        "per_s": (len(arrivals_s) - 1) / span_s if span_s else None,
        "most_in_a_minute": max(in_bins),
        "gap_variation": gaps["std"] / gaps["mean"] if gaps["mean"] and gaps["std"] is not None else None,
    }


def _reuse_of(trace: Trace, sizes: Sequence[int]) -> dict[str, Any] | None:
    """How much of the prompts caches would reuse, with prompts in the file's order. None if the file names no blocks."""
    block, prompts = None, []
    for session in trace.sessions:
        if session.prefix is None:
            continue
        block, tokens = session.prefix.block_tokens, 0
        for names, (prefill, decode, _) in zip(session.prefix.rounds, session.rounds, strict=True):
            prompts.append((names, tokens + prefill))
            tokens += prefill + (decode or 0)
    if block is None:
        return None
    reuse = {size: reuse_of(prompts, block, size) for size in (None, *sizes)}
    return {
        "block_tokens": block,
        "num_prompts": len(prompts),
        "num_blocks": reuse[None].num,
        "num_distinct": len({name for names, _ in prompts for name in names}),
        "endless": _shares(reuse[None]),
        "caches": [{"blocks": size, **_shares(reuse[size])} for size in sizes],
    }


def _shares(reuse: Reuse) -> dict[str, float | None]:
    return {
        "of_blocks": reuse.found / reuse.num if reuse.num else None,
        "of_tokens": reuse.found_tokens / reuse.num_tokens if reuse.num_tokens else None,
    }


def _print(facts: dict[str, Any]) -> None:
    times, reuse = facts["times"], facts["reuse"]
    rows = [
        ("sessions, rounds", f"{facts['num_sessions']:,}, {facts['num_rounds']:,}"),
        ("rows left out", f"{facts['num_dropped']:,}"),
    ]
    if times is not None:
        rows += [
            ("times", f"{times['column']}, read in {times['unit']}"),
            ("window", f"{times['span_s']:,.6g} s"),
            ("sessions a second", "-" if times["per_s"] is None else f"{times['per_s']:,.4g}"),
            ("most in a minute", f"{times['most_in_a_minute']:,}"),
            ("variation of gaps", number(times["gap_variation"], 2)),
        ]
    for name in ("prompt_len", "gen_length"):
        if (lengths := facts[name]) is not None:
            rows += [(f"{name} {part}", number(lengths[part])) for part in ("mean", "p50", "p90", "p99", "max")]
    if reuse is not None:
        rows.append(
            ("blocks", f"{reuse['num_blocks']:,} of {reuse['block_tokens']} tokens, {reuse['num_distinct']:,} distinct")
        )
        kinds = [("endless", reuse["endless"]), *((f"{cache['blocks']:,} blocks", cache) for cache in reuse["caches"])]
        for name, shares in kinds:
            text = f"{percent(shares['of_blocks'])} of blocks, {percent(shares['of_tokens'])} of tokens"
            rows.append((f"reuse, {name}", text))
    print_table(facts["file"], ("what", "value"), rows)
    for remark in facts["remarks"]:
        say(remark)
