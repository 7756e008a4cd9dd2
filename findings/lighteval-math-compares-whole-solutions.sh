#!/usr/bin/env bash
# lighteval 0.13.0: its MATH tasks compare whole solutions as text, so four right answers in a box score 0.
#
# Guess: `maj@n` of "math:algebra" takes the boxed answer of each sample, as its `math_normalizer` does, and scores the most frequent one.
# Seen: four samples end in \boxed{7} as the reference does, and the score is 0. It is 1 only for the reference solution, word for word. The task
#   gives `normalize_pred` and `normalize_gold`, and the metric reads `normalize`, which stays None. No warning is printed.
#   The same `maj@n` with `normalize` set scores 1, and 1 as well where one of four samples is wrong.
# Who is hurt: all seven tasks of MATH: every model scores about 0, and a comparison of quantized models on them finds no loss.
#
# Needs bash, Python 3.12 as $PYTHON or python3.12, and 2 GB; some three minutes. Exits 1 if the behaviour changes.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"${PYTHON:-python3.12}" -m venv "$work/venv"
pip() { "$work/venv/bin/python" -m pip -q --disable-pip-version-check install --no-compile "$@" 2>"$work/pip" || { cat "$work/pip"; exit 2; }; }
pip torch==2.13.0 --extra-index-url https://download.pytorch.org/whl/cpu
pip lighteval==0.13.0 transformers==5.24.0

cat > "$work/score.py" <<'PY'
import importlib.metadata
import sys

from lighteval.metrics.metrics_sample import MajAtN
from lighteval.metrics.normalizations import math_normalizer
from lighteval.models.model_output import ModelResponse
from lighteval.tasks.tasks.math import TASKS_TABLE, math_prompt

task = next(task for task in TASKS_TABLE if task.name == "math:algebra")
(metric,) = task.metrics
row = {"problem": "What is 3 + 4?", "solution": "We add the two numbers and get $\\boxed{7}$."}
right = ["Adding 4 to 3 gives $\\boxed{7}$.", "$3 + 4 = \\boxed{7}$", "The sum is $\\boxed{7}$.", "So it is $\\boxed{7}$."]
normalized = MajAtN(n=4, strip_strings=True, normalize=math_normalizer)


def scores(how, texts):
    # What the task asks for, and the same metric with the normalizer where it is read.
    return how.compute(doc=math_prompt(row, task.name), model_response=ModelResponse(text=texts))


print("lighteval", importlib.metadata.version("lighteval"), task.name, "reference:", row["solution"])
seen = {}
for name, texts in (("four right answers", right), ("the reference four times", [row["solution"]] * 4), ("one of four wrong", ["It is $\\boxed{1}$.", *right[:3]])):
    seen[name] = scores(metric.sample_level_fn, texts), scores(normalized, texts)
    print(f"{name}: the task's maj@n {seen[name][0]}, with normalize=math_normalizer {seen[name][1]}")
sys.exit(seen != {"four right answers": (0, 1), "the reference four times": (1, 1), "one of four wrong": (0, 1)})
PY
HF_HUB_OFFLINE=1 "$work/venv/bin/python" "$work/score.py"
