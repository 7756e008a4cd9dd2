#!/usr/bin/env bash
# rouge 1.0.1: an answer that repeats itself twenty times has the ROUGE of the answer said once: 1.0 instead of 0.095.
#
# Guess: an answer in a loop is twenty times too long, so its precision and its F1 fall to a tenth.
# Seen: ROUGE-1 and ROUGE-L stay at 1.0 and ROUGE-2 at 0.96, since the default compares sets of words. A half answer keeps its 0.47.
#   `Rouge(exclusive=False)` and rouge-score 0.1.2 say 0.095 for the loop, and for the half one 0.53 and 0.11. Nothing in the scores tells of it.
# Who is hurt: LongBench's scores of summaries, by which compressed KV caches are compared, are this ROUGE-L. Loops are how such caches fail.
#
# Needs bash, and Python 3.12 or later as $PYTHON or python3.12; a minute. Exits 1 if the behaviour changes.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"${PYTHON:-python3.12}" -m venv "$work/venv"
"$work/venv/bin/python" -m pip -q --disable-pip-version-check install --no-compile rouge==1.0.1 rouge-score==0.1.2 2>"$work/pip" || { cat "$work/pip"; exit 2; }
cat > "$work/loops.py" <<'PY'
import sys
from importlib.metadata import version

from rouge import Rouge
from rouge_score.rouge_scorer import RougeScorer

print("rouge", version("rouge"), "rouge-score", version("rouge-score"))
TRUTH = "the server keeps the cache of each request until its last token is sent"
HALF = "the server keeps the cache"
ANSWERS = {"whole": TRUTH, "whole, 20 times": " ".join([TRUTH] * 20), "half": HALF, "half, 20 times": " ".join([HALF] * 20)}
other = RougeScorer(["rouge1", "rouge2", "rougeL"])
seen = {}
for name, answer in ANSWERS.items():
    sets, lists = (Rouge(exclusive=exclusive).get_scores(answer, TRUTH)[0] for exclusive in (True, False))
    seen[name] = [[round(told[key]["f"], 3) for key in ("rouge-1", "rouge-2", "rouge-l")] for told in (sets, lists)]
    seen[name].append([round(score.fmeasure, 3) for score in other.score(TRUTH, answer).values()])
    print(f"{name}: F1 of ROUGE-1, -2 and -L {seen[name][0]}, not exclusive {seen[name][1]}, rouge-score {seen[name][2]}")
once, loop, half, halves = seen.values()
kept = once[0] == once[2] == [1.0] * 3 and loop[0][::2] == [1.0] * 2 and max(loop[2]) < 0.1
sys.exit(not (kept and halves[0][::2] == half[0][::2] and max(halves[2]) < half[2][0] / 4))
PY
"$work/venv/bin/python" "$work/loops.py"
