#!/usr/bin/env bash
# inference-perf 0.7.0: of a server that sends several tokens in one event, the median "inter-token latency" is exactly 0.
#
# Guess: its inter-token latency is the gap between events, here 200 ms, or the time per token, here 50 ms.
# Seen: an event of four tokens becomes four tokens at one moment, so three of four gaps are 0: p25, median and p75 are 0.0, and the mean 0.04 s is
# (last - first) / (tokens - 1), which counts the first event's tokens though nobody waited for them: its tokens came with the TTFT.
# Who is hurt: an objective on the median or p75 of inter-token latency is met by every server of blocks (diffusion LLMs, speculative decoding).
#
# Needs bash, and Python 3.12 or later as $PYTHON or python3.12; a minute. Exits 1 if the behaviour changes.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"${PYTHON:-python3.12}" -m venv "$work/venv"
"$work/venv/bin/python" -m pip -q --disable-pip-version-check install inference-perf==0.7.0 transformers==5.13.0 2>"$work/pip" || { cat "$work/pip"; exit 2; }

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


def event(said):
    return b"data: " + (said if isinstance(said, bytes) else json.dumps({"id": "1", "object": "text_completion", **said}).encode()) + b"\n\n"


class Blocks(BaseHTTPRequestHandler):
    """Sixteen tokens: four after 0.2 s, and four more every 0.2 s."""

    def do_GET(self):
        self.send_response(404)
        self.end_headers()

    do_HEAD = do_GET

    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        for k in range(4):
            time.sleep(0.2)
            choice = {"index": 0, "text": "tok tok tok tok ", "finish_reason": "length" if k == 3 else None}
            self.wfile.write(event({"choices": [choice]}))
        usage = {"prompt_tokens": 8, "completion_tokens": 16, "total_tokens": 24}
        self.wfile.write(event({"choices": [], "usage": usage}) + event(b"[DONE]"))

    def log_message(self, *_):
        pass


words = {word: i for i, word in enumerate(["<unk>", "</s>", "tok", *(f"w{i}" for i in range(500))])}
backend = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", eos_token="</s>").save_pretrained(f"{folder}/tokenizer")
server = ThreadingHTTPServer(("127.0.0.1", 0), Blocks)
threading.Thread(target=server.serve_forever, daemon=True).start()
lengths = {f"{name}_distribution": {"min": n, "max": n, "mean": n, "std_dev": 0, "total_count": 5} for name, n in (("input", 8), ("output", 16))}
asked = {
    "api": {"type": "completion", "streaming": True},
    "data": {"type": "random", **lengths},
    "load": {"type": "concurrent", "num_workers": 1, "stages": [{"num_requests": 5, "concurrency_level": 1}]},
    "server": {"type": "vllm", "model_name": "m", "base_url": f"http://127.0.0.1:{server.server_port}"},
    "tokenizer": {"pretrained_model_name_or_path": f"{folder}/tokenizer"},
    "storage": {"local_storage": {"path": f"{folder}/out"}},
}
with open(f"{folder}/in.yaml", "w") as file:
    json.dump(asked, file)
subprocess.run([program, "-c", f"{folder}/in.yaml"], check=True, capture_output=True)
with open(f"{folder}/out/summary_lifecycle_metrics.json") as file:
    told = json.load(file)["successes"]
latency = told["latency"]
gaps, per_token = latency["inter_token_latency"], latency["time_per_output_token"]
divided_by = (latency["request_latency"]["mean"] - latency["time_to_first_token"]["mean"]) / per_token["mean"]
print(f"{told['count']} answers of {told['output_tokens']['mean']:g} tokens in 4 events, 200 ms apart")
print("inter_token_latency", {name: round(gaps[name], 4) for name in ("mean", "p25", "median", "p75", "p90", "max")})
print(f"time_per_output_token {per_token['mean']:.4f}, the decode divided by {divided_by:.1f} tokens (12 came behind the first event)")
sys.exit(not (gaps["p25"] == gaps["median"] == gaps["p75"] == 0.0 and gaps["max"] > 0.1 and 14 < divided_by < 16))
PY
"$work/venv/bin/python" -c 'import importlib.metadata as m; print("inference-perf", m.version("inference-perf"))'
HF_HUB_OFFLINE=1 "$work/venv/bin/python" "$work/measure.py" "$work" "$work/venv/bin/inference-perf"
