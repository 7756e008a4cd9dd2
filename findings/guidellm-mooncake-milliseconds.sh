#!/usr/bin/env bash
# GuideLLM 0.8.1: `kind=mooncake` takes the timestamps of Mooncake's traces, which are milliseconds, for seconds.
#
# Guess: a format that is named after the published traces has their unit, so rows of 0, 2 and 5 are sent within 5 ms.
# Seen: they are sent within 5 s. No column, option or log line says a unit; `time_scale` 0.001 has to be known.
# Who is hurt: an hour of Mooncake's conversation trace is replayed over 41 days, at 0.003 requests a second for 3.4.
#
# Needs bash, python3 (3.11) and 2 GB; some three minutes. Exits 1 if the behaviour changes.
set -euo pipefail
work=$(mktemp -d)
server=
trap '[ -z "$server" ] || kill "$server" 2>/dev/null || true; wait 2>/dev/null || true; rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
pip() { "$work/venv/bin/python" -m pip -q --disable-pip-version-check install "$@" 2>/dev/null; }
pip torch==2.13.0 --extra-index-url https://download.pytorch.org/whl/cpu
pip 'guidellm==0.8.1'

cat > "$work/make.py" <<'PY'
import json
import sys
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

vocabulary = {token: i for i, token in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
tokenizer.decoder = decoders.ByteLevel()
PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(f"{sys.argv[1]}/tokenizer")
with open(f"{sys.argv[1]}/trace.jsonl", "w") as file:
    for number, ms in enumerate((0, 2, 5)):
        row = {"timestamp": ms, "input_length": 100, "output_length": 4, "hash_ids": [number]}
        file.write(json.dumps(row) + "\n")
PY
"$work/venv/bin/python" "$work/make.py" "$work"

cat > "$work/serve.py" <<'PY'
import json
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def do_GET(self):
        self.answer(json.dumps({"object": "list", "data": [{"id": "m", "object": "model"}]}), "application/json")

    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        print(time.monotonic(), flush=True)
        choice = {"index": 0, "text": "abcd", "delta": {"content": "abcd"}, "finish_reason": "stop"}
        usage = {"choices": [], "usage": {"prompt_tokens": 100, "completion_tokens": 4, "total_tokens": 104}}
        events = [json.dumps({"id": "a", "model": "m", "choices": [choice]}), json.dumps(usage), "[DONE]"]
        self.answer("".join(f"data: {event}\n\n" for event in events), "text/event-stream")

    def answer(self, text, kind):
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
with open(sys.argv[1], "w") as file:
    file.write(str(server.server_port))
server.serve_forever()
PY
"$work/venv/bin/python" "$work/serve.py" "$work/port" > "$work/came" &
server=$!
for _ in $(seq 60); do [ -s "$work/port" ] && break; sleep 0.5; done

HF_HUB_OFFLINE=1 "$work/venv/bin/guidellm" run --backend "kind=openai_http,target=http://127.0.0.1:$(cat "$work/port"),model=m" \
  --profile kind=replay --tokenizer "kind=huggingface_auto,model=$work/tokenizer" --output "kind=json,path=$work/out.json" --disable-console \
  --data "{\"kind\": \"mooncake\", \"source\": {\"kind\": \"json_file\", \"path\": \"$work/trace.jsonl\"}}" >"$work/log" 2>&1 || { tail "$work/log"; exit 2; }

"$work/venv/bin/python" - "$work/came" <<'PY'
import sys
from importlib.metadata import version

came = [float(line) for line in open(sys.argv[1])]
seconds = [round(each - came[0], 2) for each in came]
print("GuideLLM", version("guidellm"))
print(f"rows of 0, 2 and 5 ms were sent after {seconds} s")
sys.exit(not (len(seconds) == 3 and 4 < seconds[-1] < 7))
PY
