#!/usr/bin/env bash
# GuideLLM 0.8.1: of a server that reports no usage, an answer has as many tokens as were asked for, however many came.
#
# Guess: without usage it counts with the tokenizer that it was given (--tokenizer), or else the events that came.
# Seen: asked for 16, 8 tokens come in 8 events, with finish_reason "stop" and [DONE]: output_tokens is 16, and so the rate is twice
# what it was and the inter-token latency half. The text that it stores beside has the 8.
# Who is hurt: a comparison of servers of which one leaves usage out, or ignores stream_options; an answer that ends early looks fast.
#
# Needs bash, python3 (3.11) and 4 GB; some three minutes. Exits 1 if the behaviour changes.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/python" -m pip -q --disable-pip-version-check install guidellm==0.8.1 transformers==5.24.0 2>"$work/pip" || { cat "$work/pip"; exit 2; }

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


class Short(BaseHTTPRequestHandler):
    """Eight tokens, whatever was asked for, 50 ms apart."""

    has_usage = False
    asked = None

    def do_GET(self):
        self.send_response(200)
        self.end_headers()

    def do_POST(self):
        Short.asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["max_tokens"]
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        for k in range(8):
            time.sleep(0.05)
            self.say({"choices": [{"index": 0, "text": "tok ", "finish_reason": "stop" if k == 7 else None}]})
        if self.has_usage:
            self.say({"choices": [], "usage": {"prompt_tokens": 8, "completion_tokens": 8, "total_tokens": 16}})
        self.wfile.write(b"data: [DONE]\n\n")

    def say(self, said):
        self.wfile.write(f"data: {json.dumps({'id': '1', 'object': 'text_completion', **said})}\n\n".encode())

    def log_message(self, *_):
        pass


words = {word: i for i, word in enumerate(["<unk>", "</s>", "tok", *(f"w{i}" for i in range(500))])}
backend = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", eos_token="</s>").save_pretrained(f"{folder}/tokenizer")
with open(f"{folder}/in.jsonl", "w") as file:
    file.writelines(json.dumps({"prompt": f"w1 w2 w3 w4 w5 w6 w7 w{i}", "output_tokens_count": 16}) + "\n" for i in range(5))
server = ThreadingHTTPServer(("127.0.0.1", 0), Short)
threading.Thread(target=server.serve_forever, daemon=True).start()
seen = {}
for has_usage in (True, False):
    Short.has_usage = has_usage
    out = f"{folder}/{has_usage}.json"
    subprocess.run(
        [program, "run", "--backend", f"kind=openai_http,target=http://127.0.0.1:{server.server_port},model=m,request_format=/v1/completions",
         "--profile", "kind=synchronous", "--constraint", "kind=max_requests,count=3", "--data", f"kind=json_file,path={folder}/in.jsonl",
         "--tokenizer", f"kind=hf_auto,model={folder}/tokenizer", "--output", f"kind=json,path={out}", "--disable-console"],
        check=True, capture_output=True,
    )
    with open(out) as file:
        (told,) = json.load(file)["benchmarks"]
    answers = told["requests"]["successful"]
    seen[has_usage] = {(each["output_tokens"], len(each["output"].split())) for each in answers}
    itl = sum(each["inter_token_latency_ms"] for each in answers) / len(answers)
    print(f"usage {'told' if has_usage else 'not told'}: asked for {Short.asked}; (output_tokens, words of the text) {sorted(seen[has_usage])}; "
          f"inter-token latency {itl:.0f} ms of 50")
sys.exit(not (Short.asked == 16 and seen == {True: {(8, 8)}, False: {(16, 8)}}))
PY
"$work/venv/bin/python" -c 'import importlib.metadata as m; print("GuideLLM", m.version("guidellm"))'
HF_HUB_OFFLINE=1 "$work/venv/bin/python" "$work/measure.py" "$work" "$work/venv/bin/guidellm"
