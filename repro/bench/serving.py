"""What serving over HTTP costs, and what a server survives: python -m repro.bench.serving --help

    overhead   the same requests through the engine in this process and through 'repro serve': tokens/s, and processor
               seconds of the engine, which a busy machine does not change. The engine has one core, server and clients
               the other; there are more clients than requests in a batch, and each asks again once it is answered. With
               --system ar the autoregressive engine and a random tiny model.
    attack     64 clients: whole answers, streams, clients that leave, prompts that do not fit, bodies that are no JSON.
               Every answer is compared with the one that the same prompt got alone; then the server must hold nothing.
               Then the same again with SIGTERM in the middle: what was taken is answered. With --system ar a random Qwen2
               with the embedded tokenizer, in a pool that half the clients fill.
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
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from threading import Thread
from typing import Any

import aiohttp

from baselines.servers.checkpoint import write_tiny
from repro.bench.common import Rows, count, parser_of, run

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


@dataclass
class Cost:
    where: str
    tokens_per_s: float
    engine_cpu_s: float
    forward_passes: int
    seconds: float
    outside_steps: float
    """Share of the time in which the engine was in no step."""


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


def in_process(num: int, system: str) -> Cost:
    """In a process of its own, on core 0; a causal model by the engine's own run to the end."""
    done = subprocess.run(
        [sys.executable, "-c", _MEASURE + (_CAUSAL if system == "ar" else _DIFFUSION)],
        input=json.dumps(asked(num)).encode(),
        stdout=subprocess.PIPE,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=True,
    )
    seconds, cpu, steps, busy = json.loads(done.stdout)
    return Cost("in process", LENGTH * num / seconds, cpu, steps, seconds, 1 - busy / seconds)


def over_http(num: int, system: str, num_clients: int) -> Cost:
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
    return Cost("over HTTP", LENGTH * num / seconds, cpu, int(passes), seconds, 1 - busy / seconds)


# -- attack -----------------------------------------------------------------------------------------------------


@dataclass
class Survival:
    phase: str
    outcomes: dict[str, int]
    wrong: int
    """Answers that differ from those the same prompts got alone, or are no proper refusal."""
    lost: int
    """Requests that were taken, whose client stayed, and that were not answered."""
    rows_left: int | None = None
    open_left: int | None = None
    engine_mb: list[float] = field(default_factory=list)
    server_mb: list[float] = field(default_factory=list)
    exit_code: int | None = None
    seconds: float = 0.0


