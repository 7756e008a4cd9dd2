#!/usr/bin/env bash
# lm-eval 0.4.13, local-completions: a larger max_gen_toks cuts the prompt from the left, in silence, down to its last token.
#
# Guess: a prompt that does not fit beside max_gen_toks is cut with a warning, as scoring cuts it.
# Seen: a prompt of 1500 tokens, max_length 2048 (the default: no server is asked). At max_gen_toks=1024 its last 1023 are sent,
# at 2046 its last one, and nothing is said. At 2047 all are sent, at 2048 all but the first, both with the warning of
# cut contexts. That checks the lengths after the cut; a cut to 0 or -1 tokens is Python's x[-0:] or x[1:].
# Who is hurt: whoever lets answers grow for a reasoning model: instruction and few shots go, and accuracy with them.
#
# Needs bash, python3 (3.11) and 3 GB; some five minutes, no card. Exits 1 if the behaviour changes.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
pip() { "$work/venv/bin/python" -m pip -q --disable-pip-version-check install --no-compile "$@" 2>"$work/pip" || { cat "$work/pip"; exit 2; }; }
pip torch==2.13.0 --extra-index-url https://download.pytorch.org/whl/cpu
pip 'lm-eval[api]==0.4.13' transformers==5.24.0

cat > "$work/cut.py" <<'PY'
import json
import logging
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.metadata import version
from pathlib import Path

import lm_eval.tasks
import yaml
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

work = Path(sys.argv[1])
TOKENS = 1500
heard, warnings = [], []


class Endpoint(BaseHTTPRequestHandler):
    """An answer to a generation, or a log probability of each token of an echo."""

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        heard.append(body["prompt"][0])
        choice = {"index": 0, "text": "x", "finish_reason": "stop"}
        if body.get("echo"):
            each = len(body["prompt"][0]) + 1
            choice["logprobs"] = {"token_logprobs": [-1.0] * each, "top_logprobs": [{"x": -1.0}] * each}
        content = json.dumps({"choices": [choice]}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_):
        pass


class Warnings(logging.Handler):
    def emit(self, record):
        if "truncat" in record.getMessage():
            warnings.append(record.getMessage())


words = [f"w{i}" for i in range(TOKENS)]
backend = Tokenizer(models.WordLevel({word: i for i, word in enumerate([*words, "<unk>", "</s>"])}, unk_token="<unk>"))
backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", eos_token="</s>").save_pretrained(work / "tokenizer")
(work / "rows.jsonl").write_text(json.dumps({"prompt": " ".join(words[:-1]), "answer": words[-1]}) + "\n")
shared = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(work / "rows.jsonl")}}, "test_split": "test"}
shared |= {"doc_to_text": "{{prompt}}", "doc_to_target": " {{answer}}"}
generate = {"task": "generate", "output_type": "generate_until", "doc_to_text": "{{prompt}} {{answer}}", "metric_list": [{"metric": "bypass"}]}
score = {"task": "score", "output_type": "loglikelihood", "metric_list": [{"metric": "acc"}]}
for task in (generate, score):
    (work / f"{task['task']}.yaml").write_text(yaml.safe_dump(shared | task))
server = ThreadingHTTPServer(("127.0.0.1", 0), Endpoint)
threading.Thread(target=server.serve_forever, daemon=True).start()
tasks = lm_eval.tasks.TaskManager(include_path=str(work), include_defaults=False)
logging.getLogger("lm_eval").addHandler(Warnings())


def sent(task, more="", **options):
    """The prompt that comes in: its first token, its last, how many there are, and whether a cut was told."""
    heard.clear()
    warnings.clear()
    told = f"model=m,base_url=http://127.0.0.1:{server.server_port}/v1/completions,tokenizer_backend=huggingface,tokenizer={work}/tokenizer"
    lm_eval.simple_evaluate("local-completions", model_args=told + more, tasks=[task], task_manager=tasks, bootstrap_iters=0, **options)
    (prompt,) = heard
    return prompt[0], prompt[-1], len(prompt), bool(warnings)


print("lm-eval", version("lm_eval"))
seen = {}
for tokens in (256, 1024, 2046, 2047, 2048):
    seen[tokens] = sent("generate", gen_kwargs=f"max_gen_toks={tokens}")
    first, last, length, told = seen[tokens]
    print(f"max_gen_toks {tokens}: {length} of {TOKENS} tokens are sent, {first} to {last}, {'with' if told else 'without'} a warning")
scored = sent("score", ",max_length=1024")
print(f"scored at max_length 1024: {scored[2]} of {TOKENS} tokens are sent, {scored[0]} to {scored[1]}, {'with' if scored[3] else 'without'} a warning")
end = TOKENS - 1
sys.exit(
    seen
    != {256: (0, end, 1500, False), 1024: (477, end, 1023, False), 2046: (end, end, 1, False), 2047: (0, end, 1500, True), 2048: (1, end, 1499, True)}
    or scored != (477, end, 1023, True)
)
PY
HF_HUB_OFFLINE=1 OPENAI_API_KEY=none "$work/venv/bin/python" "$work/cut.py" "$work" 2>"$work/log" || { tail -3 "$work/log"; exit 1; }
