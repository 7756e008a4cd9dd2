#!/usr/bin/env bash
# aiconfigurator-core 0.12.0: norms of queries and keys cost a prefill the same for 1 token and for 8,192, and a decode nothing.
#
# Guess: a norm reads and writes every row, so Qwen3's norms of queries and keys take longer for longer prompts, and a decode has them too.
#   Qwen3-32B and Llama-3.1-70B have the same heads at TP 2, so the norms are the difference of their attention.
# Seen: with vLLM's kernels on an H200 the difference is 26.4 us a layer for 1, 128, 2,048 and 8,192 tokens of a prompt. It is 0 for a decode.
# Who is hurt: whoever forecasts Qwen3's short prompts, which come out 1.7 ms (13 % of a prompt of 1 token) longer than its decodes let expect.
#
# Needs bash, python3 (3.11) and 1 GB; about a minute. Exits 1 if the behaviour changes.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/python" -m pip -q --disable-pip-version-check install --no-deps ai-dynamo-runtime==1.5.1 aiconfigurator-core==0.12.0 \
  pyyaml==6.0.3 packaging==25.0 numpy==2.3.5 pandas==2.3.3 scipy==1.16.3 python-dateutil==2.9.0.post0 pytz==2025.2 tzdata==2025.2 six==1.17.0

cat > "$work/look.py" <<'PY'
from dynamo._internal.aic import create_session

MODELS = {"Qwen/Qwen3-32B": 64, "meta-llama/Meta-Llama-3.1-70B": 80}
found = {}
for model, layers in MODELS.items():
    engine = create_session("vllm", "h200_sxm", model, 2)._engine
    for tokens in (1, 128, 2048, 8192):
        for phase, parts in zip(("context", "generation"), engine.run_static_per_op(batch_size=1, isl=tokens, osl=2)):
            taken = next(each[1] for each in parts if each[0] == f"{phase}_attention")
            found.setdefault((phase, tokens), []).append(1000 * taken / layers)
differences = {key: qwen - llama for key, (qwen, llama) in found.items()}
for (phase, tokens), difference in differences.items():
    print(f"{phase:10} {tokens:5} tokens: {difference:5.2f} us a layer more")
if any(abs(each - (26.4 if phase == "context" else 0)) > 0.1 for (phase, _), each in differences.items()):
    raise SystemExit("changed")
PY
"$work/venv/bin/python" "$work/look.py" 2> /dev/null | grep tokens
echo 'as seen on 2026-11-29: norms of queries and keys take 26.4 us of any prefill, and nothing of a decode'
