#!/usr/bin/env bash
# inference-perf 0.7.0: TTFT and throughput leave out tokens that a chat stream sends as reasoning; output_tokens counts them.
#
# Guess: the first token is the first that comes, reasoning or not, and one count of tokens is used throughout a report.
# Seen: 12 tokens of `reasoning_content` and 4 of `content`, 50 ms apart, with a usage of 16. TTFT is 0.67 s, not 0.05. Output
# throughput is a quarter of what it is with all 16 as `content`, and normalized time per token four times as long, while
# "output_tokens" says 16 in the same report. `token_count_mismatches` is the only sign.
# Who is hurt: whoever turns a server's reasoning parser on: the same tokens at the same times become a slow server's.
#
# Needs bash, and Python 3.12 or later as $PYTHON or python3.12; some four minutes. Exits 1 if the behaviour changes.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"${PYTHON:-python3.12}" -m venv "$work/venv"
"$work/venv/bin/python" -m pip -q --disable-pip-version-check install inference-perf==0.7.0 transformers==5.13.0 2>"$work/pip" || { cat "$work/pip"; exit 2; }

cat > "$work/measure.py" <<'PY'
import json
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

folder, program = sys.argv[1:]


class Thinking(BaseHTTPRequestHandler):
    """Sixteen tokens, 50 ms apart, of which the first are reasoning."""

    reasoning = 0

    def do_GET(self):
        self.send_response(404)
        self.end_headers()

    do_HEAD = do_GET

    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        self.say({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}]})
        for k in range(16):
            time.sleep(0.05)
            delta = {"reasoning_content" if k < self.reasoning else "content": "tok "}
            self.say({"choices": [{"index": 0, "delta": delta, "finish_reason": "length" if k == 15 else None}]})
        self.say({"choices": [], "usage": {"prompt_tokens": 8, "completion_tokens": 16, "total_tokens": 24}})
        self.wfile.write(b"data: [DONE]\n\n")

    def say(self, said):
        self.wfile.write(f"data: {json.dumps({'id': '1', 'object': 'chat.completion.chunk', **said})}\n\n".encode())

    def log_message(self, *_):
        pass


words = {word: i for i, word in enumerate(["<unk>", "</s>", "tok", *(f"w{i}" for i in range(500))])}
backend = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", eos_token="</s>").save_pretrained(f"{folder}/tokenizer")
server = ThreadingHTTPServer(("127.0.0.1", 0), Thinking)
threading.Thread(target=server.serve_forever, daemon=True).start()
seen = {}
for Thinking.reasoning in (0, 12):
    out = f"{folder}/{Thinking.reasoning}"
    asked = {
        "api": {"type": "chat", "streaming": True},
        "data": {"type": "mock"},
        "load": {"type": "concurrent", "num_workers": 1, "stages": [{"num_requests": 5, "concurrency_level": 1}]},
        "server": {"type": "vllm", "model_name": "m", "base_url": f"http://127.0.0.1:{server.server_port}"},
        "tokenizer": {"pretrained_model_name_or_path": f"{folder}/tokenizer"},
        "storage": {"local_storage": {"path": out}},
    }
    with open(f"{out}.yaml", "w") as file:
        json.dump(asked, file)
    subprocess.run([program, "-c", f"{out}.yaml"], check=True, capture_output=True)
    with open(f"{out}/summary_lifecycle_metrics.json") as file:
        told = json.load(file)["successes"]
    ttft, tokens = told["latency"]["time_to_first_token"]["median"], told["output_tokens"]["mean"]
    per_request = told["throughput"]["output_tokens_per_sec"] / told["throughput"]["requests_per_sec"]
    normalized = told["latency"]["normalized_time_per_output_token"]["median"]
    seen[Thinking.reasoning] = tokens, round(per_request, 6), ttft > 0.4, normalized > 0.12
    print(f"{Thinking.reasoning} of 16 tokens are reasoning: output_tokens {tokens:g}; TTFT {ttft:.2f} s; throughput of {per_request:g} tokens a request; "
          f"normalized time per token {1000 * normalized:.0f} ms; mismatches {told['token_count_mismatches']}")
sys.exit(seen != {0: (16, 16, False, False), 12: (16, 4, True, True)})
PY
"$work/venv/bin/python" -c 'import importlib.metadata as m; print("inference-perf", m.version("inference-perf"))'
HF_HUB_OFFLINE=1 "$work/venv/bin/python" "$work/measure.py" "$work" "$work/venv/bin/inference-perf"
