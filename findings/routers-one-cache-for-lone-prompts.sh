#!/usr/bin/env bash
# sglang-router 0.3.2 and vllm-router 0.1.17: `cache_aware`, their default, sends unrelated prompts asked one at a time to one worker of four.
#
# Guess: a prompt that no worker has seen goes to the worker with the smallest tree, so sixteen of one length are spread by four each.
# Seen: all sixteen reach one worker, and three idle ones stay empty. With four prompts in flight all four workers serve.
# Who is hurt: at low load one of N prefix caches is used: hit rates fall, and evictions begin at a fraction of the memory there is.
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
import random
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
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
        time.sleep(delay)
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
work, delay, draw = sys.argv[1], 0.0, random.Random(3)
PROGRAMS = {
    "sglang-router": [f"{work}/sglang/bin/python", "-m", "sglang_router.launch_router"],
    "vllm-router": [f"{work}/vllm/bin/vllm-router"],
}


def spread(router, at_once):
    """How many of sixteen unrelated prompts each worker served."""
    seen.clear()
    prompts = [" ".join(str(draw.randrange(10**6)) for _ in range(300)) for _ in range(16)]
    with ThreadPoolExecutor(at_once) as pool:
        list(pool.map(lambda prompt: router.post("/v1/completions", {"prompt": prompt}), prompts))
    return sorted(Counter(number for number, path, _ in seen if path == "/v1/completions").values(), reverse=True)


for name, program in PROGRAMS.items():
    delay, router = 0.0, Router(program, 4, "--policy", "cache_aware")
    alone = spread(router, 1)
    delay = 0.5
    together = spread(router, 4)
    router.stop()
    print(f"{name}: one at a time {alone}, four at a time {together}")
    assert alone == [16] and len(together) == 4, (name, alone, together)
PY
"${PYTHON:-python3}" "$work/measure.py" "$work"
