"""vLLM's own order of prefills against LAPS's and Reserve's in the same vLLM: python benchmarks/vllm_policies.py --help

Short prompts arrive at a rate, and a long one now and then; answers are short. Each policy serves the same requests, in a vLLM that
is started for it. Shown are TTFTs of short and of long prompts, and whether vLLM admitted the requests in the order in which the
policy object, asked by itself at the same moments, takes them. Every repeat has arrivals of its own, the same for all policies, which
take turns at being the first; means over repeats have Student's 95 % intervals, and so have ratios to the first policy, taken
within repeats. How many cores others kept busy meanwhile is told. Needs 'repro install vllm', and a machine that does nothing else.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from common import Rows, parser_of, run

from baselines.servers.admission import AdmissionConfig, replay
from baselines.servers.launch import SERVED_NAME
from baselines.servers.vllm import Vllm
from repro.runs.drivers.http import Ask, Exchange, Reply, drive_http
from repro.runs.statistics import Interval, mean_interval
from repro.systems.http.endpoint import Endpoint

FIRST_ID, LAST_ID = 32, 500
"""Ordinary ids of the tiny checkpoint's vocabulary."""
SHOWN = ("short p50", "short p90", "short p99", "long mean")


@dataclass(frozen=True)
class PolicyRequest:
    session_id: int
    arrival_s: float
    num_tokens: int
    max_tokens: int
    delays_s: tuple[float, ...] = (0.0,)

    def ask(self, turn: int, replies: Sequence[Reply]) -> Ask:
        draw = random.Random(f"{self.session_id}/{self.num_tokens}")
        body = {
            "model": SERVED_NAME,
            "prompt": [draw.randint(FIRST_ID, LAST_ID) for _ in range(self.num_tokens)],
            "max_tokens": self.max_tokens,
            "ignore_eos": True,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        return Ask(body=body, prompt_len=self.num_tokens, asked_tokens=self.max_tokens)


@dataclass
class Found:
    policy: str
    repeat: int
    num_failed: int
    short_ms: dict[str, float]
    long_ms: dict[str, float]
    admitted: int | None = None
    """By the log; none of vLLM's own policy."""
    same_order: bool | None = None
    cores_of_others: float = float("nan")
    """That were busy with something else, on the mean while requests were sent."""

    def value(self, shown: str) -> float | None:
        kind, stat = shown.split()
        return (self.short_ms if kind == "short" else self.long_ms).get(stat)


@contextmanager
def others_watched() -> Iterator[list[float]]:
    """Filled at the end with how many cores the machine kept busy with neither this process nor those it has started, the server's
    engine among them."""
    found: list[float] = []
    began, busy = time.monotonic(), _busy_s() - _own_s()
    yield found
    found.append((_busy_s() - _own_s() - busy) / (time.monotonic() - began))


def _busy_s() -> float:
    """Seconds that all cores were busy since the machine started, with those that the host took away."""
    words = Path("/proc/stat").read_text().splitlines()[0].split()[1:9]
    return sum(int(word) for i, word in enumerate(words) if i not in (3, 4)) / os.sysconf("SC_CLK_TCK")


def _own_s() -> float:
    parents: dict[int, int] = {}
    used: dict[int, int] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has just ended
            words = path.read_text().rpartition(")")[2].split()
            process = int(path.parent.name)
            parents[process], used[process] = int(words[1]), sum(map(int, words[11:15]))
    own = {os.getpid()}
    while more := {process for process, parent in parents.items() if parent in own} - own:
        own |= more
    return sum(used.get(process, 0) for process in own) / os.sysconf("SC_CLK_TCK")


def arrivals(options: argparse.Namespace, seed: int) -> list[PolicyRequest]:
    draw = random.Random(seed)
    made, at = [], 0.0
    while at < options.seconds:
        made.append((at, draw.randint(16, 128)))
        at += draw.expovariate(options.rate)
    made += [
        (every * options.long_every + 0.05, options.long_tokens)
        for every in range(int(options.seconds / options.long_every))
    ]
    return [PolicyRequest(i, at, tokens, options.answer) for i, (at, tokens) in enumerate(sorted(made))]


def measure(policy: str, repeat: int, options: argparse.Namespace) -> Found:
    with tempfile.TemporaryDirectory(prefix="repro-policies-") as made:
        folder = Path(made)
        log = folder / "admission.jsonl"
        name, _, tokens = policy.partition(":")
        own: dict[str, Any] = (
            {} if name == "vllm" else {"policy": name, "admission_log": str(log), "policy_settings": options.settings}
        )
        launch = Vllm(max_num_seqs=64, max_num_batched_tokens=int(tokens or options.step_tokens), **own)
        launch.environment.require_installed()
        requests = arrivals(options, repeat)
        with launch.started(folder) as (url, _), others_watched() as cores:
            exchanges = asyncio.run(drive(url, requests))
        found = summary(policy, repeat, requests, exchanges, options.long_tokens)
        found.cores_of_others = round(cores[0], 2)
        if own:
            entries = [json.loads(line) for line in log.read_text().splitlines()]
            done = [name for entry in entries if entry["kind"] == "step" for name in entry["admitted"]]
            found.admitted = len(done)
            found.same_order = done == replay(AdmissionConfig.parse(options.settings, policy=name), entries)
        return found


async def drive(url: str, requests: Sequence[PolicyRequest]) -> list[Exchange]:
    async with Endpoint(url=url).sending() as send:
        for number in range(3):
            await send(PolicyRequest(-1 - number, 0.0, 2048 if number else 64, 4).ask(0, ()).body, time.perf_counter)
        return await drive_http(requests, send)


def summary(
    policy: str, repeat: int, requests: Sequence[PolicyRequest], exchanges: Sequence[Exchange], long: int
) -> Found:
    length = {each.session_id: each.num_tokens for each in requests}
    short, others, failed = [], [], 0
    for each in exchanges:
        if each.error is not None or each.reply is None:
            failed += 1
            continue
        (others if length[each.session_id] == long else short).append(1e3 * (each.reply.chunks_s[0] - each.due_s))
    return Found(policy, repeat, failed, told(short), told(others))


def told(values: Sequence[float]) -> dict[str, float]:
    if not values:
        return {"n": 0}
    points = {f"p{q}": round(float(np.percentile(values, q)), 1) for q in (50, 90, 99)}
    return {"n": len(values), "mean": round(float(np.mean(values)), 1), **points}


def table(rows: Sequence[Found], policies: Sequence[str]) -> str:
    """Means over repeats in ms, each with its interval, and below them ratios to the first policy."""
    by_policy: Mapping[str, dict[int, Found]] = {
        policy: {row.repeat: row for row in rows if row.policy == policy} for policy in policies
    }
    lines = [f"| TTFT, ms | repeats | {' | '.join(SHOWN)} |", "|---|---|" + "---|" * len(SHOWN)]
    for policy, own in by_policy.items():
        values = [[row.value(name) for row in own.values()] for name in SHOWN]
        lines.append(f"| {policy} | {len(own)} | {' | '.join(_said(each, '.0f') for each in values)} |")
    first = by_policy[policies[0]]
    for policy in policies[1:]:
        pairs = [(row, first[repeat]) for repeat, row in by_policy[policy].items() if repeat in first]
        both = [[(row.value(name), base.value(name)) for row, base in pairs] for name in SHOWN]
        ratios = [[own / base if own is not None and base else None for own, base in each] for each in both]
        cells = " | ".join(_said(each, ".2f") for each in ratios)
        lines.append(f"| {policy} / {policies[0]} | {len(pairs)} | {cells} |")
    busy = [row.cores_of_others for row in rows]
    return "\n".join(
        [*lines, f"cores busy with something else: {min(busy):.2f} to {max(busy):.2f} of {os.cpu_count()}"]
    )


def _said(values: Sequence[float | None], form: str) -> str:
    known = [value for value in values if value is not None]
    found: Interval = mean_interval(known)
    if found.mean is None:
        return "-"
    width = "" if found.half_width is None else f" ± {found.half_width:{form}}"
    return f"{found.mean:{form}}{width}"


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument(
        "--policies",
        nargs="+",
        default=["vllm", "vllm:512", "laps", "reserve"],
        help="vllm:512 takes steps of 512 tokens",
    )
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0, help="of the first repeat; the next takes the next")
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--rate", type=float, default=10.0, help="short prompts a second")
    parser.add_argument("--long-every", type=float, default=2.0, help="seconds between long prompts")
    parser.add_argument("--long-tokens", type=int, default=8192)
    parser.add_argument("--step-tokens", type=int, default=2048, help="max_num_batched_tokens")
    parser.add_argument("--answer", type=int, default=4, help="tokens of an answer")
    parser.add_argument("--settings", default="{}", help="policy_settings, a JSON object")
    options = parser.parse_args()
    rows = Rows(options.json)
    for number in range(options.repeats):
        repeat, first = options.seed + number, number % len(options.policies)
        for policy in options.policies[first:] + options.policies[:first]:
            rows.add(measure(policy, repeat, options))
            print(json.dumps(asdict(rows.rows[-1])), flush=True)
    print(table(rows.rows, options.policies))


if __name__ == "__main__":
    run(main)
