#!/usr/bin/env bash
# LiteLLM 1.110.2: 100,000 tokens each way of Claude Opus 4 cost 0, and of o1-preview too, while other models that left its price table are refused.
#
# Guess: LiteLLM and genai-prices agree on Claude Sonnet 4, 3 and 15 dollars per million tokens. A model without a price is an error, as documented.
# Seen: claude-opus-4-20250514, claude-opus-4-1-20250805, claude-sonnet-4-20250514, o1-preview and o1-mini are no longer in the table that comes with
#   LiteLLM, and `cost_per_token` and `completion_cost` give 0.0 for them without a word. claude-3-7-sonnet-20250219 and gpt-4-32k, not in it either, are a
#   ModelNotMappedError. genai-prices 0.2.3 has prices for all of them: 9 dollars for Opus 4. The two agree on gpt-4o-mini and Claude Haiku 4.5.
# Who is hurt: cost per problem of a stored run, or of a plot over years of models: the old ones are free.
#
# Needs bash, Python 3.10 or later as $PYTHON or python3, and 1 GB; some two minutes. Exits 1 if the behaviour changes.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"${PYTHON:-python3}" -m venv "$work/venv"
pip() { "$work/venv/bin/python" -m pip -q --disable-pip-version-check install --no-compile "$@" 2>"$work/pip" || { cat "$work/pip"; exit 2; }; }
pip litellm==1.110.2 genai-prices==0.2.3

cat > "$work/cost.py" <<'PY'
import importlib.metadata
import sys

import litellm
from genai_prices import Usage, calc_price

litellm.suppress_debug_info = True
tokens = 100_000


def cost(model, provider):
    """What LiteLLM says of a request and of a stored answer, in dollars, or the name of its error."""
    answer = litellm.ModelResponse(model=model, usage=litellm.Usage(prompt_tokens=tokens, completion_tokens=tokens, total_tokens=2 * tokens))
    try:
        asked = sum(litellm.cost_per_token(model=model, custom_llm_provider=provider, prompt_tokens=tokens, completion_tokens=tokens))
        return round(asked, 6), round(litellm.completion_cost(completion_response=answer, model=model, custom_llm_provider=provider), 6)
    except Exception as error:
        return (type(error).__name__,) * 2


kinds = {
    "free": [("claude-opus-4-20250514", "anthropic", 9.0), ("claude-opus-4-1-20250805", "anthropic", 9.0), ("claude-sonnet-4-20250514", "anthropic", 1.8)]
    + [("o1-preview", "openai", 7.5), ("o1-mini", "openai", 0.55)],
    "refused": [("claude-3-7-sonnet-20250219", "anthropic", 1.8), ("gpt-4-32k", "openai", 18.0)],
    "priced": [("gpt-4o-mini", "openai", 0.075), ("claude-haiku-4-5", "anthropic", 0.6)],
}
print("LiteLLM", importlib.metadata.version("litellm"), "genai-prices", importlib.metadata.version("genai-prices"))
right = True
for kind, models in kinds.items():
    for model, provider, dollars in models:
        seen = cost(model, provider)
        other = round(float(calc_price(Usage(input_tokens=tokens, output_tokens=tokens), model_ref=model, provider_id=provider).total_price), 6)
        listed = model in litellm.model_cost
        print(f"{model}: LiteLLM {seen[0]} and {seen[1]}, {'in' if listed else 'not in'} its table; genai-prices {other}")
        expected = {"free": 0.0, "refused": "ModelNotMappedError", "priced": dollars}[kind]
        right &= seen == (expected, expected) and other == dollars and listed == (kind == "priced")
sys.exit(not right)
PY
LITELLM_LOCAL_MODEL_COST_MAP=True "$work/venv/bin/python" "$work/cost.py"
