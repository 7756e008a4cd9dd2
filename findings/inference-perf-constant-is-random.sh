#!/usr/bin/env bash
# inference-perf 0.7.0: a load of type "constant" arrives at random, as spread as a Poisson process.
#
# Guess: 20 requests/s of type "constant" come every 50 ms, give or take what the client's clock and processes add; only "poisson" is random.
# Seen: gaps are drawn from an exponential distribution and scaled to fill the stage. Of 300 gaps the coefficient of variation is about 1
# (evenly spaced: 0; Poisson: 1), a third are shorter than 20 ms, and the longest is some 6 means. No seed fixes them.
# Who is hurt: a sweep by "constant" to find where a server saturates measures waits from bursts of the client's own; two runs differ.
#
# Needs bash, and Python 3.12 or later as $PYTHON or python3.12; a minute and a half. Exits 1 if the behaviour changes.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"${PYTHON:-python3.12}" -m venv "$work/venv"
"$work/venv/bin/python" -m pip -q --disable-pip-version-check install inference-perf==0.7.0 transformers==5.13.0 2>"$work/pip" || { cat "$work/pip"; exit 2; }

cat > "$work/measure.py" <<'PY'
import json
import statistics
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

folder, program = sys.argv[1:]
RATE, SECONDS = 20, 15
came = []


class Clocked(BaseHTTPRequestHandler):
    """Answers at once, and notes when it was asked."""

    protocol_version = "HTTP/1.1"

    def do_GET(self):
        self.send_response(404)
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_HEAD = do_GET

    def do_POST(self):
        came.append(time.monotonic())
        self.rfile.read(int(self.headers["Content-Length"]))
        usage = {"prompt_tokens": 8, "completion_tokens": 1, "total_tokens": 9}
        told = {"id": "1", "object": "text_completion", "choices": [{"index": 0, "text": "tok", "finish_reason": "length"}], "usage": usage}
        said = json.dumps(told).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(said)))
        self.end_headers()
        self.wfile.write(said)

    def log_message(self, *_):
        pass


words = {word: i for i, word in enumerate(["<unk>", "</s>", "tok", *(f"w{i}" for i in range(500))])}
backend = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", eos_token="</s>").save_pretrained(f"{folder}/tokenizer")
server = ThreadingHTTPServer(("127.0.0.1", 0), Clocked)
threading.Thread(target=server.serve_forever, daemon=True).start()
num = RATE * SECONDS
lengths = {f"{name}_distribution": {"min": n, "max": n, "mean": n, "std_dev": 0, "total_count": num} for name, n in (("input", 8), ("output", 1))}
asked = {
    "api": {"type": "completion", "streaming": False},
    "data": {"type": "random", **lengths},
    "load": {"type": "constant", "num_workers": 1, "stages": [{"rate": RATE, "duration": SECONDS}]},
    "server": {"type": "vllm", "model_name": "m", "base_url": f"http://127.0.0.1:{server.server_port}"},
    "tokenizer": {"pretrained_model_name_or_path": f"{folder}/tokenizer"},
    "storage": {"local_storage": {"path": f"{folder}/out"}},
}
with open(f"{folder}/in.yaml", "w") as file:
    json.dump(asked, file)
subprocess.run([program, "-c", f"{folder}/in.yaml"], check=True, capture_output=True)
gaps = [after - before for before, after in pairwise(sorted(came))]
mean = statistics.mean(gaps)
spread, short = statistics.stdev(gaps) / mean, sum(gap < 0.4 / RATE for gap in gaps) / len(gaps)
print(f"{len(came)} requests, mean gap {1000 * mean:.1f} ms, coefficient of variation {spread:.2f}")
print(f"{100 * short:.0f} % of the gaps are shorter than {400 / RATE:g} ms (Poisson: 33 %), the longest is {max(gaps) / mean:.1f} means")
sys.exit(not (len(came) == num and 0.8 < spread < 1.25 and short > 0.2 and max(gaps) > 3 * mean))
PY
"$work/venv/bin/python" -c 'import importlib.metadata as m; print("inference-perf", m.version("inference-perf"))'
HF_HUB_OFFLINE=1 "$work/venv/bin/python" "$work/measure.py" "$work" "$work/venv/bin/inference-perf"
