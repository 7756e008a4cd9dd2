#!/usr/bin/env bash
# SGLang 0.5.23, benchmark.serving: where an event has several tokens, the peak output throughput is below the mean.
#
# Guess: "Peak output token throughput" is that of the best second, so it is at least the mean's "Output token throughput".
# Seen: four tokens an event, as diffusion models and speculative decoding send them, and an event every 50 ms: the mean was 76 tok/s on a
# busy machine, the peak of all seconds 20. The peak counts events, the mean tokens; the ITL beside is a gap between events too.
# Who is hurt: whoever sizes by the peak, or compares a diffusion model with another: both numbers are printed as tok/s.
#
# Needs bash, python3 (3.11) and 2 GB; some three minutes. Exits 1 if the behaviour changes.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
# The client alone: the engine that its package depends on takes 14 GB.
{ "$work/venv/bin/python" -m pip -q --disable-pip-version-check install --no-deps sglang==0.5.23 &&
  "$work/venv/bin/python" -m pip -q --disable-pip-version-check install transformers==5.19.0 aiohttp msgspec orjson requests datasets pybase64 pillow psutil pyzmq tqdm numpy
} 2>"$work/pip" || { cat "$work/pip"; exit 2; }

cat > "$work/client.py" <<'PY'
"""sglang.benchmark.serving as it is. What else of the package it imports is one constant, and would load the engine."""

import importlib.util
import sys
import types

root = importlib.util.find_spec("sglang").submodule_search_locations[0]
for name, path in {"sglang": root, "sglang.srt": f"{root}/srt", "sglang.srt.utils": f"{root}/srt/utils", "sglang.srt.disaggregation": "", "sglang.srt.disaggregation.utils": ""}.items():
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__path__ = [path] if path else []
sys.modules["sglang.srt.disaggregation.utils"].FAKE_BOOTSTRAP_HOST = "2.2.2.2"
from sglang.benchmark.serving import cli_main

cli_main()
PY
cat > "$work/measure.py" <<'PY'
import json
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

folder = sys.argv[1]


class Blocks(BaseHTTPRequestHandler):
    """160 tokens, four an event, an event every 50 ms."""

    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b'{"object": "list", "data": [{"id": "m", "object": "model"}]}')

    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        for k in range(40):
            time.sleep(0.05)
            choice = {"index": 0, "text": "tok tok tok tok ", "finish_reason": "length" if k == 39 else None}
            self.wfile.write(f"data: {json.dumps({'id': '1', 'object': 'text_completion', 'choices': [choice]})}\n\n".encode())
        self.wfile.write(b"data: [DONE]\n\n")

    def log_message(self, *_):
        pass


words = {word: i for i, word in enumerate(["<unk>", "</s>", "tok", *(f"w{i}" for i in range(500))])}
backend = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", eos_token="</s>").save_pretrained(f"{folder}/tokenizer")
server = ThreadingHTTPServer(("127.0.0.1", 0), Blocks)
threading.Thread(target=server.serve_forever, daemon=True).start()
words = f"--backend vllm --base-url http://127.0.0.1:{server.server_port} --model m --tokenizer {folder}/tokenizer --dataset-name random-ids"
words += f" --random-input-len 8 --random-output-len 160 --random-range-ratio 1 --num-prompts 3 --max-concurrency 1 --disable-tqdm --output-file {folder}/out"
subprocess.run([sys.executable, f"{folder}/client.py", *words.split()], check=True, capture_output=True)
with open(f"{folder}/out") as file:
    told = json.loads(file.read())
mean, peak, tokens = told["output_throughput"], told["max_output_tokens_per_s"], told["total_output_tokens_retokenized"]
print(f"{tokens} tokens in {told['duration']:.1f} s: output throughput {mean:.0f} tok/s, peak {peak:.0f} tok/s, mean ITL {told['mean_itl_ms']:.0f} ms of 12.5 a token")
sys.exit(not (tokens == 480 and peak < mean / 2))
PY
"$work/venv/bin/python" -c 'import importlib.metadata as m; print("SGLang", m.version("sglang"))'
HF_HUB_OFFLINE=1 "$work/venv/bin/python" "$work/measure.py" "$work"
