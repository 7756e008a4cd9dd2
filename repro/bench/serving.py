"""What serving over HTTP costs: python -m repro.bench.serving --help

    overhead   the same requests through the engine in this process and through 'repro serve': tokens/s, and processor
               seconds of the engine, which a busy machine does not change. The engine has one core, server and clients
               the other; there are more clients than requests in a batch, and each asks again once it is answered. With
               --system ar the autoregressive engine and a random tiny model.
    memory     100 clients, a tenth of which leave: 20,000 requests of all lengths up to 200 tokens, each with a short
               answer. Every 500 requests the memory of the engine's process and of the server's is a row. The run fails
               where memory at the end is 5 % above that after 2,000 requests, or a request is lost. With --system
               block-diffusion the embedded model of blocks.

On the CPU, with the embedded model. Needs the extras server and http.
"""

import asyncio
import json
import os
import random
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from threading import Thread
from typing import Any

import aiohttp

from baselines.servers.checkpoint import write_tiny
from repro.bench.common import Rows, count, parser_of, run, said

LENGTH = 32
SETTINGS = ("--gen-length", "32", "--block-length", "16", "--steps", "32")
CAUSAL = ("--model", "tiny-qwen2", "--weights", "random", "--gen-length", "32", "--kv-tokens", "65536", "--no-keep-kv")
SMALL_POOL = ("--gen-length", "32", "--max-model-len", "512", "--kv-tokens", "2560")
PROMPTS = tuple(f"Story: The sky was green. Ben has {i} coins. Ida has {i + 2} keys.\nAnswer:" for i in range(1, 13))

TICK = os.sysconf("SC_CLK_TCK")


# -- the server as a process under measurement --------------------------------------------------------------


@dataclass
class ServerProcess:
    """``repro serve``, and what the system says of it."""

    process: subprocess.Popen[bytes]
    url: str
    engine_pid: int

    def metrics(self) -> dict[str, float]:
        """By name and labels, as they are written, without their common beginning."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=60) as response:
            lines = [line for line in response.read().decode().splitlines() if line[0] != "#"]
        found = (line.rpartition(" ") for line in lines)
        return {name.removeprefix("repro_"): float(value) for name, _, value in found}


@contextmanager
def serving(*options: str, cores: tuple[int, int] | None = None) -> Iterator[ServerProcess]:
    """``cores`` are those of the engine and of the server."""
    log_r, log_w = os.pipe()
    command = [sys.executable, "-m", "repro", "serve", "--port", "0", *options]
    process = subprocess.Popen(command, stderr=log_w, env={**os.environ, "OMP_NUM_THREADS": "1"})
    os.close(log_w)
    try:
        log = os.fdopen(log_r)
        line = next(line for line in log if line.startswith("ready: "))
        # What it says from now on nobody needs, but unread it would hold it up.
        Thread(target=log.read, daemon=True).start()
        url = line.split()[1].removesuffix("/v1,")
        (engine_pid,) = children(process.pid)
        if cores is not None:
            os.sched_setaffinity(engine_pid, {cores[0]})
            os.sched_setaffinity(process.pid, {cores[1]})
        yield ServerProcess(process, url, engine_pid)
    finally:
        with suppress(ProcessLookupError):
            process.terminate()
        process.wait()


def children(pid: int) -> list[int]:
    """Whichever of its threads has started them."""
    threads = Path(f"/proc/{pid}/task").iterdir()
    return [int(child) for thread in threads for child in (thread / "children").read_text().split()]


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICK


def rss_mb(pid: int) -> float:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


# -- overhead ---------------------------------------------------------------------------------------------------


def cost(where: str, num: int, seconds: float, engine_cpu_s: float, passes: float, busy_s: float) -> dict[str, Any]:
    """A row. ``outside_steps`` is the share of the time in which the engine was in no step."""
    return {
        "where": where,
        "tokens_per_s": LENGTH * num / seconds,
        "engine_cpu_s": engine_cpu_s,
        "forward_passes": passes,
        "seconds": seconds,
        "outside_steps": 1 - busy_s / seconds,
    }


def asked(num: int) -> list[str]:
    return [PROMPTS[i % len(PROMPTS)] for i in range(num)]


_DIFFUSION = """
from engines.dllm.plan import Request
from repro.serving import DllmModel
model = DllmModel.of(system='dllm-serve', platform='cpu-tiny',
                     knobs={'gen_length': 32, 'block_length': 16, 'steps': 32}, name=None)
