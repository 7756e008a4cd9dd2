#!/usr/bin/env bash
# GuideLLM 0.8.1, --profile kind=poisson: the gaps between requests repeat, once for each worker process.
#
# Guess: gaps are independent draws of an exponential distribution, so no two of them are alike.
# Seen: every worker has a generator of the same seed, and adds its draw to a time that all share. With ten workers (its default for
# many requests) each gap comes some ten times in a row: the 59 gaps of 60 requests have six or seven values. The numbers of requests in 100 ms vary far more
# than a Poisson process's, whose variance is their mean.
# Who is hurt: who measures queueing at a rate. Ten requests in a burst, then ten far apart, wait otherwise than Poisson arrivals do, and
# a run of some hundred requests is at another rate than asked for.
#
# Needs bash, python3 (3.11) and 4 GB; some three minutes. Exits 1 if the behaviour changes.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"${PYTHON:-python3}" -m venv "$work/venv"
"$work/venv/bin/python" -m pip -q --disable-pip-version-check install guidellm==0.8.1 transformers==5.24.0 2>"$work/pip" || { cat "$work/pip"; exit 2; }

cat > "$work/measure.py" <<'PY'
import json
import subprocess
import sys
import threading
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

folder, program = sys.argv[1:]
RATE, NUM = 20, 60


class Fast(BaseHTTPRequestHandler):
    """Answers one token at once."""

    def do_GET(self):
        self.send_response(200)
        self.end_headers()

    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        self.say({"choices": [{"index": 0, "text": "tok ", "finish_reason": "length"}]})
        self.say({"choices": [], "usage": {"prompt_tokens": 8, "completion_tokens": 1, "total_tokens": 9}})
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
    file.writelines(json.dumps({"prompt": f"w1 w2 w3 w4 w5 w6 w7 w{i}", "output_tokens_count": 1}) + "\n" for i in range(NUM))
server = ThreadingHTTPServer(("127.0.0.1", 0), Fast)
threading.Thread(target=server.serve_forever, daemon=True).start()
subprocess.run(
    [program, "run", "--backend", f"kind=openai_http,target=http://127.0.0.1:{server.server_port},model=m,request_format=/v1/completions",
     "--profile", f"kind=poisson,rate={RATE}", "--constraint", f"kind=max_requests,count={NUM}", "--data", f"kind=json_file,path={folder}/in.jsonl",
     "--tokenizer", f"kind=hf_auto,model={folder}/tokenizer", "--output", f"kind=json,path={folder}/out.json", "--disable-console"],
    check=True, capture_output=True,
)
with open(f"{folder}/out.json") as file:
    (told,) = json.load(file)["benchmarks"]
answers = told["requests"]["successful"]
due_s = np.sort([each["info"]["timings"]["targeted_start"] for each in answers])
gaps_ms = np.diff(due_s) * 1e3
times = Counter(gaps_ms.round(2))
counts = np.histogram(due_s, np.arange(due_s[0], due_s[-1], 0.1))[0]
print(f"{len(answers)} requests at {RATE}/s; different gaps, in ms with how often each comes:")
print(", ".join(f"{gap:.2f} x {number}" for gap, number in sorted(times.items())))
print(f"requests in 100 ms: mean {counts.mean():.2f}, variance {counts.var():.2f}")
sys.exit(not (len(answers) == NUM and len(times) <= NUM / 4 and counts.var() > 2 * counts.mean()))
PY
"$work/venv/bin/python" -c 'import importlib.metadata as m; print("GuideLLM", m.version("guidellm"))'
HF_HUB_OFFLINE=1 "$work/venv/bin/python" "$work/measure.py" "$work" "$work/venv/bin/guidellm"
