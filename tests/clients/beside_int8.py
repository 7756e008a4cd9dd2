"""int8 weights beside float32 and bfloat16: how many answers of the embedded model change, what products of a decode step take, and served tokens.

``PYTHONPATH=. python tests/clients/beside_int8.py [NUM_PROMPTS] [REPEATS]``. Answers have 64 ids, in batches of eight, and are held against
float32. Products are all of SmolLM2-135M's shape, by one thread, in processor ms: the best of the repeats, which take turns.
``beside_int8.py served FOLDER [ROUNDS] [CLIENTS ...]`` sends bursts to four servers of a checkpoint, as ``beside_served.py`` does, in turns.
"""

import os
import random
import signal
import sys
import time
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from beside import BATCH, ours, prompts_of, shown
from beside_served import CLIENTS_CORE, SHAPE, drawn, our_server, write_checkpoint

from engines.models.loader import load_model
from engines.models.product import Packed, Quantized, quantize_weight
from repro.runs.statistics import paired_ratio

LENGTH, ROWS = 64, (1, 2, 4, 8, 16, 32, 128)
DTYPES = torch.float32, torch.bfloat16


def answers(num_prompts):
    models = {
        (dtype, kind): load_model("tiny", dtype=dtype, quantization=kind)
        for dtype in DTYPES
        for kind in ("none", "int8")
    }
    for task in ("mini-gsm", "mini-code"):
        prompts = prompts_of(task, num_prompts, LENGTH)
        for system in ("fast-dllm", "dllm-serve"):
            usual = None
            for (dtype, kind), model in models.items():
                parts = (prompts[at : at + BATCH] for at in range(0, num_prompts, BATCH))
                found = [*chain.from_iterable(ours(model, part, LENGTH, system) for part in parts)]
                usual = usual or found
                alike = sum(a == b for a, b in zip(usual, found, strict=True))
                print(f"{task}, {system}, {dtype}, {kind}: {alike} of {num_prompts} answers are float32's", flush=True)


def products(repeats):
    size, mlp, heads, kv = (
        SHAPE[name] for name in ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
    )
    layer = [(size + 2 * size // heads * kv, size), (size, size), (2 * mlp, size), (size, mlp)]
    shapes = layer * SHAPE["num_hidden_layers"] + [(SHAPE["vocab_size"], size)]
    weights = [torch.randn(shape) / shape[1] ** 0.5 for shape in shapes]
    made = {f"{dtype}": [Packed(weight.to(dtype)) for weight in weights] for dtype in DTYPES}
    for dtype in DTYPES:
        parts = map(quantize_weight, weights)
        made[f"{dtype}, int8"] = [Quantized(codes, None, scales, dtype) for codes, scales in parts]
    for rows in ROWS:
        times = {name: [] for name in made}
        for _ in range(repeats):
            for name, each in made.items():
                x = {n: torch.randn((rows, n)).to(each[0].dtype) for n in (size, mlp)}
                start = time.process_time()
                for one in each:
                    one(x[one.weight.shape[1]])
                times[name].append(time.process_time() - start)
        print(f"{rows} rows: {', '.join(f'{name} {1000 * min(of):.1f}' for name, of in times.items())}", flush=True)


def served(folder, rounds="3", *clients):
    if not Path(folder, "config.json").is_file():
        write_checkpoint(Path(folder))
    os.sched_setaffinity(0, {CLIENTS_CORE})
    draw, servers = random.Random(0), []
    with TemporaryDirectory() as logs:
        try:
            for name in ("float32", "float32/int8", "bfloat16", "bfloat16/int8"):
                servers.append(our_server(name, folder, name, logs, "--no-keep-kv"))
                servers[-1].signal(signal.SIGSTOP)
            for num in map(int, clients or ("1", "8")):
                costs = {server.name: {} for server in servers}
                for at in range(int(rounds) + 1):  # the first is not counted
                    prompts = drawn(draw, num)
                    for server in servers[:: 1 if at % 2 else -1]:
                        server.signal(signal.SIGCONT)
                        cost, *_ = server.burst(prompts)
                        server.signal(signal.SIGSTOP)
                        if at:
                            costs[server.name][at] = 1000 * float(cost[1])
                for name in ("float32", "bfloat16"):
                    plain, int8 = costs[name], costs[f"{name}/int8"]
                    means = [sum(each.values()) / len(each) for each in (plain, int8)]
                    ratio = shown(paired_ratio(plain, int8)) if len(plain) > 1 else "one round"
                    print(f"{num} clients, {name}: {means[0]:.1f} ms a token, int8 {means[1]:.1f}: {ratio}", flush=True)
        finally:
            for server in servers:
                server.stop()


def main(num_prompts="96", repeats="9"):
    torch.set_num_threads(1)
    products(int(repeats))
    answers(int(num_prompts))


if __name__ == "__main__":
    served(*sys.argv[2:]) if sys.argv[1:2] == ["served"] else main(*sys.argv[1:])
