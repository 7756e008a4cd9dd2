#!/usr/bin/env bash
# llama.cpp's server (xllamacpp 2026.10.11549): frequency and presence penalties see the last 64 tokens, and the prompt is among them.
#
# Guess: as in OpenAI's API, the penalties count the tokens of the answer, all of them and none of the prompt.
# Seen: a prompt of 20 times "a" turns the greedy first token from "a" to "b". With a frequency penalty of 0.1 five rare letters get 12 of the
#   first 200 greedy tokens and 12 of the last 200 of 1,000. Over the whole answer (`repeat_last_n: 8192`) they get 100 and 142, and all
#   seven letters come equally often in the end.
# Who is hurt: comparisons of engines with a penalty, as evaluations of models set that repeat themselves: same request, other penalty.
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


def text(prompt, tokens, **more):
    return post("/v1/completions", prompt=prompt, max_tokens=tokens, temperature=0, **more)["choices"][0]["text"]


first = [text(letter * 20, 1, **{name: 2.0}) for letter in "za" for name in ("frequency_penalty", "presence_penalty")]
print("first token behind 20 times z:", first[:2], "behind 20 times a:", first[2:])
rare = {}
for name, more in (("as it is", {}), ("repeat_last_n=8192", {"repeat_last_n": 8192})):
    answer = text("z", 1000, frequency_penalty=0.1, **more)
    counts = [collections.Counter(part) for part in (answer[:200], answer[800:])]
    rare[name] = [sum(each[letter] for letter in "cdefg") for each in counts]
    for part, each in zip(("first", "last"), counts, strict=True):
        print(f"{name}: of the {part} 200 of {len(answer)} tokens", {letter: each[letter] for letter in "abcdefg"})
sys.exit(first != ["a", "a", "b", "b"] or max(rare["as it is"]) > 30 or min(rare["repeat_last_n=8192"]) < 80)
PY
"$work/venv/bin/python" "$work/ask.py" "$work/tiny.gguf" 2>"$work/log" || { tail -3 "$work/log"; exit 1; }