codec, generation = model.codec(), model.generation({'ignore_eos': True})
deployment = model._system.deployment(model.settings, [model.max_model_len])
with deployment.serving() as (engine, _):
    def run(prompts):
        busy = steps = 0
        for i, prompt in enumerate(prompts):
            ids = codec.encode(prompt)
            engine.submit(Request(request_id=i, prompt_len=len(ids), prompt_ids=ids, generation=generation))
        while (record := engine.step()) is not None:
            busy, steps = busy + record.duration_s, steps + 1
            for done in record.done.finished: engine.take_output(done)
        return steps, busy
    measure(run)
"""
_CAUSAL = """
import numpy as np
from time import perf_counter
from engines.cluster.sessions import OpenLoop, Round, Session
from engines.ar.torch.engine import Engine
from engines.policies.batching import Chunked
from repro.serving_ar import ArModel, ArSettings
model = ArModel.of(ArSettings(model='tiny-qwen2', weights='random', kv_tokens=65536, gen_length=32), None)
with model.serving() as served:
    executor = served._worker.executor
    def run(prompts):
        ids = [np.frombuffer(prompt.encode(), dtype=np.uint8).astype(np.int64) for prompt in prompts]
        sessions = [Session(i, 0.0, (Round(len(each), 32),)) for i, each in enumerate(ids)]
        engine = Engine(executor=executor, batching=Chunked(), prompts=lambda session, _: ids[session.session_id])
        steps = engine.run(OpenLoop(sessions=sessions)).steps
        return len(steps['run_s']), sum(steps['run_s'])
    measure(run)
"""
_MEASURE = """
import json, os, sys, time
os.sched_setaffinity(0, {0})
prompts = json.load(sys.stdin)
def measure(run):
    run(prompts[:8])
    cpu, wall = time.process_time(), time.perf_counter()
    steps, busy = run(prompts)
    print(json.dumps([time.perf_counter() - wall, time.process_time() - cpu, steps, busy]))
"""


def in_process(num: int, system: str) -> dict[str, Any]:
    """In a process of its own, on core 0; a causal model by the engine's own run to the end."""
    done = subprocess.run(
        [sys.executable, "-c", _MEASURE + (_CAUSAL if system == "ar" else _DIFFUSION)],
        input=json.dumps(asked(num)).encode(),
        stdout=subprocess.PIPE,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=True,
    )
    seconds, cpu, steps, busy = json.loads(done.stdout)
    return cost("in process", num, seconds, cpu, steps, busy)


def over_http(num: int, system: str, num_clients: int) -> dict[str, Any]:
    os.sched_setaffinity(0, {1})
    options, model = (CAUSAL, "tiny-qwen2") if system == "ar" else (SETTINGS, "tiny")
    with serving(*options, "--max-queue", str(2 * num), cores=(0, 1)) as server:

        async def load(prompts: Sequence[str]) -> float:
            left = iter(prompts)
            async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
                started = time.perf_counter()

                async def client() -> None:
                    for prompt in left:
                        # The random model has no tokenizer.
                        ids = list(prompt.encode()) if system == "ar" else prompt
                        body = {"model": model, "prompt": ids, "ignore_eos": True, "seed": 0}
                        async with session.post(f"{server.url}/v1/completions", json=body) as response:
                            said = await response.json()
                            assert said["usage"]["completion_tokens"] == LENGTH, said

                await asyncio.gather(*(client() for _ in range(num_clients)))
                return time.perf_counter() - started

        asyncio.run(load(asked(8)))
        before, cpu = server.metrics(), cpu_s(server.engine_pid)
        seconds = asyncio.run(load(asked(num)))
        cpu = cpu_s(server.engine_pid) - cpu
        after = server.metrics()
    os.sched_setaffinity(0, set(range(os.cpu_count() or 1)))
    passes, busy = (after[name] - before[name] for name in ("forward_passes_total", "engine_busy_seconds_total"))
    return cost("over HTTP", num, seconds, cpu, passes, busy)


