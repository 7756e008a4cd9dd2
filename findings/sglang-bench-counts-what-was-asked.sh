#!/usr/bin/env bash
# SGLang 0.5.23, benchmark.serving against /v1/completions: an answer has as many tokens as were asked for, however many came, and with
# usage, which would tell, no request succeeds.
#
# Guess: without usage it counts with the tokenizer that it was given. With `stream_options: {"include_usage": true}` in
# --extra-request-body it takes the server's count: its source has a comment on "a last usage summary response without a token".
# Seen: asked for 16, 8 tokens come in 8 events, with finish_reason "stop": output_lens is 16, so the rate is twice what it was and the
# time per token about half. The tokens of the text, which it counts beside, are 8. The last event with usage has no choices, as OpenAI
# defines it: IndexError, every request fails, and so does the benchmark. On the chat route usage is read, and 8 are counted.
# Who is hurt: a comparison of servers where answers end early; such an answer looks fast.
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
from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

folder = sys.argv[1]


class Short(BaseHTTPRequestHandler):
    """Eight tokens, whatever was asked for, 50 ms apart."""

    asked = None

    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b'{"object": "list", "data": [{"id": "m", "object": "model"}]}')

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        Short.asked = body.get("max_tokens") or body.get("max_completion_tokens")
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        for k in range(8):
            time.sleep(0.05)
            content = {"delta": {"content": "tok "}} if "chat" in self.path else {"text": "tok "}
            self.say({"choices": [{"index": 0, **content, "finish_reason": "stop" if k == 7 else None}]})
        if (body.get("stream_options") or {}).get("include_usage"):
            self.say({"choices": [], "usage": {"prompt_tokens": 8, "completion_tokens": 8, "total_tokens": 16}})
        self.wfile.write(b"data: [DONE]\n\n")

    def say(self, said):
        self.wfile.write(f"data: {json.dumps({'id': '1', 'object': 'text_completion', **said})}\n\n".encode())

    def log_message(self, *_):
        pass


words = {word: i for i, word in enumerate(["<unk>", "</s>", "tok", *(f"w{i}" for i in range(500))])}
backend = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", eos_token="</s>", chat_template="{{ messages[0].content }}").save_pretrained(f"{folder}/tokenizer")
server = ThreadingHTTPServer(("127.0.0.1", 0), Short)
threading.Thread(target=server.serve_forever, daemon=True).start()
words = f"--base-url http://127.0.0.1:{server.server_port} --model m --tokenizer {folder}/tokenizer --dataset-name random-ids --random-input-len 8"
words += " --random-output-len 16 --random-range-ratio 1 --num-prompts 3 --max-concurrency 1 --output-details --disable-tqdm"
seen = {}
for backend, usage in (("vllm", False), ("vllm", True), ("vllm-chat", True)):
    out = Path(f"{folder}/{backend}-{usage}.jsonl")
    extra = ["--extra-request-body", '{"stream_options": {"include_usage": true}}'] if usage else []
    done = subprocess.run([sys.executable, f"{folder}/client.py", *words.split(), "--backend", backend, "--output-file", str(out), *extra], capture_output=True, text=True)
    told = json.loads(out.read_text()) if out.is_file() else None
    last = done.stderr.strip().splitlines()[-1] if done.stderr.strip() else ""
    seen[backend, usage] = (told["output_lens"], told["total_output_tokens_retokenized"]) if told else last
    more = f", {told['mean_tpot_ms']:.0f} ms a token of 50" if told else ""
    print(f"{backend}, usage {'asked for' if usage else 'not asked for'}: exit {done.returncode}, (output_lens, tokens of the texts) {seen[backend, usage]}{more}; asked for {Short.asked} a request")
sys.exit(not (seen == {("vllm", False): ([16] * 3, 24), ("vllm", True): "IndexError: list index out of range", ("vllm-chat", True): ([8] * 3, 24)}))
PY
"$work/venv/bin/python" -c 'import importlib.metadata as m; print("SGLang", m.version("sglang"))'
HF_HUB_OFFLINE=1 "$work/venv/bin/python" "$work/measure.py" "$work"
