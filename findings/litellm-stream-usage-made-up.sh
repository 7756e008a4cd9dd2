#!/usr/bin/env bash
# LiteLLM 1.110.2: where a server sends no usage, a stream's is made up with OpenAI's tokenizer, and a plain answer's is 0.
#
# Guess: no usage from the server means no usage from the client, in a stream and without one.
# Seen: a prompt of four tokens and an answer of three, of the model's own tokenizer, in both ways. The stream's usage says 15
# and 7 tokens with `include_usage`, without a mark that nobody counted them; the plain answer's says 0 and 0. Each has status 200.
# Usage that the server sends passes unchanged.
# Who is hurt: throughput per token and cost of models with another tokenizer, if a server or a router leaves usage out.
#
# Needs bash, python3 (3.11) and 1 GB; some three minutes, no card. Exits 1 if the behaviour changes.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/python" -m pip -q --disable-pip-version-check install --no-compile litellm==1.110.2 2>"$work/pip" || { cat "$work/pip"; exit 2; }

cat > "$work/count.py" <<'PY'
import json
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.metadata import version

import litellm

USAGE = {"prompt_tokens": 4, "completion_tokens": 3, "total_tokens": 7}


class Silent(BaseHTTPRequestHandler):
    """An answer of three tokens, without usage or with it."""

    tells = False

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        shared = {"id": "1", "created": 1, "model": "m"}
        usage = {"usage": USAGE} if self.tells else {}
        if body.get("stream"):
            deltas = [{"role": "assistant", "content": ""}, *[{"content": "w12 "}] * 3, {}]
            choices = [[{"index": 0, "delta": delta, "finish_reason": None if delta else "stop"}] for delta in deltas]
            events = [{"object": "chat.completion.chunk", "choices": each} for each in choices]
            events += [{"object": "chat.completion.chunk", "choices": [], **usage}] if usage else []
            text = "".join(f"data: {json.dumps(shared | event)}\n\n" for event in events) + "data: [DONE]\n\n"
        else:
            choice = {"index": 0, "message": {"role": "assistant", "content": "w12 w12 w12 "}, "finish_reason": "stop"}
            text = json.dumps(shared | {"object": "chat.completion", "choices": [choice], **usage})
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream" if body.get("stream") else "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_):
        pass


server = ThreadingHTTPServer(("127.0.0.1", 0), Silent)
threading.Thread(target=server.serve_forever, daemon=True).start()
asked = {
    "model": "hosted_vllm/m",
    "api_base": f"http://127.0.0.1:{server.server_port}/v1",
    "api_key": "none",
    "messages": [{"role": "user", "content": "w12 w13 w14 w15"}],
}
print("LiteLLM", version("litellm"))
seen = {}
for Silent.tells in (False, True):
    plain = litellm.completion(**asked).usage
    chunks = litellm.completion(**asked, stream=True, stream_options={"include_usage": True})
    streamed = [chunk.usage for chunk in chunks if getattr(chunk, "usage", None)]
    seen[Silent.tells] = [(usage.prompt_tokens, usage.completion_tokens) for usage in (plain, *streamed)]
    print(f"the server sends {'usage of (4, 3)' if Silent.tells else 'no usage'}: plain {seen[Silent.tells][0]}, stream {seen[Silent.tells][1:]}")
silent = seen[False]
sys.exit(not (seen[True] == [(4, 3)] * 2 and silent[0] == (0, 0) and len(silent) == 2 and min(silent[1]) > 3))
PY
LITELLM_LOCAL_MODEL_COST_MAP=True "$work/venv/bin/python" "$work/count.py" 2>"$work/log" || { tail -3 "$work/log"; exit 1; }
