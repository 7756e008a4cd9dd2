#!/usr/bin/env bash
# sglang-router 0.3.2 passes SGLang's own fields on in a completion, and loses some of them in a chat, without a word.
#
# Guess: a router hands the body on as it is, so `priority`, `cache_salt`, `rid` and the like reach the server from both endpoints, or from neither.
# Seen: of nine fields of SGLang's own requests /v1/completions passes all on and /v1/chat/completions three. Both answer 200.
# Who is hurt: runs of priority scheduling, of salted caches or of pinned ranks through a chat benchmark measure the server without them.
#
# Needs bash, and Python 3.11 or later as $PYTHON or python3; a minute, 30 MB to download. Exits 1 if the behaviour changes.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"${PYTHON:-python3}" -m venv "$work/sglang"
"$work/sglang/bin/python" -m pip -q --disable-pip-version-check install sglang-router==0.3.2 2>"$work/pip" || { cat "$work/pip"; exit 2; }

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
FIELDS = {"priority": 3, "cache_salt": "s", "extra_key": "k", "rid": "r", "custom_params": {"a": 1}, "routed_dp_rank": 0}
FIELDS |= {"lora_path": "l", "regex": "a", "return_hidden_states": True}
PROMPTS = {"/v1/completions": {"prompt": "q"}, "/v1/chat/completions": {"messages": [{"role": "user", "content": "q"}]}}
router = Router([sys.executable, "-m", "sglang_router.launch_router"], 1, "--policy", "round_robin")
passed = {}
for path, prompt in PROMPTS.items():
    status, _ = router.post(path, {**prompt, **FIELDS})
    passed[path] = [field for field, value in FIELDS.items() if seen[-1][2].get(field) == value]
    print(path, status, "passed on:", *passed[path])
    assert status == 200
router.stop()
assert passed["/v1/completions"] == list(FIELDS), passed
assert passed["/v1/chat/completions"] == ["lora_path", "regex", "return_hidden_states"], passed
PY
"$work/sglang/bin/python" "$work/measure.py"