# -- memory -----------------------------------------------------------------------------------------------------

ROW_EVERY, SETTLED_AFTER, MOST_GROWTH = 500, 2000, 1.05
LONGEST_PROMPT = 200
"""Tokens, of which the embedded tokenizer makes one of every character or two."""


async def memory(
    server: ServerProcess, num: int, num_clients: int, seed: int, add: Callable[[dict[str, Any]], None]
) -> None:
    """Rows of resident memory, while clients of all kinds come and go."""
    drawn = random.Random(seed)
    url, num_ended, lost = f"{server.url}/v1/completions", 0, 0
    left = iter(drawn.choices(("whole", "stream", "leave"), (6, 3, 1), k=num))
    started = time.perf_counter()

    async def one(session: aiohttp.ClientSession, kind: str) -> bool:
        """Whether it was answered, or its client left."""
        prompt = [drawn.randrange(3, 250) for _ in range(drawn.randint(1, LONGEST_PROMPT))]
        body = {"model": "tiny", "prompt": prompt, "max_tokens": drawn.randint(1, 16), "ignore_eos": True}
        request = session.post(url, json={**body, "stream": kind != "whole"})
        if kind == "leave":
            with suppress(TimeoutError):
                async with asyncio.timeout(drawn.uniform(0, 0.5)), request as response:
                    await response.read()
            return True
        async with request as response:
            content = await response.read()
            return response.status == 200 and (kind == "whole" or content.endswith(b"[DONE]\n\n"))

    async def client(session: aiohttp.ClientSession) -> None:
        nonlocal num_ended, lost
        for kind in left:
            is_answered = await one(session, kind)
            lost += not is_answered
            num_ended += 1
            if num_ended % ROW_EVERY == 0:
                engine_mb, server_mb = (round(rss_mb(pid), 1) for pid in (server.engine_pid, server.process.pid))
                seconds = round(time.perf_counter() - started, 1)
                sizes = {"engine_mb": engine_mb, "server_mb": server_mb}
                add({"requests": num_ended, **sizes, "lost": lost, "seconds": seconds})

    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as session:
        await asyncio.gather(*(client(session) for _ in range(num_clients)))


def is_flat(rows: Sequence[Mapping[str, Any]]) -> bool:
    """No request was lost, and neither process has grown by more than a twentieth since it had settled."""
    settled = [row for row in rows if row["requests"] >= SETTLED_AFTER]
    sizes = [[row[name] for row in settled] for name in ("engine_mb", "server_mb")]
    return bool(settled) and not settled[-1]["lost"] and all(max(each) <= MOST_GROWTH * each[0] for each in sizes)


@contextmanager
def target(system: str) -> Iterator[tuple[str, ...]]:
    """Options of the server whose memory is watched."""
    if system == "block-diffusion":
        yield "--model", "tiny-block", "--served-model-name", "tiny"
        return
    if system != "ar":
        yield SETTINGS
        return
    with tempfile.TemporaryDirectory() as folder:
        yield ("--model", str(write_tiny(Path(folder))), "--served-model-name", "tiny", *SMALL_POOL)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("what", choices=("overhead", "memory"))
    parser.add_argument("--system", choices=("dllm-serve", "ar", "block-diffusion"), default="dllm-serve")
    parser.add_argument("--requests", type=count, help="[default: 512 of overhead, 20000 of memory]")
    parser.add_argument("--repeats", type=count, default=3, help="of overhead")
    parser.add_argument("--clients", type=count, help="[default: 400 of overhead, 100 of memory]")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    rows = Rows(options.json)

    def add(row: dict[str, Any]) -> None:
        rows.add(row)
        print(said(row), flush=True)

    if options.what == "overhead":
        num = options.requests or 512
        for _ in range(options.repeats):
            for measure in (in_process, partial(over_http, num_clients=options.clients or 400)):
                add(measure(num, options.system))
    else:
        with target(options.system) as given, serving(*given) as server:
            asyncio.run(memory(server, options.requests or 20_000, options.clients or 100, options.seed, add))
        if not is_flat(rows.rows):
            raise SystemExit(1)


if __name__ == "__main__":
    run(main)
