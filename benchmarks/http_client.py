"""How truly a client measures: a server of known truth, driven as 'repro bench --url' does: python benchmarks/http_client.py --help

    error   measured minus true: of the time to the first piece, from sending, and of every gap between two pieces. True is
            what the server says of its own clock reading, in a process of its own.
    figure  the same of what a run reports: the mean and percentiles measured minus those that are true
    late    how long after its due time a request was sent

Needs the extra http.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from common import Rows, parser_of, run

from repro.paths import REPO
from repro.runs.drivers.http import Ask, Exchange, Reply, drive_http
from repro.systems.http.endpoint import Endpoint
from repro.workloads.draws import ArrivalConfig, arrival_times


@dataclass(frozen=True)
class ClientRequest:
    """One request; its seed tells it apart."""

    session_id: int
    arrival_s: float
    num_tokens: int
    delays_s: tuple[float, ...] = (0.0,)

    def ask(self, turn: int, replies: Sequence[Reply]) -> Ask:
        body = {
            "model": "mock",
            "prompt": [1, 2, 3],
            "max_tokens": self.num_tokens,
            "seed": self.session_id,
            "stream": True,
        }
        return Ask(body=body, prompt_len=3, asked_tokens=self.num_tokens)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--rate", type=float, default=100.0, help="requests/s")
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--tokens", type=int, default=20)
    parser.add_argument("--ttft-ms", type=float, default=50.0)
    parser.add_argument("--gap-ms", type=float, default=10.0)
    options = parser.parse_args()
    times_s = (str(ms / 1e3) for ms in (options.ttft_ms, options.gap_ms))
    command = [sys.executable, str(REPO / "tests/support/mock_openai.py"), *times_s]
    mock = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert mock.stdout is not None
    url = mock.stdout.readline().strip()
    num = round(options.rate * options.seconds)
    times = arrival_times(ArrivalConfig(kind="poisson", rate=options.rate), num, 0)
    exchanges = asyncio.run(drive(url, [ClientRequest(i, float(t), options.tokens) for i, t in enumerate(times)]))
    said, _ = mock.communicate()
    found = errors_of(exchanges, json.loads(said), options.rate)
    print(json.dumps(found, indent=2))
    Rows(options.json).add(found)


async def drive(url: str, requests: Sequence[ClientRequest]) -> list[Exchange]:
    async with Endpoint(url=url).sending() as send:
        for _ in range(3):
            reply = await send(ClientRequest(-1, 0.0, 2).ask(0, ()).body, asyncio.get_running_loop().time)
            assert reply.chunks_s, reply.error
        return await drive_http(requests, send)


def errors_of(exchanges: Sequence[Exchange], truth: Mapping[str, Any], rate: float) -> dict[str, Any]:
    """Errors of each piece's time: the mock says when it sent it."""
    true = {
        seed: (begun, sent)
        for seed, begun, sent in zip(truth["seed"], truth["received_s"], truth["sent_s"], strict=True)
    }
    ttft, gaps, tpot, late = [], [], [], []
    true_ttft, true_gaps = [], []
    for exchange in exchanges:
        assert exchange.reply is not None
        assert exchange.sent_s is not None
        received, sent = true[exchange.session_id]
        stamps = np.array(exchange.reply.chunks_s)
        assert len(stamps) == len(sent), exchange.error
        true_ttft.append(sent[0] - received)
        ttft.append(stamps[0] - exchange.sent_s)
        true_gaps += np.diff(sent).tolist()
        gaps += np.diff(stamps).tolist()
        tpot.append((stamps[-1] - stamps[0] - (sent[-1] - sent[0])) / (len(sent) - 1))
        late.append(exchange.sent_s - exchange.due_s)
    first, between = _said(np.subtract(ttft, true_ttft)), _said(np.subtract(gaps, true_gaps))
    known = {"rate": rate, "num_requests": len(exchanges), "ttft_ms": first, "gap_ms": between, "tpot_ms": _said(tpot)}
    first, between = _between(_said(ttft), _said(true_ttft)), _between(_said(gaps), _said(true_gaps))
    return {**known, "ttft_figure_ms": first, "gap_figure_ms": between, "late_ms": _said(late)}


def _said(values: Sequence[float] | np.ndarray) -> dict[str, float]:
    ms = 1e3 * np.asarray(values)
    found = {"mean": ms.mean(), "p50": np.percentile(ms, 50), "p99": np.percentile(ms, 99), "most": np.abs(ms).max()}
    return {name: round(float(value), 3) for name, value in found.items()}


def _between(measured: Mapping[str, float], true: Mapping[str, float]) -> dict[str, float]:
    return {name: round(value - true[name], 3) for name, value in measured.items() if name != "most"}


if __name__ == "__main__":
    run(main)
