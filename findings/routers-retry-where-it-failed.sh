#!/usr/bin/env bash
# sglang-router 0.3.2 and vllm-router 0.1.17: with `cache_aware` all five tries of a request go to the worker that refuses it.
#
# Guess: a request that a worker answers with 503 is tried again at another worker, as with `round_robin`: three of four are idle.
# Seen: five tries, all at the one worker, within half a second, then the client gets the 503. With `round_robin` the second try succeeds.
# Who is hurt: one overloaded or draining worker fails its requests while others idle, and gets five times its load just then.
#
# Needs bash, and Python 3.11 or later as $PYTHON or python3; a minute, 50 MB to download. Exits 1 if the behaviour changes.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"${PYTHON:-python3}" -m venv "$work/sglang"
"$work/sglang/bin/python" -m pip -q --disable-pip-version-check install sglang-router==0.3.2 2>"$work/pip" || { cat "$work/pip"; exit 2; }
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
        if "refused" in str(body) and self.server.number == next(iter(refusing), self.server.number):
            refusing.add(self.server.number)
            return self.reply(503, {"error": {"message": "busy"}})
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
work, refusing = sys.argv[1], set()
PROGRAMS = {
    "sglang-router": [f"{work}/sglang/bin/python", "-m", "sglang_router.launch_router"],
    "vllm-router": [f"{work}/vllm/bin/vllm-router"],
}

for name, program in PROGRAMS.items():
    for policy, status, tries, workers_tried in (("cache_aware", 503, 5, 1), ("round_robin", 200, 2, 2)):
        refusing.clear()
        router = Router(program, 4, "--policy", policy)
        got = router.post("/v1/completions", {"prompt": "refused by the first worker that sees it"})[0]
        tried = [number for number, path, _ in seen if path == "/v1/completions"]
        router.stop()
        print(f"{name} {policy}: the client got {got}, workers tried {tried}")
        assert (got, len(tried), len(set(tried))) == (status, tries, workers_tried), (name, policy, got, tried)
PY
"${PYTHON:-python3}" "$work/measure.py" "$work"
