#!/usr/bin/env bash
# sglang-router 0.3.2 and smg 1.13.0 refuse a completion whose prompt is a list of token ids, which OpenAI, SGLang and vLLM take.
#
# Guess: `"prompt": [1, 2, 3]` is handed on to the server, as vllm-router 0.1.17 does, and as both do in /generate with `input_ids`.
# Seen: sglang-router answers 422 and smg 400, both before any worker is asked. The same ids in /generate arrive.
# Who is hurt: benchmarks that replay traces by ids (exact lengths, no second tokenization) cannot go through these routers with OpenAI's API.
#
# Needs bash, and Python 3.11 or later as $PYTHON or python3; a minute, 90 MB to download. Exits 1 if the behaviour changes.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"${PYTHON:-python3}" -m venv "$work/sglang"
"$work/sglang/bin/python" -m pip -q --disable-pip-version-check install sglang-router==0.3.2 2>"$work/pip" || { cat "$work/pip"; exit 2; }
"${PYTHON:-python3}" -m venv "$work/smg"
"$work/smg/bin/python" -m pip -q --disable-pip-version-check install smg==1.13.0 2>"$work/pip" || { cat "$work/pip"; exit 2; }
"${PYTHON:-python3}" -m venv "$work/vllm"
"$work/vllm/bin/python" -m pip -q --disable-pip-version-check install vllm-router==0.1.17 2>"$work/pip" || { cat "$work/pip"; exit 2; }

cat > "$work/measure.py" <<'PY'
import json
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Worker(BaseHTTPRequestHandler):
    """Answers at once, and notes which worker got which request."""

    protocol_version = "HTTP/1.1"

    def reply(self, status, body):
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self):
        models = {"object": "list", "data": [{"id": "m", "object": "model", "created": 1, "owned_by": "me"}]}
        self.reply(200, models if self.path.startswith("/v1/models") else {})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        seen.append((self.server.number, self.path, body))
        if self.path.endswith(("/render", "/tokenize")):
            return self.reply(404, {})
        self.reply(200, CHAT if "chat" in self.path else ANSWER)

    def log_message(self, *_):
        pass


def workers(count):
    servers = [ThreadingHTTPServer(("127.0.0.1", 0), Worker) for _ in range(count)]
    for number, server in enumerate(servers):
        server.number = number
        threading.Thread(target=server.serve_forever, daemon=True).start()
    return [f"http://127.0.0.1:{server.server_port}" for server in servers]


def free_port():
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


class Router:
    def __init__(self, program, count, *options):
        self.url = f"http://127.0.0.1:{(port := free_port())}"
        where = ["--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(free_port())]
        command = [*program, *where, "--worker-urls", *workers(count), *options]
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        for _ in range(600):
            try:
                if self.post("/v1/completions", {"prompt": "are you there"})[0] == 200:
                    break
            except OSError:
                pass
            time.sleep(0.1)
        seen.clear()

    def post(self, path, body):
        data = json.dumps({"model": "m", "max_tokens": 4, **body}).encode()
        request = urllib.request.Request(self.url + path, data, {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=30) as answer:
                return answer.status, answer.read()
        except urllib.error.HTTPError as refused:
            return refused.code, refused.read()

    def stop(self):
        self.process.terminate()
        self.process.wait()


ANSWER = {"id": "1", "object": "text_completion", "created": 1, "model": "m", "choices": [{"index": 0, "text": "a", "finish_reason": "length"}]}
MESSAGE = {"index": 0, "message": {"role": "assistant", "content": "a"}, "finish_reason": "length"}
CHAT = {**ANSWER, "object": "chat.completion", "choices": [MESSAGE]}
seen = []
work = sys.argv[1]
CASES = (
    ("sglang-router", [f"{work}/sglang/bin/python", "-m", "sglang_router.launch_router"], 422, True),
    ("smg", [f"{work}/smg/bin/smg", "launch"], 400, True),
    ("vllm-router", [f"{work}/vllm/bin/vllm-router"], 200, False),
)
for name, program, expected, generates in CASES:
    router = Router(program, 1, "--policy", "round_robin")
    status, said = router.post("/v1/completions", {"prompt": [1, 2, 3]})
    print(f"{name}: {status}, {len(seen)} requests at the worker", said.decode()[:120] if status != 200 else "")
    assert status == expected and len(seen) == (expected == 200), (name, status, seen)
    if generates:
        seen.clear()
        assert router.post("/generate", {"input_ids": [1, 2, 3]})[0] == 200 and seen[-1][2]["input_ids"] == [1, 2, 3], seen
    router.stop()
PY
"${PYTHON:-python3}" "$work/measure.py" "$work"
