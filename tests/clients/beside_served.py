"""``repro serve`` and vLLM's CPU build with one checkpoint: processor time, tokens a second, TTFT, ITL, memory, start-up, answers.

``PYTHONPATH=. python tests/clients/beside_served.py VLLM FOLDER [DTYPE] [ROUNDS] [CACHE] [CLIENTS ...]``. VLLM is the program that ``repro install
vllm`` made. FOLDER gets random weights of SmolLM2-135M's shape, unless it has a checkpoint. Both servers share one core, where the idle one is
stopped, since vLLM spins while it waits; clients have the other. A burst has prompts of 64 ids for 96 tokens each, another round other prompts.
A second burst goes on from each server's own answers, with 64 ids more. CACHE is on or off. DTYPE float32/int8 has our weights in int8.
"""

import asyncio
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch
from beside import shown
from beside_offline import PROMPT, TOKENS, burst, processes
from safetensors.torch import save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from repro.runs.statistics import paired_ratio

CORE, CLIENTS_CORE, NAME = 0, 1, "served"
SEQUENCES, CLIENTS = 128, ("1", "8", "32", "128")
SHAPE = {
    "vocab_size": 49_152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
TURNS = "first", "second"
SPREAD = 0.08
"""Of weights: far-apart logits, so that two programs' roundings seldom change a token."""


def write_checkpoint(folder):
    folder.mkdir(parents=True)
    words = Tokenizer(WordLevel({f"w{i}": i for i in range(SHAPE["vocab_size"])}, unk_token="w0"))
    words.save(str(folder / "tokenizer.json"))
    told = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "w0", "eos_token": "w2"}
    (folder / "tokenizer_config.json").write_text(json.dumps(told))
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "torch_dtype": "bfloat16",
        "hidden_act": "silu",
    }
    (folder / "config.json").write_text(json.dumps(SHAPE | config))
    size, mlp, layers = SHAPE["hidden_size"], SHAPE["intermediate_size"], SHAPE["num_hidden_layers"]
    kv = size // SHAPE["num_attention_heads"] * SHAPE["num_key_value_heads"]
    shapes = {"model.embed_tokens.weight": (SHAPE["vocab_size"], size), "model.norm.weight": (size,)}
    for at in (f"model.layers.{i}" for i in range(layers)):
        shapes |= {f"{at}.{name}_layernorm.weight": (size,) for name in ("input", "post_attention")}
        shapes |= {f"{at}.self_attn.{name}_proj.weight": (size if name in "qo" else kv, size) for name in "qkvo"}
        shapes |= {f"{at}.mlp.{name}_proj.weight": (mlp, size) for name in ("gate", "up")} | {
            f"{at}.mlp.down_proj.weight": (size, mlp)
        }
    draw = torch.Generator().manual_seed(0)
    weights = {
        name: (torch.randn(shape, generator=draw) * SPREAD if len(shape) > 1 else torch.ones(shape)).bfloat16()
        for name, shape in shapes.items()
    }
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


class Server:
    """Ready from its start on. ``command`` is without its address."""

    def __init__(self, name, command, route, env, log):
        self.name, self.port = name, _free_port()
        start = time.perf_counter()
        command = ["taskset", "-c", str(CORE), *map(str, command), "--host", "127.0.0.1", "--port", str(self.port)]
        with log.open("w") as out:
            self.process = subprocess.Popen(command, env=os.environ | env, stdout=out, stderr=subprocess.STDOUT)
        while not self._answers(route):
            assert self.process.poll() is None, log.read_text()[-3000:]
            time.sleep(0.1)
        self.ready_s = time.perf_counter() - start
        self.pids = [*processes(self.process.pid)]

    def _answers(self, route):
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{self.port}{route}").close()
        except (urllib.error.URLError, ConnectionError):
            return False
        return True

    def signal(self, number):
        for pid in self.pids:
            os.kill(pid, number)

    def memory_bytes(self):
        """Pages that several processes share count once."""
        rollups = (Path(f"/proc/{pid}/smaps_rollup").read_text() for pid in self.pids)
        return sum(int(re.search(r"\nPss: +(\d+)", text)[1]) for text in rollups) * 1024

    def burst(self, prompts):
        """Processor seconds a token, seconds to the first tokens and between tokens, answers; none may be lost."""
        times, whole, lost, answers, gaps = asyncio.run(burst(self.port, NAME, prompts, self.pids))
        assert lost == 0, f"{self.name} lost {lost} streams"
        return whole / (len(prompts) * TOKENS), times[:, 0], gaps, answers

    def stop(self):
        self.signal(signal.SIGCONT)
        self.process.terminate()
        self.process.wait()


