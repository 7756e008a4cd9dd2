#!/usr/bin/env bash
# genz-llm 0.0.16: a prefill multiplies its tokens with the whole embedding table, and makes logits of every token of the prompt.
#
# Guess: the first layer of a prefill is a lookup, which computes nothing, and the last makes logits of one token, as servers do.
# Seen: "embeddings" is a product of [tokens, vocabulary] x [vocabulary, width], and "classifier" has a row for every token. Of Llama-3.2-1B's
# prefill of 4,096 tokens the two are 30 % of all time, of Llama-3.1-8B's 12 %; causal attention counts all pairs, twice as many as are seen.
# Who is hurt: TTFT comes out too long, most for small models with large vocabularies, whose prefill per parameter then looks worse than it is.
#
# Needs bash, and Python 3.12 or later as $PYTHON or python3.12; a minute. Exits 1 if the behaviour changes.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"${PYTHON:-python3.12}" -m venv "$work/venv"
"$work/venv/bin/python" -m pip -q --disable-pip-version-check install genz-llm==0.0.16 2>"$work/pip" || { cat "$work/pip"; exit 2; }
cat > "$work/measure.py" <<'PY'
import sys

from GenZ import prefill_moddeling

TOKENS = 4096
found = []
for model, width, vocabulary in (("meta-llama/llama-3.2-1b", 2048, 128256), ("meta-llama/llama-3.1-8b", 4096, 128256)):
    told = prefill_moddeling(model=model, batch_size=1, input_tokens=TOKENS, system_name="H100_GPU", bits="bf16")
    rows = told["model_df"].set_index("Layer Name")
    both = rows.loc[["embeddings", "classifier"]]
    share = both["Latency (msec)"].sum() / told["Latency"]
    whole = [ops * 1e6 / (2 * TOKENS * width * vocabulary) for ops in both["Num ops (MFLOP)"]]
    pairs = rows.loc["Logit", "Num ops (MFLOP)"] * 1e6 / (2 * width * TOKENS**2)
    print(f"{model}: prefill {told['Latency']:.1f} ms, of it embeddings {both['Latency (msec)'].iloc[0]:.2f} and logits {both['Latency (msec)'].iloc[1]:.2f} ms: {100 * share:.0f} %")
    print(f"  operations over those of a product of every token with the vocabulary: {whole[0]:.3f} and {whole[1]:.3f}; pairs over tokens^2: {pairs:.3f}")
    found.append((share, *whole, pairs))
sys.exit(not (found[0][0] > 0.25 and found[1][0] > 0.1 and all(abs(each - 1) < 0.05 for own in found for each in own[1:])))
PY
"$work/venv/bin/python" -c 'import importlib.metadata as m; print("genz-llm", m.version("genz-llm"))'
"$work/venv/bin/python" "$work/measure.py"
