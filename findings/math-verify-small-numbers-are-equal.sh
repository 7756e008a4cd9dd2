#!/usr/bin/env bash
# Math-Verify 0.9.0: decimals that are small enough are all equal: the electron's charge is right where Planck's constant is asked for.
#
# Guess: `float_rounding=6` keeps six significant digits, so 1.6e-19 and 6.63e-34 differ, and so do a number and its negative.
# Seen: both pairs are equal. So are 0.0000004 and 0.00000001, and 0.0000016 and 0.0000024, which agree in six places behind the point.
#   float_rounding=12 tells these decimals apart, but not the first two pairs. 3.2e-6 and 3.4e-6 differ, and so do 12345678 and 12345679.
# Who is hurt: accuracy on physics and chemistry. A quantized model that loses the exponent, or the sign, loses no point.
#
# Needs bash, and Python 3.12 or later as $PYTHON or python3.12; a minute. Exits 1 if the behaviour changes.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"${PYTHON:-python3.12}" -m venv "$work/venv"
"$work/venv/bin/python" -m pip -q --disable-pip-version-check install --no-compile 'math-verify[antlr4_13_2]==0.9.0' latex2sympy2-extended==1.11.0 2>"$work/pip" || { cat "$work/pip"; exit 2; }
cat > "$work/verify.py" <<'PY'
import sys
from importlib.metadata import version

from math_verify import parse, verify

print("Math-Verify", version("math-verify"), "latex2sympy2-extended", version("latex2sympy2-extended"))
CASES = (
    # gold, answer, and what verify() says with float_rounding of 6, the default, and of 12
    (r"6.63\times10^{-34}", r"1.6\times10^{-19}", True, True),
    (r"1.6\times10^{-19}", r"-1.6\times10^{-19}", True, True),
    ("0.0000004", "0.00000001", True, False),
    ("0.0000016", "0.0000024", True, False),
    (r"3.2\times10^{-6}", r"3.4\times10^{-6}", False, False),
    (r"1.6\times10^{19}", r"1.7\times10^{19}", False, False),
    ("12345678", "12345679", False, False),
    (r"1.6\times10^{-19}", r"1.6\times10^{-19}", True, True),
)
kept = True
for gold, answer, six, twelve in CASES:
    told = [verify(parse(f"${gold}$"), parse(rf"$\boxed{{{answer}}}$"), float_rounding=places) for places in (6, 12)]
    kept &= told == [six, twelve]
    print(f"{gold} is asked for, {answer} is answered: {told[0]}, with float_rounding=12 {told[1]}")
sys.exit(not kept)
PY
"$work/venv/bin/python" "$work/verify.py"
