#!/usr/bin/env bash
# langchain-openai 1.7.4: usage that a server sends with each chunk is summed: 8 tokens are 44, and a prompt of 7 is 70.
#
# Guess: the usage of a chunk is what was used until then, so the last one counts, as it does in OpenAI's own client.
# Seen: eight tokens in a stream whose chunks each have the usage so far, as vLLM sends it with `continuous_usage_stats`. The summed message
#   says 70 and 44 tokens, and so does `UsageMetadataCallbackHandler`. A plain answer and a stream with usage at its end say 7 and 8.
#   The error grows with the square of the length: 1,000 tokens are half a million. No warning.
# Who is hurt: tokens per second and cost of a chain. The same server gives right numbers if only the last chunk has usage.
#
# Needs bash, and Python 3.12 or later as $PYTHON or python3.12; two minutes. Exits 1 if the behaviour changes.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"${PYTHON:-python3.12}" -m venv "$work/venv"
"$work/venv/bin/python" -m pip -q --disable-pip-version-check install --no-compile langchain-openai==1.7.4 langchain-core==1.8.3 openai==3.57.0 2>"$work/pip" || { cat "$work/pip"; exit 2; }
cat > "$work/count.py" <<'PY'
import json
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.metadata import version

from langchain_core.callbacks import UsageMetadataCallbackHandler
from langchain_openai import ChatOpenAI


class Stream(BaseHTTPRequestHandler):
    """Eight tokens to a prompt of seven, with usage in each chunk or in the last alone."""

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        usages = [{"prompt_tokens": 7, "completion_tokens": n, "total_tokens": 7 + n} for n in range(9)]
        shared = {"id": "1", "created": 1, "model": body["model"]}
        if body.get("stream"):
            each = body["stream_options"].get("continuous_usage_stats")
            deltas = [{"role": "assistant", "content": ""}, *[{"content": "w "}] * 8]
            events = [
                {"choices": [{"index": 0, "delta": delta, "finish_reason": "length" if n == 8 else None}]} | ({"usage": usages[n]} if each else {})
                for n, delta in enumerate(deltas)
            ]
            events.append({"choices": [], "usage": usages[8]})
            text = "".join(f"data: {json.dumps(shared | {'object': 'chat.completion.chunk'} | event)}\n\n" for event in events) + "data: [DONE]\n\n"
        else:
            choice = {"index": 0, "message": {"role": "assistant", "content": "w " * 8}, "finish_reason": "length"}
            text = json.dumps(shared | {"object": "chat.completion", "choices": [choice], "usage": usages[8]})
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream" if body.get("stream") else "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_):
        pass


server = ThreadingHTTPServer(("127.0.0.1", 0), Stream)
threading.Thread(target=server.serve_forever, daemon=True).start()
print("langchain-openai", version("langchain-openai"), "langchain-core", version("langchain-core"), "openai", version("openai"))
client = ChatOpenAI(model="m", base_url=f"http://127.0.0.1:{server.server_port}/v1", api_key="none")
seen = {}
for name, options in (("plain answer", None), ("usage in the last chunk", {}), ("usage in each chunk", {"continuous_usage_stats": True})):
    counter = UsageMetadataCallbackHandler()
    if options is None:
        message = client.invoke("hello", config={"callbacks": [counter]})
    else:
        chunks = list(client.stream("hello", config={"callbacks": [counter]}, extra_body={"stream_options": {"include_usage": True} | options}))
        message = sum(chunks[1:], start=chunks[0])
    seen[name] = [(usage["input_tokens"], usage["output_tokens"]) for usage in (message.usage_metadata, *counter.usage_metadata.values())]
    print(f"{name}: {message.content.count('w')} tokens, of the message {seen[name][0]}, of the callback {seen[name][1:]}")
sys.exit(list(seen.values()) != [[(7, 8)] * 2, [(7, 8)] * 2, [(70, 44)] * 2])
PY
"$work/venv/bin/python" "$work/count.py"