class Attack:
    def __init__(self, server: ServerProcess, num_clients: int, seed: int) -> None:
        self._url, self._num_clients = f"{server.url}/v1/completions", num_clients
        self._random = random.Random(seed)
        self._expected: dict[str, str] = {}
        self.outcomes: Counter[str] = Counter()
        self.wrong = self.lost = 0
        self.num_ended = 0

    async def learn(self, session: aiohttp.ClientSession) -> None:
        """What every prompt gets alone."""
        for prompt in PROMPTS:
            async with session.post(self._url, json=self._body(prompt)) as response:
                said = await response.json()
                assert response.status == 200, said
                self._expected[prompt] = said["choices"][0]["text"]

    def _body(self, prompt: str, **more: Any) -> dict[str, Any]:
        return {"model": "tiny", "prompt": prompt, "seed": 0, **more}

    def _stops(self, prompt: str) -> list[str]:
        """Two, of which its answer has one."""
        answer = self._expected[prompt]
        return ["####", next(c for c in answer[len(answer) // 2 :] + "3" if c.isascii() and c.isprintable())]

    async def run(self, session: aiohttp.ClientSession, num: int) -> None:
        kinds = self._random.choices(
            ("whole", "stream", "stop", "leave", "oversize", "malformed"), (50, 20, 5, 15, 5, 5), k=num
        )
        left = iter(kinds)

        async def client() -> None:
            for kind in left:
                try:
                    await self._one(session, kind)
                except aiohttp.ClientConnectorError:
                    self.outcomes["not connected"] += 1
                except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError, ConnectionResetError):
                    # Before a status came, often before all was sent: the request was not taken.
                    self.outcomes["closed before a status"] += 1
                self.num_ended += 1

        await asyncio.gather(*(client() for _ in range(self._num_clients)))

    async def _one(self, session: aiohttp.ClientSession, kind: str) -> None:
        prompt = self._random.choice(PROMPTS)
        if kind == "leave":
            request = session.post(self._url, json=self._body(prompt, stream=self._random.random() < 0.5))
            with suppress(TimeoutError):
                async with asyncio.timeout(self._random.uniform(0, 0.5)), request as response:
                    await response.read()
            self.outcomes["left"] += 1
            return
        if kind == "oversize":
            content = json.dumps(self._body("coins " * self._random.randint(2000, 20000))).encode()
        elif kind == "malformed":
            content = self._random.choice(
                (b"{", b"[]", b'{"model": "tiny"}', b"\xff\xfe", b'{"model": "tiny", "prompt": 3}')
            )
        elif kind == "stop":
            content = json.dumps(self._body(prompt, stop=self._stops(prompt))).encode()
        else:
            content = json.dumps(self._body(prompt, stream=kind == "stream")).encode()
        headers = {"Content-Type": "application/json"}
        async with session.post(self._url, data=content, headers=headers) as response:
            try:
                text = (await response.read()).decode()
            except aiohttp.ClientPayloadError:
                self.lost += 1
                return
            self._judge(kind, prompt, response.status, text)

    def _judge(self, kind: str, prompt: str, status: int, text: str) -> None:
        self.outcomes[f"{kind}: {status}"] += 1
        if status != 200:
            message = json.loads(text)["error"]["message"]
            refusal = (400, 413) if kind in ("oversize", "malformed") else ()
            self.wrong += status not in (*refusal, 429, 503) or not message or "\n" in message
            return
        if kind == "stream":
            events = [line.removeprefix("data: ") for line in text.splitlines() if line]
            self.lost += events[-1] != "[DONE]"
            said = "".join(json.loads(event)["choices"][0]["text"] for event in events if event != "[DONE]")
        else:
            said = json.loads(text)["choices"][0]["text"]
        wanted = self._expected[prompt]
        if kind == "stop":
            wanted = min((wanted.partition(stop)[0] for stop in self._stops(prompt)), key=len)
        self.wrong += said != wanted or kind in ("oversize", "malformed")


async def attack(server: ServerProcess, num: int, num_clients: int, *, is_ended: bool, seed: int) -> Survival:
    made = Attack(server, num_clients, seed)
    engine_mb: list[float] = []
    server_mb: list[float] = []

    async def watch() -> None:
        """Memory at every quarter; the signal at two thirds."""
        quarter, is_told = num / 8, False
        while True:
            if made.num_ended >= quarter * (len(engine_mb) + 1) and not is_told:
                engine_mb.append(round(rss_mb(server.engine_pid), 1))
                server_mb.append(round(rss_mb(server.process.pid), 1))
            if is_ended and not is_told and made.num_ended >= num * 2 // 3:
                server.process.send_signal(signal.SIGTERM)
                is_told = True
            await asyncio.sleep(0.01)

    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as session:
        await made.learn(session)
        watching = asyncio.create_task(watch())
        started = time.perf_counter()
        await made.run(session, num)
        seconds = time.perf_counter() - started
        watching.cancel()
    rows_left = open_left = exit_code = None
    if is_ended:
        exit_code = server.process.wait(120)
    else:
        for _ in range(200):
            status = server.metrics()
            rows_left = int(status["pool_rows_used"])
            open_left = int(status["requests_open"] + status["requests_waiting"])
            if not rows_left and not open_left:
                break
            await asyncio.sleep(0.05)
    return Survival(
        phase="SIGTERM in the middle" if is_ended else "whole",
        outcomes=dict(sorted(made.outcomes.items())),
        wrong=made.wrong,
        lost=made.lost,
        rows_left=rows_left,
        open_left=open_left,
        engine_mb=engine_mb,
        server_mb=server_mb,
        exit_code=exit_code,
        seconds=round(seconds, 1),
    )


# -- memory -----------------------------------------------------------------------------------------------------

ROW_EVERY, SETTLED_AFTER, MOST_GROWTH = 500, 2000, 1.05
LONGEST_PROMPT = 200
"""Tokens, of which the embedded tokenizer makes one of every character or two."""


@dataclass
class Memory:
    requests: int
    engine_mb: float
    server_mb: float
    lost: int
    seconds: float


async def memory(server: ServerProcess, num: int, num_clients: int, seed: int, add: Callable[[Memory], None]) -> None:
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
                add(Memory(num_ended, engine_mb, server_mb, lost, round(time.perf_counter() - started, 1)))

    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as session:
        await asyncio.gather(*(client(session) for _ in range(num_clients)))


def is_flat(rows: Sequence[Memory]) -> bool:
    """No request was lost, and neither process has grown by more than a twentieth since it had settled."""
    settled = [row for row in rows if row.requests >= SETTLED_AFTER]
    sizes = [[row.engine_mb for row in settled], [row.server_mb for row in settled]]
    return bool(settled) and not settled[-1].lost and all(max(each) <= MOST_GROWTH * each[0] for each in sizes)


@contextmanager
def target(system: str) -> Iterator[tuple[str, ...]]:
    """Options of the server that is attacked."""
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
    parser.add_argument("what", choices=("overhead", "attack", "memory"))
    parser.add_argument("--system", choices=("dllm-serve", "ar", "block-diffusion"), default="dllm-serve")
    parser.add_argument("--requests", type=count, help="[default: 512 of overhead, 2000 of attack, 20000 of memory]")
    parser.add_argument("--repeats", type=count, default=3, help="of overhead")
    parser.add_argument("--clients", type=count, help="[default: 400 of overhead, 64 of attack, 100 of memory]")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    rows = Rows(options.json)

    def add(row: Any) -> None:
        rows.add(row)
        print(row, flush=True)

    if options.what == "overhead":
        num = options.requests or 512
        for _ in range(options.repeats):
            for measure in (in_process, partial(over_http, num_clients=options.clients or 400)):
                add(measure(num, options.system))
    elif options.what == "memory":
        with target(options.system) as given, serving(*given) as server:
            asyncio.run(memory(server, options.requests or 20_000, options.clients or 100, options.seed, add))
        if not is_flat(rows.rows):
            raise SystemExit(1)
    else:
        num = options.requests or 2000
        for is_ended in (False, True):
            with target(options.system) as given, serving(*given) as server:
                seed = options.seed + is_ended
                add(asyncio.run(attack(server, num, options.clients or 64, is_ended=is_ended, seed=seed)))


if __name__ == "__main__":
    run(main)
