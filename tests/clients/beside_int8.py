"""int8 weights beside float32 and bfloat16: how many answers of the embedded model change, and what products of a decode step take.

``PYTHONPATH=. python tests/clients/beside_int8.py [NUM_PROMPTS] [REPEATS]``. Answers have 64 ids, in batches of eight, and are held against
float32. Products are all of SmolLM2-135M's shape, by one thread, in processor ms: the best of the repeats, which take turns.
"""

import sys
import time
from itertools import chain

import torch
from beside import BATCH, ours, prompts_of
from beside_served import SHAPE

from engines.models.loader import load_model
from engines.models.product import Packed, Quantized, quantized

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
        parts = map(quantized, weights)
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


def main(num_prompts="96", repeats="9"):
    torch.set_num_threads(1)
    products(int(repeats))
    answers(int(num_prompts))


if __name__ == "__main__":
    main(*sys.argv[1:])
