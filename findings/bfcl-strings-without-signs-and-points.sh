#!/usr/bin/env bash
# bfcl-eval 2026.3.23: strings are compared without signs, points and slashes: November 1 is right where January 11 is asked for.
#
# Guess: a string argument is compared up to case and blanks, so that "April 1,2024" is "April 1, 2024". Dates, signs and decimals that differ are wrong.
# Seen: blanks and all of , . / - _ * ^ are dropped on both sides. "11/1/2024" is right for "1/11/2024", "2024-11-1" for "2024-1-11", "-5" for "5",
#   "1.5 mg" for "15 mg", "192.16.81.1" for "192.168.1.1" and "3x*2+2x1" for "3x**2 + 2x - 1", which is an answer in the data set. "a+b" is wrong for "a-b".
#   Numbers are compared to the last bit: 0.1 + 0.2 is wrong for 0.3. The score has no mark of either.
# Who is hurt: accuracy of tool calls: a quantized model that loses a sign or a decimal point in a string loses no point.
#
# Needs bash, Python 3.10 or later as $PYTHON or python3, and 3 GB; some five minutes. Exits 1 if the behaviour changes.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"${PYTHON:-python3}" -m venv "$work/venv"
pip() { "$work/venv/bin/python" -m pip -q --disable-pip-version-check install --no-compile "$@" 2>"$work/pip" || { cat "$work/pip"; exit 2; }; }
pip torch==2.13.0 --extra-index-url https://download.pytorch.org/whl/cpu
# One of its models' clients imports soundfile, which no package asks for.
pip bfcl-eval==2026.3.23 torch==2.13.0 soundfile==0.14.0

cat > "$work/check.py" <<'PY'
import importlib.metadata
import json
import sys
from pathlib import Path

import bfcl_eval
from bfcl_eval.constants.enums import Language
from bfcl_eval.eval_checker.ast_eval.ast_checker import ast_checker


def is_right(said, reference, kind="string"):
    """Whether a call with one argument passes for the reference."""
    argument = {"value": {"type": kind, "description": "the value"}}
    function = {"name": "send", "description": "", "parameters": {"type": "dict", "properties": argument, "required": ["value"]}}
    calls = [{"send": {"value": said}}], [{"send": {"value": [reference]}}]
    return ast_checker([function], *calls, Language.PYTHON, "simple_python", "gpt-4o-2024-11-20-FC")["valid"]


answers = (Path(bfcl_eval.__file__).parent / "data/possible_answer/BFCL_v4_parallel.json").read_text()
polynomial = next(value for line in answers.splitlines() for call in json.loads(line)["ground_truth"] for arguments in call.values()
                  for values in arguments.values() for value in values if value == "3x**2 + 2x - 1")
pairs = {
    ("april 1,2024", "April 1, 2024"): True,
    ("11/1/2024", "1/11/2024"): True,
    ("2024-11-1", "2024-1-11"): True,
    ("-5", "5"): True,
    ("1.5 mg", "15 mg"): True,
    ("192.16.81.1", "192.168.1.1"): True,
    ("3x*2+2x1", polynomial): True,
    ("a+b", "a-b"): False,
    ("April 2, 2024", "April 1, 2024"): False,
}
print("bfcl-eval", importlib.metadata.version("bfcl-eval"))
changed = False
for (said, reference), expected in pairs.items():
    right = is_right(said, reference)
    changed |= right != expected
    print(f"{said!r} for {reference!r}: {'right' if right else 'wrong'}")
for said, expected in ((0.3, True), (0.1 + 0.2, False)):
    right = is_right(said, 0.3, "float")
    changed |= right != expected
    print(f"the number {said!r} for 0.3: {'right' if right else 'wrong'}")
sys.exit(changed)
PY
"$work/venv/bin/python" "$work/check.py"
