#!/usr/bin/env bash
# evalplus 0.3.1: its sanitizer drops decorated functions and half of the top-level statements, so right programs fail.
#
# Guess: `sanitize(code, entrypoint)` drops text around a program, tests and prints, and keeps all that the function needs.
# Seen: a helper with `@lru_cache` is dropped, and so is the function itself if it has the decorator. So are a `@dataclass`, `A, B = 1, 2`,
#   `PRIMES += [5]`, `TABLE[3] = 9`, a loop that fills a table, and an import in `try`. The rest is kept, and ends in NameError, KeyError or a wrong value.
#   A plain helper and `A = 1` are kept. evalplus.codegen sanitizes each answer before it is stored, and nothing is printed.
# Who is hurt: pass@1 on HumanEval+ and MBPP+: a model that memoizes, as recursion wants it, loses those problems.
#
# Needs bash, and Python 3.10 or later as $PYTHON or python3; a minute, 400 MB. Exits 1 if the behaviour changes.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"${PYTHON:-python3}" -m venv "$work/venv"
pip() { "$work/venv/bin/python" -m pip -q --disable-pip-version-check install "$@" 2>"$work/pip" || { cat "$work/pip"; exit 2; }; }
# The sanitizer needs none of the clients of model services that the package asks for.
pip --no-deps evalplus==0.3.1
pip tree-sitter==0.26.1 tree-sitter-python==0.25.0 datasets==5.2.0 appdirs tempdir termcolor tqdm wget

cat > "$work/clean.py" <<'PY'
import importlib.metadata
import sys

from evalplus.sanitize import sanitize

# Each program has f(3) == 9.
programs = {
    "a plain helper": "def square(n):\n    return n * n\n\ndef f(n):\n    return square(n)\n",
    "one assignment": "FACTOR = 3\n\ndef f(n):\n    return FACTOR * n\n",
    "a helper with @lru_cache": "from functools import lru_cache\n\n@lru_cache(None)\ndef square(n):\n    return n * n\n\ndef f(n):\n    return square(n)\n",
    "the function with @lru_cache": "from functools import lru_cache\n\n@lru_cache(None)\ndef f(n):\n    return n * n\n",
    "a @dataclass": "from dataclasses import dataclass\n\n@dataclass\nclass Side:\n    n: int\n\ndef f(n):\n    return Side(n).n ** 2\n",
    "two assigned at once": "A, B = 2, 3\n\ndef f(n):\n    return n * B\n",
    "an augmented assignment": "SQUARES = [0, 1, 4]\nSQUARES += [9]\n\ndef f(n):\n    return SQUARES[n]\n",
    "an item assigned": "SQUARES = [0] * 4\nSQUARES[3] = 9\n\ndef f(n):\n    return SQUARES[n]\n",
    "a table filled in a loop": "SQUARES = {}\nfor i in range(10):\n    SQUARES[i] = i * i\n\ndef f(n):\n    return SQUARES[n]\n",
    "an import in try": "try:\n    from math import prod\nexcept ImportError:\n    prod = None\n\ndef f(n):\n    return prod([n, n])\n",
}


def result(program):
    space = {}
    try:
        exec(program, space)
        return space["f"](3)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


print("evalplus", importlib.metadata.version("evalplus"))
fails = set()
for name, program in programs.items():
    assert result(program) == 9, name
    cleaned = {result(sanitize(text, "f")) for text in (program, f"Here it is:\n```python\n{program}```\n")}
    print(f"{name}: 9, sanitized {', '.join(map(str, cleaned))}")
    if 9 not in cleaned:
        fails.add(name)
sys.exit(fails != set(programs) - {"a plain helper", "one assignment"})
PY
"$work/venv/bin/python" "$work/clean.py"
