#!/usr/bin/env bash
# lighteval 0.13.0: of the same four samples `avg@n` says 0.5 and `pass@1` says 1.0, since one strips blanks and the other does not.
#
# Guess: pass@1 of n samples is their mean score, which is what avg@n is by its definition. Both metrics are made with `strip_strings=True`.
# Seen: the samples "7", " 7", "7\n" and "7" are four right answers for pass@k with k=1 and n=4, and two for avg@n. A `normalize` function is lost alike: avg@n
#   takes one and does not call it. With the scoring of math answers, which strips by itself, both say 0.75 for three right answers of four.
#   `maj@n` strips nothing either, unless the task sets it: "1", "7", " 7" and "7 " have no majority, and the first one counts.
# Who is hurt: a comparison of avg@64 with a published pass@1. A model whose tokens begin with a blank loses to one whose tokens do not.
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

from lighteval.metrics.metrics import Metrics
from lighteval.metrics.metrics_sample import AvgAtN, PassAtK
from lighteval.models.model_output import ModelResponse
from lighteval.tasks.requests import Doc


def score(how, texts):
    return float(how.compute(doc=Doc(query="What is 3 + 4?", choices=["7"], gold_index=0), model_response=ModelResponse(text=texts)))


def both(one, mean, texts):
    return score(one, texts), score(mean, texts)


first, mean = (metric.sample_level_fn for metric in (Metrics.pass_at_k(sample_params={"k": 1, "n": 4}), Metrics.avg_at_n(sample_params={"n": 4})))
math = (Metrics.pass_at_k_math(sample_params={"k": 1, "n": 4}).sample_level_fn, Metrics.avg_at_n_math(sample_params={"n": 4}).sample_level_fn)
lower = (PassAtK(k=1, n=4, normalize=str.lower), AvgAtN(n=4, normalize=str.lower))
most = Metrics.maj_at_n(sample_params={"n": 4}).sample_level_fn
seen = {
    "plain": both(first, mean, ["7", "7", "7", "1"]),
    "blanks": both(first, mean, ["7", " 7", "7\n", "7"]),
    "math": both(*math, ["$\\boxed{7}$", " $\\boxed{7}$", "$\\boxed{7}$\n", "$\\boxed{1}$"]),
}
capital = Doc(query="Which gas?", choices=["co"], gold_index=0)
seen["lower case"] = tuple(float(how.compute(doc=capital, model_response=ModelResponse(text=["CO", "Co", "co", "co"]))) for how in lower)
print("lighteval", importlib.metadata.version("lighteval"), "pass@1 and avg@4 of the same four samples")
for name, values in seen.items():
    print(f"{name}: pass@1 {values[0]}, avg@4 {values[1]}")
majority = score(most, ["1", "7", " 7", "7 "]), score(most, ["1", "7", "7", "7"])
print("maj@4 of one wrong and three right answers: with blanks", majority[0], "without", majority[1])
expected = {"plain": (0.75, 0.75), "blanks": (1.0, 0.5), "math": (0.75, 0.75), "lower case": (1.0, 0.5)}
sys.exit(not (seen == expected and majority == (0.0, 1.0)))
PY
HF_HUB_OFFLINE=1 "$work/venv/bin/python" "$work/score.py"
