#!/usr/bin/env bash
# lm-format-enforcer 0.11.3: a list without `maxItems` ends after 20 items: the 21st of a valid answer is refused.
#
# Guess: a list whose schema names no `maxItems` may have any length, as JSON Schema says.
# Seen: a list of integers may have 20 items, and after the 20th the comma is no longer allowed. A list of lists ends after 11. No word tells of it.
#   With `maxItems: 30` the list may have 30 items, and with `minItems: 25` as many as it likes. The limit is LMFE_MAX_JSON_ARRAY_LENGTH.
# Who is hurt: accuracy of extraction and tool calls. Long lists come back as valid JSON with finish_reason "stop", and items are missing.
#   The outputs are shorter, so latency looks better than with another backend of structured outputs.
#
# Needs bash, and Python 3.12 or later as $PYTHON or python3.12; a minute. Exits 1 if the behaviour changes.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"${PYTHON:-python3.12}" -m venv "$work/venv"
"$work/venv/bin/python" -m pip -q --disable-pip-version-check install --no-compile lm-format-enforcer==0.11.3 2>"$work/pip" || { cat "$work/pip"; exit 2; }
cat > "$work/lists.py" <<'PY'
import json
import sys
from importlib.metadata import version

from lmformatenforcer import JsonSchemaParser

INTEGERS = {"type": "array", "items": {"type": "integer"}}


def takes(schema, answer):
    """Whether each character of the answer is allowed after those before it, and the whole may end."""
    parser = JsonSchemaParser({"type": "object", "properties": {"list": schema}, "required": ["list"]})
    for character in json.dumps({"list": answer}):
        if character not in parser.get_allowed_characters():
            return False
        parser = parser.add_character(character)
    return parser.can_end()


print("lm-format-enforcer", version("lm-format-enforcer"))
seen = []
for bounds in ({}, {"minItems": 25}, {"maxItems": 30}):
    longest = [count for count in range(1, 61) if takes(INTEGERS | bounds, [1] * count)][-1]
    seen.append(longest)
    print(f"{bounds or 'no bounds'}: the longest list of up to 60 has {longest} items")
nested = [count for count in range(1, 61) if takes({"type": "array", "items": INTEGERS}, [[1]] * count)]
print(f"a list of lists: {nested[-1]} items")
sys.exit((seen, nested[-1]) != ([20, 60, 30], 11))
PY
"$work/venv/bin/python" "$work/lists.py" 2>"$work/log" || { tail -3 "$work/log"; exit 1; }