def _free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def usual_options(dtype):
    sizes = "--max-num-seqs", SEQUENCES, "--max-num-batched-tokens", 2048
    return "--dtype", dtype, "--served-model-name", NAME, *sizes


def our_server(name, folder, dtype, logs, *options):
    """``dtype`` may be float32/int8."""
    dtype, _, quantization = dtype.partition("/")
    own = *usual_options(dtype), "--quantization", quantization or "none", *options
    command = [sys.executable, "-m", "repro", "serve", "--model", folder, *own]
    return Server(name, command, "/ready", {"OMP_NUM_THREADS": "1"}, Path(logs, name.replace("/", "-")))


def started(vllm, folder, dtype, keeps):
    with TemporaryDirectory() as logs:
        own = *usual_options(dtype.partition("/")[0]), "--max-model-len", 2048
        yield Server(
            "vllm",
            [vllm, "serve", folder, *own, f"--{'' if keeps else 'no-'}enable-prefix-caching"],
            "/health",
            {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": str(CORE), "HF_HUB_OFFLINE": "1"},
            Path(logs, "vllm"),
        )
        yield our_server("repro", folder, dtype, logs, "--keep-kv" if keeps else "--no-keep-kv")


def drawn(draw, num):
    return [[draw.randrange(3, SHAPE["vocab_size"]) for _ in range(PROMPT)] for _ in range(num)]


def main(vllm, folder, dtype="bfloat16", rounds="5", cache="off", *clients):
    if not Path(folder, "config.json").is_file():
        write_checkpoint(Path(folder))
    os.sched_setaffinity(0, {CLIENTS_CORE})
    servers = []
    try:
        for server in started(vllm, folder, dtype, cache == "on"):
            print(f"{server.name}: ready after {server.ready_s:.1f} s", flush=True)
            server.signal(signal.SIGSTOP)
            servers.append(server)
        draw = random.Random(0)
        for num in map(int, clients or CLIENTS):
            costs = {(turn, server.name): {} for turn in TURNS for server in servers}
            for at in range(int(rounds) + 1):  # the first is not counted
                asked = {server.name: [[]] * num for server in servers}
                for turn in TURNS:
                    new, answers = drawn(draw, num), []
                    for server in servers[:: 1 if at % 2 else -1]:
                        prompts = [before + ids for before, ids in zip(asked[server.name], new, strict=True)]
                        server.signal(signal.SIGCONT)
                        cost, first_s, gaps_s, found = server.burst(prompts)
                        server.signal(signal.SIGSTOP)
                        asked[server.name] = [ids + answer for ids, answer in zip(prompts, found, strict=True)]
                        if at:
                            costs[turn, server.name][at] = cost
                        answers.append(found)
                        ttft, itl = np.percentile(first_s, [50, 99]), 1000 * np.percentile(gaps_s, [50, 99])
                        print(
                            f"{num} clients, {at}, {turn} turn, {server.name}: {1000 * cost[1]:.2f} ms, {1 / cost[0]:.1f} tokens/s, TTFT "
                            f"{ttft[0]:.2f} and {ttft[1]:.2f} s, ITL {itl[0]:.1f} and {itl[1]:.1f} ms",
                            flush=True,
                        )
                    print(
                        f"{num} clients, {at}, {turn} turn: {sum(a == b for a, b in zip(*answers, strict=True))} alike"
                    )
            for turn in TURNS:
                for i, what in enumerate(("clock", "processor")):
                    each = {
                        server.name: {at: float(cost[i]) for at, cost in costs[turn, server.name].items()}
                        for server in servers
                    }
                    ratio = shown(paired_ratio(each["vllm"], each["repro"]))
                    print(f"{num} clients, {turn} turn: vLLM's {what} time over repro's {ratio}", flush=True)
        for server in servers:
            print(f"{server.name}: {server.memory_bytes() / 1e9:.2f} GB")
    finally:
        for server in servers:
            server.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
