#!/usr/bin/env bash
# Math-Verify 0.9.0: of an answer that corrects itself, the boxes are one set: "\boxed{12}. Wait, I forgot one case. \boxed{13}" is {12, 13}.
#
# Guess: the last \boxed{} is the answer, as with `$` around each box, or else the first.
# Seen: without `$` both boxes are the set of both numbers, which equals neither, unless certain words or enough text lie between them.
#   " is wrong, so it is " joins them, " hence we get " does not. In `$...$` or \[...\] the last box alone counts.
# Who is hurt: a model that boxes a first answer and then the right one loses the point. The score depends on how it writes its boxes.
#
# Needs bash, and Python 3.12 or later as $PYTHON or python3.12; a minute. Exits 1 if the behaviour changes.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"${PYTHON:-python3.12}" -m venv "$work/venv"
"$work/venv/bin/python" -m pip -q --disable-pip-version-check install --no-compile 'math-verify[antlr4_13_2]==0.9.0' latex2sympy2-extended==1.11.0 2>"$work/pip" || { cat "$work/pip"; exit 2; }
cat > "$work/boxes.py" <<'PY'
import sys
from importlib.metadata import version

from math_verify import parse, verify

print("Math-Verify", version("math-verify"), "latex2sympy2-extended", version("latex2sympy2-extended"))
CASES = (
    (r"So the answer is \boxed{12}. Wait, I forgot one case. \boxed{13}", False),
    (r"Is it \boxed{12}? No: \boxed{13}", False),
    (r"\boxed{12} is wrong, so it is \boxed{13}", False),
    ("\\boxed{12}\n\n\\boxed{13}", False),
    (r"\boxed{12} hence we get \boxed{13}", True),
    (r"\boxed{12} is wrong. Let me check it once more: \boxed{13}", True),
    (r"So the answer is $\boxed{12}$. Wait, I forgot one case. $\boxed{13}$", True),
    (r"Is it \[\boxed{12}\]? No: \[\boxed{13}\]", True),
    (r"So the answer is \boxed{13}.", True),
)
kept = True
for answer, right in CASES:
    parsed = parse(answer)
    told = verify(parse("$13$"), parsed)
    kept &= told == right
    print(f"{answer!r}: {parsed[0]}, {'right' if told else 'wrong'}")
sys.exit(not kept)
PY
"$work/venv/bin/python" "$work/boxes.py"
