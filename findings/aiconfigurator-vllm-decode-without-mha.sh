#!/usr/bin/env bash
# aiconfigurator-core 0.12.0: vLLM's decode attention was measured up to 8 K/V heads alone on all cards but the B200.
#
# Guess: the tables of one framework cover the same heads for prompts and decodes, as those of SGLang and TensorRT-LLM do. So a model
#   with as many K/V heads as query heads (Llama-2-7B, 32 and 32) has measured decodes on an H100 with vLLM.
# Seen: vLLM's prompts have 64 K/V heads and more, its decodes 1, 2, 4 and 8. SGLang and TensorRT-LLM have 64 and more for both.
# Who is hurt: whoever takes a decode of such a model on vLLM out of these tables gets no measurement, and nothing in the table says so.
#
# Needs bash, python3 (3.11) and 1 GB; about a minute. Exits 1 if the behaviour changes.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/python" -m pip -q --disable-pip-version-check install aiconfigurator-core==0.12.0 pandas==2.3.3 pyarrow==22.0.0

cat > "$work/look.py" <<'PY'
from importlib.util import find_spec
from pathlib import Path

import pandas as pd

data = Path(find_spec("aiconfigurator_core").submodule_search_locations[0]) / "systems" / "data"
seen = {}
for card in ("h100_sxm", "h200_sxm", "a100_sxm", "l40s", "b200_sxm"):
    for framework in ("vllm", "sglang", "trtllm"):
        for phase in ("context", "generation"):
            newest = sorted((data / card / "attention" / framework).glob(f"*/{phase}_attention_perf.parquet"))[-1]
            table = pd.read_parquet(newest, columns=["num_heads", "num_key_value_heads"])
            multi = table[table.num_heads == table.num_key_value_heads]
            seen[card, framework, phase] = int(multi.num_heads.max())
            print(f"{card:9} {framework:7} {phase:10} {newest.parent.name:10} most heads with as many K/V heads: {multi.num_heads.max()}")
changed = [
    key
    for key, most in seen.items()
    if (most == 8) != (key[1] == "vllm" and key[2] == "generation" and key[0] != "b200_sxm") or most not in (8, 64, 96)
]
if changed:
    raise SystemExit(f"changed: {changed}")
PY
"$work/venv/bin/python" "$work/look.py"
echo 'as seen on 2026-11-29: vLLM decodes of more than 8 K/V heads are in the table of the B200 alone'
