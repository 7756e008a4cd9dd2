#!/usr/bin/env bash
# EvalScope 1.14.1, perf: "Spec. Accept Rate" is made of the tokens in an event: 0.72 for three drafts of which all are accepted, and for no drafts.
#
# Guess: the rate is that of accepted drafts, told by the server, and nothing is printed for a server that does not speculate.
# Seen: it is 1 - events / tokens, both without the first; the closing event, which has no token, counts. Three drafts that are all accepted
#   make events of four tokens: of 33 tokens the rate is 0.72 where it is 1. A diffusion model that sends blocks of four gets the same 0.72,
#   as the client cannot tell them apart. "Input Throughput (tok/s)" in the same summary is 0.0, though usage tells 7 tokens of each prompt.
# Who is hurt: whoever tunes the number of drafts. With k drafts the rate is at best k / (k + 1), so more drafts look better by themselves.
#
# Needs bash, and Python 3.12 or later as $PYTHON or python3.12; 1 GB and some four minutes. Exits 1 if the behaviour changes.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"${PYTHON:-python3.12}" -m venv "$work/venv"
"$work/venv/bin/python" -m pip -q --disable-pip-version-check install --no-compile 'evalscope[perf]==1.14.1' transformers==5.24.0 modelscope==1.40.2 2>"$work/pip" || { cat "$work/pip"; exit 2; }
cat > "$work/measure.py" <<'PY'
import json
import os
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.metadata import version
from pathlib import Path

work, TOKENS = Path(sys.argv[1]), 33


class Events(BaseHTTPRequestHandler):
    """One token, and then 32 in events of as many as the model's name tells."""

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        block = int(body["model"][1:])
        shared = {"id": "1", "object": "chat.completion.chunk", "created": 1, "model": body["model"]}
        for tokens in [1] + [block] * ((TOKENS - 1) // block):
            time.sleep(0.02)
            choice = {"index": 0, "delta": {"content": "w " * tokens}, "finish_reason": None}
            self.wfile.write(f"data: {json.dumps(shared | {'choices': [choice]})}\n\n".encode())
        usage = {"prompt_tokens": 7, "completion_tokens": TOKENS, "total_tokens": TOKENS + 7}
        for last in ({"choices": [{"index": 0, "delta": {}, "finish_reason": "length"}]}, {"choices": [], "usage": usage}):
            self.wfile.write(f"data: {json.dumps(shared | last)}\n\n".encode())
        self.wfile.write(b"data: [DONE]\n\n")

    def log_message(self, *_):
        pass


server = ThreadingHTTPServer(("127.0.0.1", 0), Events)
threading.Thread(target=server.serve_forever, daemon=True).start()
(work / "prompts").write_text("one\ntwo\nthree\nfour\n")
print("EvalScope", version("evalscope"))
seen = {}
for block in (1, 4):
    words = f"perf --model m{block} --url http://127.0.0.1:{server.server_port}/v1/chat/completions --api openai --dataset line_by_line"
    words += f" --dataset-path {work}/prompts --number 4 --parallel 1 --max-tokens {TOKENS} --outputs-dir {work}/out --no-timestamp"
    subprocess.run([f"{os.path.dirname(sys.executable)}/evalscope", *words.split()], check=True, stdout=subprocess.DEVNULL)
    (path,) = (work / "out" / f"m{block}").glob("*/benchmark_summary.json")
    told = json.loads(path.read_text())
    seen[block] = (told["Success Requests"], told.get("Spec. Accept Rate"), told["Avg Input Tokens"], told["Input Throughput (tok/s)"])
    print(f"{block} tokens an event: {seen[block][0]} answers, Spec. Accept Rate {seen[block][1]}, Avg Input Tokens {seen[block][2]}, Input Throughput {seen[block][3]} tok/s")
sys.exit(seen != {1: (4, None, 7.0, 0.0), 4: (4, 0.7188, 7.0, 0.0)})
PY
"$work/venv/bin/python" "$work/measure.py" "$work" 2>"$work/log" || { tail -3 "$work/log"; exit 1; }
