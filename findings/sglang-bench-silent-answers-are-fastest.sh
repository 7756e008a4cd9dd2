#!/usr/bin/env bash
# SGLang 0.5.23, benchmark.serving against /v1/completions: an answer without text has a time to first token of 0, and is averaged.
#
# Guess: an answer whose stream has no text (the model ends at once) has no time to first token, and the means leave it out.
# Seen: every answer takes 0.3 s to its first event; half of them say "stop" there and have no text. They count as completed with a time
# to first token of 0 ms, so the mean is half of what it was, and with two thirds of them the median is 0.
# Who is hurt: a comparison of models or servers of which one more often ends at once; it looks faster the less it says.
#
# Needs bash, python3 (3.11) and 2 GB; some three minutes. Exits 1 if the behaviour changes.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"${PYTHON:-python3}" -m venv "$work/venv"
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
from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

folder = sys.argv[1]


class Silent(BaseHTTPRequestHandler):
    """The first event comes after 0.3 s. Only some answers have text."""

    num = 0
    silent_of_three = 0

    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b'{"object": "list", "data": [{"id": "m", "object": "model"}]}')

    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        time.sleep(0.3)
        is_silent = Silent.num % 3 < self.silent_of_three
        Silent.num += 1
        for k in range(1 if is_silent else 4):
            text = "" if is_silent else "tok "
            self.say({"choices": [{"index": 0, "text": text, "finish_reason": "stop" if is_silent or k == 3 else None}]})
        self.wfile.write(b"data: [DONE]\n\n")

    def say(self, said):
        self.wfile.write(f"data: {json.dumps({'id': '1', 'object': 'text_completion', **said})}\n\n".encode())

    def log_message(self, *_):
        pass


words = {word: i for i, word in enumerate(["<unk>", "</s>", "tok", *(f"w{i}" for i in range(500))])}
backend = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", eos_token="</s>", chat_template="{{ messages[0].content }}").save_pretrained(f"{folder}/tokenizer")
server = ThreadingHTTPServer(("127.0.0.1", 0), Silent)
threading.Thread(target=server.serve_forever, daemon=True).start()
words = f"--base-url http://127.0.0.1:{server.server_port} --model m --tokenizer {folder}/tokenizer --dataset-name random-ids --random-input-len 8"
words += " --random-output-len 16 --random-range-ratio 1 --num-prompts 6 --max-concurrency 1 --output-details --disable-tqdm"
seen = {}
for silent in (0, 1, 2):
    out, Silent.silent_of_three = Path(f"{folder}/{silent}.jsonl"), silent
    # The first request is the benchmark's own warm-up.
    Silent.num = 2
    subprocess.run([sys.executable, f"{folder}/client.py", *words.split(), "--backend", "vllm", "--output-file", str(out)], check=True, capture_output=True)
    told = json.loads(out.read_text())
    num_zero = sum(each == 0 for each in told["ttfts"])
    seen[silent] = told["completed"], num_zero, round(told["mean_ttft_ms"], -2), round(told["median_ttft_ms"], -2)
    print(f"{silent} of 3 answers without text: {told['completed']} completed, {num_zero} with a time to first token of 0; mean {told['mean_ttft_ms']:.0f} ms, "
          f"median {told['median_ttft_ms']:.0f} ms")
sys.exit(not (seen == {0: (6, 0, 300, 300), 1: (6, 2, 200, 300), 2: (6, 4, 100, 0)}))
PY
"$work/venv/bin/python" -c 'import importlib.metadata as m; print("SGLang", m.version("sglang"))'
HF_HUB_OFFLINE=1 "$work/venv/bin/python" "$work/measure.py" "$work"
