#!/usr/bin/env bash
# lm-eval 0.4.13, local-completions and local-chat-completions: the samples of `repeats` are one, since each request carries seed 1234.
#
# Guess: `repeats: 8` with `do_sample` and temperature 1 gives eight samples of a problem, from which a task takes maj@8 or pass@8.
# Seen: all eight requests are the same, `seed` included. Against a server that keeps seeds, as vLLM does (0.32.0 gives one prompt with one seed the same
#   tokens, three times in one request too), the eight answers are one. So 40 problems, of which a sample solves 60 %, have a majority that is their first
#   sample; without the seed the majority of eight is better. `seed=None` is refused, and another seed in gen_kwargs is again one for all.
# Who is hurt: gsm8k-cot-self-consistency (64 repeats) and pass@k of the HumanEval tasks against vLLM: k times the price, and the score of one sample.
#
# Needs bash, Python 3.10 or later as $PYTHON or python3, and 3 GB; some five minutes, no card. Exits 1 if the behaviour changes.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"${PYTHON:-python3}" -m venv "$work/venv"
pip() { "$work/venv/bin/python" -m pip -q --disable-pip-version-check install --no-compile "$@" 2>"$work/pip" || { cat "$work/pip"; exit 2; }; }
pip torch==2.13.0 --extra-index-url https://download.pytorch.org/whl/cpu
pip 'lm-eval[api]==0.4.13' transformers==5.24.0

cat > "$work/repeat.py" <<'PY'
import json
import random
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.metadata import version
from pathlib import Path

import lm_eval.tasks
import yaml

work = Path(sys.argv[1])
PROBLEMS, REPEATS = 40, 8
heard, keeps_seeds = [], True


class Endpoint(BaseHTTPRequestHandler):
    """Answers that are right six times of ten, and the same for a prompt and a seed."""

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        heard.append(body.get("seed"))
        asked = body.get("prompt", body.get("messages"))
        choices = []
        for prompt in asked if isinstance(asked, list) and "prompt" in body else [asked]:
            draw = random.Random(json.dumps([prompt, body["seed"]])) if keeps_seeds else random
            text = "right" if draw.random() < 0.6 else f"wrong {draw.randrange(10**6)}"
            choices.append({"index": len(choices), "finish_reason": "stop", "text": text, "message": {"role": "assistant", "content": text}})
        content = json.dumps({"choices": choices}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_):
        pass


(work / "rows.jsonl").write_text("".join(json.dumps({"prompt": f"Problem {i}:"}) + "\n" for i in range(PROBLEMS)))
task = {"task": "vote", "output_type": "generate_until", "dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(work / "rows.jsonl")}}}
task |= {"test_split": "test", "doc_to_text": "{{prompt}}", "doc_to_target": "right", "repeats": REPEATS, "metric_list": [{"metric": "exact_match"}]}
task |= {"generation_kwargs": {"do_sample": True, "temperature": 1.0, "until": ["\n"], "max_gen_toks": 8}}
task["filter_list"] = [
    {"name": "first", "filter": [{"function": "take_first"}]},
    {"name": "majority", "filter": [{"function": "majority_vote"}, {"function": "take_first"}]},
]
(work / "vote.yaml").write_text(yaml.safe_dump(task))
server = ThreadingHTTPServer(("127.0.0.1", 0), Endpoint)
threading.Thread(target=server.serve_forever, daemon=True).start()
tasks = lm_eval.tasks.TaskManager(include_path=str(work), include_defaults=False)


def score(model, path):
    """Accuracies of the first sample and of the majority, the most different answers to one problem, and the seeds that were sent."""
    heard.clear()
    random.seed(0)
    told = f"model=m,base_url=http://127.0.0.1:{server.server_port}{path},tokenizer_backend=None,tokenized_requests=False"
    options = {"apply_chat_template": True} if "chat" in model else {}
    found = lm_eval.simple_evaluate(model, model_args=told, tasks=["vote"], task_manager=tasks, bootstrap_iters=0, log_samples=True, **options)
    answers = max(len(set(sample["resps"][0])) for sample in found["samples"]["vote"])
    values = found["results"]["vote"]
    return values["exact_match,first"], values["exact_match,majority"], answers, len(heard), set(heard)


print("lm-eval", version("lm_eval"))
right = True
for model, path in (("local-completions", "/v1/completions"), ("local-chat-completions", "/v1/chat/completions")):
    for keeps_seeds in (True, False):
        first, majority, answers, requests, seeds = score(model, path)
        print(f"{model}, {requests} requests with seed {seeds}, to a server that {'keeps' if keeps_seeds else 'ignores'} seeds:", end=" ")
        print(f"at most {answers} different answers of {REPEATS}; first {first:.3f}, majority {majority:.3f}")
        right &= requests == PROBLEMS * REPEATS and seeds == {1234}
        right &= (answers == 1 and first == majority) if keeps_seeds else (answers > 3 and majority > first)
sys.exit(not right)
PY
HF_HUB_OFFLINE=1 "$work/venv/bin/python" "$work/repeat.py" "$work" 2>"$work/err" || { tail -5 "$work/err"; exit 1; }
