#!/usr/bin/env bash
# genai-bench 0.0.5: `--warmup-ratio 0.2 --cooldown-ratio 0.2` lowers the throughput of a steady server by 40 %, and the error rate is always 0.
#
# Guess: requests of the warm-up and the cool-down are left out with their time, so a steady server has the same throughput with them and without.
# Seen: the tokens of those requests are left out and the time is the whole run's: tokens per second fall by the two ratios, and requests per
#   second do not. The run with them has 0.6 of the tokens per second. A server then answers half of the requests with status 500:
#   `num_error_requests` is right, and `error_rate` is 0, since it is computed before the number of requests is known.
# Who is hurt: throughput read from a run with a warm-up, which is the usual advice. A server that fails half of its requests has error rate 0.
#
# Needs bash, and Python 3.12 or later as $PYTHON or python3.12; 1 GB and some five minutes. Exits 1 if the behaviour changes.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"${PYTHON:-python3.12}" -m venv "$work/venv"
"$work/venv/bin/python" -m pip -q --disable-pip-version-check install --no-compile genai-bench==0.0.5 locust==2.47.0 transformers==5.24.0 2>"$work/pip" || { cat "$work/pip"; exit 2; }
cat > "$work/measure.py" <<'PY'
import itertools
import json
import os
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.metadata import version
from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

work, TOKENS, count = Path(sys.argv[1]), 8, itertools.count()
words = Tokenizer(models.WordLevel({"w": 0, "[UNK]": 1}, unk_token="[UNK]"))
words.pre_tokenizer = pre_tokenizers.Whitespace()
PreTrainedTokenizerFast(tokenizer_object=words, unk_token="[UNK]").save_pretrained(work / "tokenizer")


class Steady(BaseHTTPRequestHandler):
    """Eight tokens of 0.05 s each, or, for the model "half", status 500 every other time."""

    protocol_version = "HTTP/1.1"

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if body["model"] == "half" and next(count) % 2:
            self.send_response(500)
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        shared = {"id": "1", "object": "chat.completion.chunk", "created": 1, "model": body["model"]}
        for token in range(TOKENS):
            time.sleep(0.05)
            choice = {"index": 0, "delta": {"content": "w "}, "finish_reason": "length" if token == TOKENS - 1 else None}
            self.chunk(f"data: {json.dumps(shared | {'choices': [choice]})}\n\n")
        usage = {"prompt_tokens": 20, "completion_tokens": TOKENS, "total_tokens": 20 + TOKENS}
        self.chunk(f"data: {json.dumps(shared | {'choices': [], 'usage': usage})}\n\ndata: [DONE]\n\n")
        self.chunk("")

    def chunk(self, text):
        self.wfile.write(f"{len(text):x}\r\n{text}\r\n".encode())

    def log_message(self, *_):
        pass


server = ThreadingHTTPServer(("127.0.0.1", 0), Steady)
threading.Thread(target=server.serve_forever, daemon=True).start()
print("genai-bench", version("genai-bench"))
seen = {}
for name, model, flags in (("all", "whole", ""), ("warm-up", "whole", "--warmup-ratio 0.2 --cooldown-ratio 0.2"), ("errors", "half", "")):
    line = f"benchmark --api-backend openai --api-base http://127.0.0.1:{server.server_port} --api-key none --api-model-name {model}"
    line += f" --model-tokenizer {work}/tokenizer --task text-to-text --traffic-scenario D(20,{TOKENS}) --num-concurrency 2"
    line += f" --max-requests-per-run 60 --max-time-per-run 1 --experiment-base-dir {work} --experiment-folder-name {name} --log-dir {work} {flags}"
    subprocess.run([f"{os.path.dirname(sys.executable)}/genai-bench", *line.split()], env=os.environ | {"HF_HUB_OFFLINE": "1"}, check=True, stdout=subprocess.DEVNULL)
    (path,) = (work / name).glob("D*.json")
    told = seen[name] = json.loads(path.read_text())["aggregated_metrics"]
    told["tokens"] = told["stats"]["num_output_tokens"]["sum"] / TOKENS
    print(
        f"{name}: {told['num_requests']} requests, {told['num_error_requests']} errors, error rate {told['error_rate']}, tokens of {told['tokens']:.0f} requests,"
        f" {told['requests_per_second']:.2f} requests/s, {told['mean_output_throughput_tokens_per_s']:.1f} tokens/s"
    )
ratios = [told["mean_output_throughput_tokens_per_s"] / told["requests_per_second"] / TOKENS for told in seen.values()]
print(f"tokens/s of the {TOKENS} tokens that each answer has: {', '.join(f'{name} {ratio:.2f}' for name, ratio in zip(seen, ratios))}")
errors = seen["errors"]
kept = abs(ratios[0] - 1) < 0.01 and abs(ratios[1] - 0.6) < 0.03
sys.exit(not (kept and errors["num_error_requests"] > 0.4 * errors["num_requests"] and errors["error_rate"] == 0))
PY
"$work/venv/bin/python" "$work/measure.py" "$work" 2>"$work/log" || { tail -3 "$work/log"; exit 1; }
