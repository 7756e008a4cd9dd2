#!/usr/bin/env bash
# llama.cpp's server (xllamacpp 2026.10.11549): usage of several choices or several prompts is that of one.
#
# Guess: as in OpenAI's API, completion_tokens are those of all choices, and prompt_tokens those of all prompts of a list.
# Seen: n=3 with four tokens each has completion_tokens 4, in a chat as well. Three prompts of 10, 2 and 6 tokens have prompt_tokens 10 and
#   completion_tokens 4. Each answer has status 200 and all of its choices. A stream ends with three usage chunks, each of them of one choice.
# Who is hurt: throughput in tokens of batched prompts or of n samples, as pass@k takes, comes out 1/n of what it was. Costs do, too.
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

PROBABILITIES = {"a": 0.7, "b": 0.3}
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
        return answer.read().decode()


print("xllamacpp", version("xllamacpp"), "with llama.cpp's server")
shared = {"max_tokens": 4, "temperature": 0}
chat = {"messages": [{"role": "user", "content": "hello"}]}
one = json.loads(post("/v1/chat/completions", **chat, **shared))
plain = json.loads(post("/v1/chat/completions", **chat, **shared, n=3))
events = post("/v1/chat/completions", **chat, **shared, n=3, stream=True, stream_options={"include_usage": True}).split("\n\n")
events = [json.loads(event[6:]) for event in events if event.startswith("data: {")]
choices = {choice["index"] for event in events for choice in event["choices"]}
usages = [event["usage"] for event in events if event.get("usage")]
drawn = json.loads(post("/v1/completions", prompt="hello", **shared, n=3))
prompts = json.loads(post("/v1/completions", prompt=["a" * 10, "bb", "c" * 6], **shared))
seen = []
for name, usage, number in (
    ("chat, n=1", one["usage"], len(one["choices"])),
    ("chat, n=3", plain["usage"], len(plain["choices"])),
    (f"chat, n=3, the last of {len(usages)} usage chunks of the stream", usages[-1], len(choices)),
    ("completion, n=3", drawn["usage"], len(drawn["choices"])),
    ("prompts of 10, 2 and 6", prompts["usage"], len(prompts["choices"])),
):
    seen.append((number, usage["completion_tokens"]))
    print(f"{name}: {number} choices of 4 tokens, prompt_tokens {usage['prompt_tokens']}, completion_tokens {usage['completion_tokens']}")
lengths = [len(choice["text"]) for choice in prompts["choices"] + drawn["choices"]]
sys.exit(seen != [(1, 4), (3, 4), (3, 4), (3, 4), (3, 4)] or lengths != [4] * 6 or prompts["usage"]["prompt_tokens"] not in (10, 2, 6) or len(usages) != 3)
PY
"$work/venv/bin/python" "$work/ask.py" "$work/tiny.gguf" 2>"$work/log" || { tail -3 "$work/log"; exit 1; }
