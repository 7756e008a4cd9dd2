"""``repro serve`` under 128 clients at once, beside its engine alone: is a stream lost, and how much later do first tokens come?

``PYTHONPATH=. python tests/clients/beside_offline.py [MODEL] [REPEATS] [CLIENTS] [CORE] [CLIENTS_CORE]``. A burst of prompts of 64 ids, for 96 tokens
each, goes to the server, bound to one core, and then to an engine on that core that has them all before its first step. Its time to a first
token is the sum of its steps up to there. Times are the clock's, the processor's that server and engine computed until then, and of these
the engine's own, which are the steps that the server took up to there. MODEL may be the folder of a causal checkpoint.
"""

import asyncio
import json
import os
import random
import re
import subprocess
import sys
import time
from multiprocessing import get_context
from pathlib import Path

import numpy as np
from beside import shown

from engines.server.protocol import Finished, Submission, Tokens
from engines.server.service import _ENVIRONMENT
from engines.server.settings import ArSettings
from repro.runs.statistics import paired_ratio
from repro.serving import ArModel, DllmModel

PROMPT, TOKENS, BLOCK = 64, 96, 32
CLOCKS = ("clock", "processor", "processor of the engine")
MODELS = {
    "tiny-qwen2": lambda: ArModel.of(ArSettings(model="tiny-qwen2", weights="random"), None),
    "tiny": lambda: DllmModel.of(
        system="dllm-serve", platform="cpu-tiny", name=None,
        knobs={"model": "tiny", "gen_length": TOKENS, "block_length": BLOCK, "steps": TOKENS},
    ),
}  # fmt: skip
OPTIONS = {
    "tiny-qwen2": ["--weights", "random"],
    "tiny": ["--gen-length", str(TOKENS), "--block-length", str(BLOCK), "--steps", str(TOKENS)],
}
ASKED = {"max_tokens": TOKENS, "ignore_eos": True, "temperature": 0}


def clocks(*pids):
    """Seconds now, those that all these processes have computed, and the last of them."""
    own = [time.clock_gettime(~pid << 3 | 2) for pid in pids]
    return np.array([time.perf_counter(), sum(own), own[-1]])


def processes(pid):
    """A process and all below it."""
    yield pid
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in task.read_text().split():
            yield from processes(int(child))


# -- the engine alone ------------------------------------------------------------------------------------------


def run_alone(name, core, channel):
    os.sched_setaffinity(0, {core})
    model = MODELS[name]() if name in MODELS else ArModel.of(ArSettings(model=name), None)
    with model.serving() as engine:
        channel.send(None)
        while (prompts := channel.recv()) is not None:
            generation = model.generation({**ASKED, "seed": 0})
            for request_id, ids in enumerate(prompts):
                engine.submit(Submission(request_id, tuple(ids), generation, True))
            now, first, num_steps = np.zeros(3), {}, 0
            while engine.has_work:
                start = clocks(os.getpid())
                events = engine.step()
                now, num_steps = now + clocks(os.getpid()) - start, num_steps + 1
                for event in events:
                    if isinstance(event, Tokens | Finished):
                        first.setdefault(event.request_id, now)
            channel.send((np.array([*first.values()]), now, num_steps))


# -- clients ---------------------------------------------------------------------------------------------------


async def stream(port, name, ids, now):
    """When the first token came, all of them, and clock seconds between pieces."""
    body = json.dumps({"model": name, "prompt": ids, "stream": True, "return_token_ids": True, **ASKED}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(head.encode() + body)
    first, answer, is_done, pieces = None, [], False, []
    while not is_done and (line := await reader.readline()):
        is_done = line.startswith(b"data: [DONE]")
        if line.startswith(b"data: {"):
            before = len(answer)
            for choice in json.loads(line[6:])["choices"]:
                answer += choice.get("token_ids") or ()
            if answer and first is None:
                first = now()
            if len(answer) > before:
                pieces.append(time.perf_counter())
    writer.close()
    return first, answer if is_done else [], np.diff(pieces)


async def burst(port, name, prompts, pids):
    """By ``clocks``: times of first tokens, and of all; streams that were lost, answers, and seconds between pieces of all streams."""
    start = clocks(*pids)
    found = await asyncio.gather(*(stream(port, name, ids, lambda: clocks(*pids) - start) for ids in prompts))
    times = np.array([first for first, answer, _ in found if len(answer) == TOKENS])
    gaps = np.concatenate([each for _, _, each in found])
    return times, clocks(*pids) - start, len(prompts) - len(times), [answer for _, answer, _ in found], gaps


def main(name="tiny-qwen2", repeats="5", clients="128", core="0", clients_core="1"):
    os.environ.update(_ENVIRONMENT, OMP_NUM_THREADS="1")
    here, there = get_context("spawn").Pipe()
    alone = get_context("spawn").Process(target=run_alone, args=(name, int(core), there))
    alone.start()
    here.recv()
    command = ["taskset", "-c", core, sys.executable, "-m", "repro", "serve", "--model", name, "--port", "0"]
    server = subprocess.Popen([*command, *OPTIONS.get(name, ())], stderr=subprocess.PIPE, text=True)
    try:
        port = next(int(found[1]) for line in server.stderr if (found := re.match(r"ready: http://[^/]*:(\d+)/", line)))
        pids = [*processes(server.pid)]
        os.sched_setaffinity(0, {int(clients_core)})
        draw, p99, lost = random.Random(0), {}, 0
        for at in range(int(repeats) + 1):  # the first is not counted
            prompts = [[draw.randrange(3, 512) for _ in range(PROMPT)] for _ in range(int(clients))]
            served, whole, lost_now, *_ = asyncio.run(burst(port, name, prompts, pids))
            lost += lost_now
            here.send(prompts)
            ideal, steps, num_steps = here.recv()
            for i, clock in enumerate(CLOCKS):
                ends = [np.percentile(times[:, i], [50, 99]) for times in (served, ideal)]
                print(
                    f"{at} by {clock}: TTFT p50 and p99 {ends[0].round(3)} s, alone {ends[1].round(3)} s, all in {whole[i]:.2f} s, alone "
                    f"{steps[i]:.2f} s in {num_steps} steps",
                    flush=True,
                )
                if at:
                    for whose, end in zip(("server", "alone"), ends, strict=True):
                        p99.setdefault((clock, whose), {})[at] = end[1]
        print(f"{name}: {lost} of {(int(repeats) + 1) * int(clients)} streams lost")
        for clock in CLOCKS:
            print(
                f"p99 by {clock}, over the engine alone: {shown(paired_ratio(p99[clock, 'server'], p99[clock, 'alone']))}"
            )
        print(
            f"p99 by clock, over the server's steps: {shown(paired_ratio(*(p99[clock, 'server'] for clock in (CLOCKS[0], CLOCKS[-1]))))}"
        )
    finally:
        here.send(None)
        server.terminate()
        server.wait()
        alone.join()


if __name__ == "__main__":
    main(*sys.argv[1:])
