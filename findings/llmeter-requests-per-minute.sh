#!/usr/bin/env bash
# LLMeter 0.2.0: "requests_per_minute" divides by the time from the first send to the last, so short runs come out several times too fast.
#
# Guess: requests per minute are the requests over the time of the run, as output tokens per minute are.
# Seen: four clients send two requests each, and each answer takes half a second. The eight take 1 s, which is 480 a minute. LLMeter says
#   some 950. With one request each it says over 10,000 for 480. `average_input_tokens_per_minute` has the same factor. The output tokens
#   in the same report are divided by the time of the run.
# Who is hurt: a load test of k requests a client finds a rate k / (k - 1) times the server's. The factor is largest where answers are
#   long and runs therefore short.
#
# Needs bash, and Python 3.12 or later as $PYTHON or python3.12; some two minutes. Exits 1 if the behaviour changes.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"${PYTHON:-python3.12}" -m venv "$work/venv"
# LLMeter imports httpx without asking for it. The last three are pinned since pip searches for a fitting set for many minutes otherwise.
"$work/venv/bin/python" -m pip -q --disable-pip-version-check install --no-compile 'llmeter[openai]==0.2.0' httpx \
  boto3==1.43.117 aiobotocore==3.10.0 s3fs==2026.6.0 2>"$work/pip" || { cat "$work/pip"; exit 2; }
cat > "$work/measure.py" <<'PY'
import asyncio
import json
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.metadata import version

from llmeter.endpoints.openai import OpenAICompletionEndpoint
from llmeter.runner import Runner

CLIENTS, SECONDS, TOKENS = 4, 2.0, 8


class Slow(BaseHTTPRequestHandler):
    """An answer of TOKENS tokens after SECONDS, however many others are asked for."""

    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        time.sleep(SECONDS)
        choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "w " * TOKENS}}
        usage = {"prompt_tokens": TOKENS, "completion_tokens": TOKENS, "total_tokens": 2 * TOKENS}
        body = json.dumps({"id": "1", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice], "usage": usage})
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body.encode())

    def log_message(self, *_):
        pass


server = ThreadingHTTPServer(("127.0.0.1", 0), Slow)
threading.Thread(target=server.serve_forever, daemon=True).start()
endpoint = OpenAICompletionEndpoint(model_id="m", api_key="none", base_url=f"http://127.0.0.1:{server.server_port}/v1")
payload = OpenAICompletionEndpoint.create_payload("hello", max_tokens=TOKENS)
print("LLMeter", version("llmeter"))
kept = True
for each, least in ((1, 10.0), (2, 1.5), (4, 1.2)):
    told = asyncio.run(Runner(endpoint).run(payload=payload, n_requests=each, clients=CLIENTS)).stats
    requests = CLIENTS * each
    rate = requests * 60 / told["total_test_time"]
    ratios = [told["requests_per_minute"] / rate, told["average_input_tokens_per_minute"] / rate / TOKENS, told["average_output_tokens_per_minute"] / rate / TOKENS]
    print(f"{requests} requests in total_test_time {told['total_test_time']:.2f} s, {rate:.0f} a minute; requests_per_minute {told['requests_per_minute']:.0f}")
    print("  over that rate: requests {:.2f}, input tokens {:.2f}, output tokens {:.2f}".format(*ratios))
    kept &= told["failed_requests"] == 0 and min(ratios[:2]) > least and ratios[2] < 1.1
sys.exit(not kept)
PY
"$work/venv/bin/python" "$work/measure.py" 2>"$work/log" || { tail -3 "$work/log"; exit 1; }
