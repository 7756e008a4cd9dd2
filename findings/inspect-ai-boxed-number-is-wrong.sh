#!/usr/bin/env bash
# inspect-ai 0.3.285: `match(numeric=True)` marks "\boxed{18}", "x=18" and "50%" wrong, and `exact()` and `match()` mark -5 right for 5.
#
# Guess: the numeric match takes the last number of the answer, with or without marks around it. A sign belongs to its number in each scorer.
# Seen: it takes the last word that is a number as a whole. "$18", "**18**", "18 apples" and "1,000" are right, and "$18$" is as well, but
#   "\boxed{18}", "x=18", "18/1" and "50%" hold none. `exact()` drops punctuation first, and with it the sign. `match()` asks only how the
#   answer ends: -5 is right for 5, and 118 is right for 18. Nothing in the score tells of it.
# Who is hurt: accuracy of a model that boxes its answers, as reasoning models do. A prompt that asks for a box makes it lose all points.
#
# Needs bash, and Python 3.12 or later as $PYTHON or python3.12; two minutes. Exits 1 if the behaviour changes.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"${PYTHON:-python3.12}" -m venv "$work/venv"
"$work/venv/bin/python" -m pip -q --disable-pip-version-check install --no-compile inspect-ai==0.3.285 2>"$work/pip" || { cat "$work/pip"; exit 2; }
cat > "$work/score.py" <<'PY'
import asyncio
import sys
from importlib.metadata import version

from inspect_ai.model import ModelOutput
from inspect_ai.scorer import Target, exact, match
from inspect_ai.solver import TaskState

print("inspect-ai", version("inspect-ai"))
SCORERS = {"match(numeric=True)": match(numeric=True), "match('any', numeric=True)": match("any", numeric=True), "match()": match(), "exact()": exact()}
CASES = {  # which of the four mark the answer right
    ("The answer is 18.", "18"): "CCCI",
    ("The answer is $18", "18"): "CCCI",
    ("The answer is $18$", "18"): "CCCI",
    ("**18**", "18"): "CCCC",
    ("She has 18 apples", "18"): "CCII",
    ("The answer is 1,000", "1000"): "CCII",
    (r"The answer is \boxed{18}", "18"): "IICI",
    ("So x=18", "18"): "IICI",
    ("It is 18/1", "18"): "IIII",
    ("It is 50%", "50"): "IICI",
    ("-5", "5"): "IICC",
    ("118", "18"): "IICI",
}


async def marks(answer, truth):
    state = TaskState(model="mockllm/m", sample_id=1, epoch=1, input="q", messages=[], output=ModelOutput.from_content("m", answer))
    return "".join([(await scorer(state, Target(truth))).value for scorer in SCORERS.values()])


print("right (C) or wrong (I) by", ", ".join(SCORERS))
kept = True
for (answer, truth), expected in CASES.items():
    told = asyncio.run(marks(answer, truth))
    kept &= told == expected
    print(f"{told}: {answer!r} for {truth}")
sys.exit(not kept)
PY
"$work/venv/bin/python" "$work/score.py"
