#!/usr/bin/env bash
# llama.cpp's server (xllamacpp 2026.10.11549): temperature 1 and top_p 1 do not draw from the model: tokens below 1/20 of the likeliest never come.
#
# Guess: over the OpenAI API temperature=1 and top_p=1 draw each token with the probability that `logprobs` tells.
# Seen: five letters have 2 % each, beside one of 65 % and one of 25 %. They are none of 4,000 tokens, where 400 are expected. With `min_p: 0`
#   they come. `logprobs` tells 2 % for them either way. The default min_p of 0.05 (and a top_k of 40) stays beside what a client sends.
# Who is hurt: pass@k, and samples for a comparison of engines: llama.cpp's answers vary less, and look better at high temperatures.
#
# Needs bash, and Python 3.12 or later as $PYTHON or python3.12; a minute. Exits 1 if the behaviour changes.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"${PYTHON:-python3.12}" -m venv "$work/venv"
"$work/venv/bin/python" -m pip -q --disable-pip-version-check install --no-compile xllamacpp==2026.10.11549 gguf==0.19.0 2>"$work/pip" || { cat "$work/pip"; exit 2; }
cat > "$work/tiny.py" <<'PY'
"""A model of GGUF's llama architecture whose next token is a letter with a given probability, whatever came before."""

import sys

import numpy as np
from gguf import GGUFWriter, TokenType

PROBABILITIES = {"a": 0.65, "b": 0.25, **dict.fromkeys("cdefg", 0.02)}
writer, tokens, width = GGUFWriter(sys.argv[1], "llama"), 257, 64
writer.add_block_count(1)
writer.add_context_length(8192)
writer.add_embedding_length(width)
writer.add_feed_forward_length(width)
writer.add_head_count(2)
writer.add_head_count_kv(2)
writer.add_layer_norm_rms_eps(1e-5)
writer.add_vocab_size(tokens)
shown = [b for b in range(256) if 33 <= b < 127 or 161 <= b < 173 or b >= 174]
names = {b: chr(b) for b in shown} | {b: chr(256 + i) for i, b in enumerate(b for b in range(256) if b not in shown)}
writer.add_tokenizer_model("gpt2")
writer.add_tokenizer_pre("default")
writer.add_token_list([*(names[b] for b in range(256)), "<|end|>"])
writer.add_token_types([TokenType.NORMAL] * 256 + [TokenType.CONTROL])
writer.add_token_merges(["a b"])
writer.add_eos_token_id(256)
writer.add_add_bos_token(False)
embeddings, head = np.zeros((2, tokens, width), np.float32)
embeddings[:, 0] = 1
head[:, 0] = np.log(1e-12) / 8  # a norm makes of each embedding one number, 8
for letter, probability in PROBABILITIES.items():
    head[ord(letter), 0] = np.log(probability) / 8
weights = {"token_embd": embeddings, "output": head, "output_norm": np.ones(width, np.float32)}
weights |= {f"blk.0.{name}_norm": np.ones(width, np.float32) for name in ("attn", "ffn")}
for name in ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"):
    weights[f"blk.0.{name}"] = np.zeros((width, width), np.float32)
for name, weight in weights.items():
    writer.add_tensor(f"{name}.weight", weight)
writer.write_header_to_file()
writer.write_kv_data_to_file()
writer.write_tensors_to_file()
writer.close()
PY
"$work/venv/bin/python" "$work/tiny.py" "$work/tiny.gguf"
cat > "$work/ask.py" <<'PY'
import collections
import json
import math
import sys
import urllib.request
from importlib.metadata import version

import xllamacpp

settings = xllamacpp.CommonParams()
settings.model.path = sys.argv[1]
settings.n_ctx, settings.n_parallel, settings.cpuparams.n_threads = 8192, 4, 1
server = xllamacpp.Server(settings)


def post(path, **body):
    request = urllib.request.Request(server.listening_address + path, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request) as answer:
        return json.loads(answer.read())


print("xllamacpp", version("xllamacpp"), "with llama.cpp's server")
shared = {"prompt": "hello", "temperature": 1, "top_p": 1}
told = post("/v1/completions", **shared, max_tokens=1, logprobs=7)["choices"][0]["logprobs"]["content"][0]["top_logprobs"]
told = {each["token"]: math.exp(each["logprob"]) for each in told}
print("told:", {letter: round(told[letter], 2) for letter in sorted(told)})
rare = {}
for name, more in (("as it is", {}), ("top_k=0", {"top_k": 0}), ("min_p=0", {"min_p": 0})):
    text = "".join(post("/v1/completions", **shared, **more, max_tokens=1000, seed=seed)["choices"][0]["text"] for seed in range(4))
    counts = collections.Counter(text)
    rare[name] = sum(counts[letter] for letter in "cdefg")
    print(f"{name}: of {len(text)} tokens", {letter: counts[letter] for letter in "abcdefg"})
same = all(abs(told[letter] - 0.02) < 1e-3 for letter in "cdefg")
sys.exit(not (same and rare["as it is"] == rare["top_k=0"] == 0 and 300 < rare["min_p=0"] < 500))
PY
"$work/venv/bin/python" "$work/ask.py" "$work/tiny.gguf" 2>"$work/log" || { tail -3 "$work/log"; exit 1; }
