#!/usr/bin/env bash
# outlines-core 0.2.14: a schema's minimum, maximum, multipleOf and uniqueItems are dropped, and a length drops the pattern beside it.
#
# Guess: a keyword that outlines-core cannot enforce is refused, as {"not": ...} is; keywords that it enforces hold together.
# Seen: a score of 1 to 10 may be 99999 or -7, a multiple of 5 may be 3, and unique items may repeat. "^[a-z]+$" with a maxLength of 4 lets "42" pass.
# llguidance 1.9.1 keeps the bounds, the multiple and the pattern, and refuses uniqueItems with an error.
# Two answers that are valid by the schema are refused: a date-time with the offset +02:00, and the number 1e5.
# Who is hurt: graders and extractors that rely on a schema's range, and comparisons of backends in which one enforces less.
#
# Needs bash, and Python 3.12 or later as $PYTHON or python3.12; a minute. Exits 1 if the behaviour changes.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"${PYTHON:-python3.12}" -m venv "$work/venv"
"$work/venv/bin/python" -m pip -q --disable-pip-version-check install --no-compile outlines-core==0.2.14 llguidance==1.9.1 2>"$work/pip" || { cat "$work/pip"; exit 2; }
cat > "$work/match.py" <<'PY'
import json
import re
import sys
from importlib.metadata import version

from llguidance import LLMatcher, LLTokenizer
from outlines_core.json_schema import build_regex_from_schema

print("outlines-core", version("outlines-core"), "llguidance", version("llguidance"))
tokenizer = LLTokenizer("byte")
CASES = (
    # schema, answer, valid by JSON Schema
    ({"type": "integer", "minimum": 1, "maximum": 10}, "7", True),
    ({"type": "integer", "minimum": 1, "maximum": 10}, "99999", False),
    ({"type": "integer", "minimum": 1, "maximum": 10}, "-7", False),
    ({"type": "integer", "multipleOf": 5}, "3", False),
    ({"type": "array", "items": {"type": "integer"}, "uniqueItems": True}, "[1, 1]", False),
    ({"type": "string", "pattern": "^[a-z]+$"}, '"42"', False),
    ({"type": "string", "pattern": "^[a-z]+$", "maxLength": 4}, '"42"', False),
    ({"type": "string", "format": "date-time"}, '"2026-11-30T12:00:00+02:00"', True),
    ({"type": "number"}, "1e5", True),
    ({"not": {"type": "string"}}, "1", True),
)


def outlines(schema, answer):
    try:
        return bool(re.fullmatch(build_regex_from_schema(json.dumps(schema)), answer))
    except ValueError:
        return "refuses the schema"


def guidance(schema, answer):
    matcher = LLMatcher(tokenizer, LLMatcher.grammar_from_json_schema(json.dumps(schema)))
    if matcher.is_error():
        return "refuses the schema"
    tokens = tokenizer.tokenize_str(answer)
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


seen = []
for schema, answer, valid in CASES:
    seen.append((outlines(schema, answer), guidance(schema, answer)))
    print(f"{json.dumps(schema)} {answer}: valid {valid}, outlines-core {seen[-1][0]}, llguidance {seen[-1][1]}")
no = "refuses the schema"
core = [True, True, True, True, True, False, True, False, False, no]
other = [True, False, False, False, no, False, False, True, True, no]
sys.exit(seen != list(zip(core, other, strict=True)))
PY
"$work/venv/bin/python" "$work/match.py"
