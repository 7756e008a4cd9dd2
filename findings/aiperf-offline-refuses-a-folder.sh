#!/usr/bin/env bash
# AIPerf 0.13.0: with HF_HUB_OFFLINE=1 a tokenizer's folder is refused, which is taken without it.
#
# Guess: a folder on this disk needs no hub, so that being offline changes nothing; transformers loads it either way.
# Seen: offline, `--tokenizer FOLDER` ends before a request with "HFValidationError: Repo id must be in the form ...": AIPerf looks the folder
# up as the name of a repository in the hub's cache. Without the variable the same command runs, with no network either.
# Who is hurt: an air-gapped machine, where HF_HUB_OFFLINE=1 is the usual setting; unset it for AIPerf alone, or use `--tokenizer builtin`.
#
# Needs bash, python3 (3.11) and 3 GB; some three minutes. Exits 1 if the behaviour changes.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/python" -m pip -q --disable-pip-version-check install aiperf==0.13.0 2>"$work/pip" || { cat "$work/pip"; exit 2; }

cat > "$work/measure.py" <<'PY'
import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

folder, program = sys.argv[1:]


class Server(BaseHTTPRequestHandler):
    posts = 0

    def do_GET(self):
        self.say("application/json", b'{"object": "list", "data": [{"id": "m", "object": "model"}]}')

    do_HEAD = do_GET

    def do_POST(self):
        Server.posts += 1
        self.rfile.read(int(self.headers["Content-Length"]))
        said = {"id": "1", "object": "text_completion", "choices": [{"index": 0, "text": "tok tok", "finish_reason": "length"}]}
        self.say("text/event-stream", f"data: {json.dumps(said)}\n\ndata: [DONE]\n\n".encode())

    def say(self, kind, content):
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_):
        pass


words = {word: i for i, word in enumerate(["<unk>", "</s>", "tok", *(f"w{i}" for i in range(500))])}
backend = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", eos_token="</s>").save_pretrained(f"{folder}/tokenizer")
server = ThreadingHTTPServer(("127.0.0.1", 0), Server)
threading.Thread(target=server.serve_forever, daemon=True).start()
words = f"profile --model m --url http://127.0.0.1:{server.server_port} --endpoint-type completions --streaming --request-count 3"
words += " --concurrency 1 --synthetic-input-tokens-mean 8 --output-tokens-mean 2 --num-dataset-entries 3 --ui-type none"
seen = {}
for offline in ("1", ""):
    os.environ["HF_HUB_OFFLINE"] = offline
    loads = "import sys; from transformers import AutoTokenizer as A; print(len(A.from_pretrained(sys.argv[1])))"
    subprocess.run([sys.executable, "-c", loads, f"{folder}/tokenizer"], check=True, capture_output=True)
    before = Server.posts
    done = subprocess.run(
        [program, *words.split(), "--tokenizer", f"{folder}/tokenizer", "--output-artifact-dir", f"{folder}/out{offline}"],
        capture_output=True, text=True, timeout=300,
    )
    said = done.stdout + done.stderr
    seen[offline] = done.returncode, Server.posts - before, "HFValidationError" in said
    print(f"HF_HUB_OFFLINE={offline!r}: transformers loads the folder; aiperf exit {done.returncode}, {Server.posts - before} requests,"
          f" HFValidationError {'HFValidationError' in said}")
sys.exit(not (seen["1"][0] != 0 and seen["1"][1:] == (0, True) and seen[""] == (0, 3, False)))
PY
"$work/venv/bin/python" -c 'import importlib.metadata as m; print("AIPerf", m.version("aiperf"))'
"$work/venv/bin/python" "$work/measure.py" "$work" "$work/venv/bin/aiperf"
