#!/usr/bin/env bash
# AIPerf 0.13.0: an answer that an error event cuts off in mid-stream is a success, with a latency, and no error is counted.
#
# Guess: `data: {"error": {...}}` behind the first tokens, which is how vLLM and SGLang end a stream that went wrong, fails the request.
# Seen: asked for 16 tokens with a finish reason, 8 come and then the error: "request_count" counts every request, there is no error record,
# and latency and tokens of the half answers are among the others'. An error with status 500 is counted as one.
# (`vllm bench serve` 0.32.0 and inference-perf 0.7.0 do the same; GuideLLM 0.8.1 fails such a request.)
# Who is hurt: a server that fails under load looks faster the more it fails.
#
# Needs bash, python3 (3.11) and 3 GB; some three minutes. Exits 1 if the behaviour changes.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/python" -m pip -q --disable-pip-version-check install aiperf==0.13.0 2>"$work/pip" || { cat "$work/pip"; exit 2; }

cat > "$work/measure.py" <<'PY'
import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

folder, program = sys.argv[1:]
ERROR = {"error": {"message": "EngineCore encountered an issue", "type": "InternalServerError", "param": None, "code": 500}}


class Failing(BaseHTTPRequestHandler):
    """Eight tokens and an error, or an error at once."""

    in_stream = True

    def do_GET(self):
        self.say(200, "application/json", b'{"object": "list", "data": [{"id": "m", "object": "model"}]}')

    do_HEAD = do_GET

    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        if not self.in_stream:
            return self.say(500, "application/json", json.dumps(ERROR).encode())
        choice = {"index": 0, "text": " token", "finish_reason": None}
        events = [{"id": "1", "object": "text_completion", "choices": [choice]}] * 8 + [ERROR]
        self.say(200, "text/event-stream", b"".join(f"data: {json.dumps(each)}\n\n".encode() for each in events) + b"data: [DONE]\n\n")

    def say(self, status, kind, content):
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_):
        pass


words = {word: i for i, word in enumerate(["<unk>", "</s>", "token", *(f"w{i}" for i in range(500))])}
backend = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", eos_token="</s>").save_pretrained(f"{folder}/tokenizer")
server = ThreadingHTTPServer(("127.0.0.1", 0), Failing)
threading.Thread(target=server.serve_forever, daemon=True).start()
words = f"profile --model m --url http://127.0.0.1:{server.server_port} --endpoint-type completions --streaming --request-count 4"
words += " --concurrency 1 --synthetic-input-tokens-mean 8 --output-tokens-mean 16 --num-dataset-entries 4 --ui-type none"
os.environ["HF_HUB_OFFLINE"] = ""  # else it refuses a folder
seen = {}
for in_stream in (True, False):
    Failing.in_stream = in_stream
    out = f"{folder}/{in_stream}"
    done = subprocess.run([program, *words.split(), "--tokenizer", f"{folder}/tokenizer", "--output-artifact-dir", out], capture_output=True, text=True, timeout=300)
    with open(f"{out}/profile_export.jsonl") as file:
        rows = [json.loads(line) for line in file]
    tokens = [row["metrics"]["output_sequence_length"]["value"] for row in rows if not row.get("error")]
    seen[in_stream] = len(tokens), sum(bool(row.get("error")) for row in rows)
    print(f"an error {'behind 8 tokens' if in_stream else 'as status 500'}: exit {done.returncode}, {len(tokens)} answers without an error, of {tokens} "
          f"tokens, and {seen[in_stream][1]} with one")
sys.exit(not (seen[True][0] >= 3 and seen[True][1] == 0 and seen[False][0] == 0 and seen[False][1] >= 3))
PY
"$work/venv/bin/python" -c 'import importlib.metadata as m; print("AIPerf", m.version("aiperf"))'
"$work/venv/bin/python" "$work/measure.py" "$work" "$work/venv/bin/aiperf"
