#!/usr/bin/env bash
# vllm-router 0.1.17: with `cache_aware` every prompt of text is tokenized by every worker before one of them is chosen.
#
# Guess: the router keeps a tree of texts, as its roadmap says, and sends a worker nothing but the request itself.
# Seen: a request among N workers makes N calls of /render first, each of them answered with ids, for chats too. A prompt of ids makes none.
# Who is hurt: TTFT has a round trip and a tokenization in it, and N workers tokenize each prompt N + 1 times.
#
# Needs bash, and Python 3.11 or later as $PYTHON or python3; a minute, 20 MB to download. Exits 1 if the behaviour changes.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
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
        if self.path.endswith("/render"):
            text = str(body.get("prompt") or body["messages"])
            ids = [sum(map(ord, word)) for word in text.split()]
            one = {"request_id": "r", "model": "m", "token_ids": ids, "sampling_params": {"max_tokens": 4}, "stream": False}
            return self.reply(200, one if "chat" in self.path else [one])
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
CASES = {
    "text": ("/v1/completions", {"prompt": "one two three " * 50}),
    "chat": ("/v1/chat/completions", {"messages": [{"role": "user", "content": "one two three " * 50}]}),
    "ids": ("/v1/completions", {"prompt": list(range(150))}),
}
for count in (2, 4):
    router = Router([f"{sys.argv[1]}/vllm/bin/vllm-router"], count, "--policy", "cache_aware")
    for name, (path, body) in CASES.items():
        seen.clear()
        status, _ = router.post(path, body)
        rendered = [number for number, where, _ in seen if where == path + "/render"]
        print(f"{count} workers, {name}: {len(rendered)} calls of {path}/render, then {len(seen) - len(rendered)} request")
        assert status == 200 and len(seen) == len(rendered) + 1 and seen[-1][1] == path, seen
        assert sorted(rendered) == ([] if name == "ids" else list(range(count))), rendered
    router.stop()
PY
"${PYTHON:-python3}" "$work/measure.py" "$work"
