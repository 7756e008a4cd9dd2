#!/usr/bin/env bash
# aiconfigurator-core 0.12.0: vLLM's FP8 experts on Hopper are over twice as slow as its bfloat16 ones, and slower than a whole server.
#
# Guess: FP8 experts, which read half the bytes, are faster than bfloat16 ones. In TensorRT-LLM's table of the same cards they are.
# Seen: for Gemma 4 26B-A4B (128 experts of 704, 8 chosen, 256 rows) on an H100 vLLM's table has 1.41 ms a layer in FP8 and 0.58 in
#   bfloat16, TensorRT-LLM's 0.33 and 0.56. All FP8 rows are of one backend, ModelOpt's with FlashInfer. A server of vLLM with an
#   FP8-dynamic checkpoint needs 15 ms for a whole forward of that model's 30 layers (vllm pull request 46212), where these experts
#   alone would need 42.
# Who is hurt: whoever forecasts FP8 mixtures on vLLM from these tables finds them slower than bfloat16, and may not serve them.
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
asked = {"hidden_size": 2816, "inter_size": 704, "topk": 8, "num_experts": 128, "moe_tp_size": 1, "moe_ep_size": 1, "num_tokens": 256}
changed = []
for card in ("h100_sxm", "h200_sxm"):
    for framework in ("vllm", "trtllm"):
        # The newest version that has this model's experts.
        for path in sorted((data / card / "moe" / framework).glob("*/moe_perf.parquet"), reverse=True):
            table = pd.read_parquet(path)
            table = table[table.distribution == "power_law_1.2"]
            for column, value in asked.items():
                table = table[table[column] == value]
            if {"fp8", "bfloat16"} <= set(table.moe_dtype):
                break
        ms = {name: table[table.moe_dtype == name].latency.min() for name in ("fp8", "bfloat16")}
        print(f"{card:9} {framework:7} {path.parent.name:11} fp8 {ms['fp8']:.2f} ms, bfloat16 {ms['bfloat16']:.2f} ms a layer")
        is_slower = ms["fp8"] > 2 * ms["bfloat16"] if framework == "vllm" else ms["fp8"] > ms["bfloat16"]
        if not ms["fp8"] > 0 or is_slower != (framework == "vllm"):
            changed.append((card, framework))
        if framework == "vllm":
            backends = set(table[table.moe_dtype == "fp8"].kernel_source)
            print(f"{'':17} timed with {', '.join(sorted(backends))}")
            if len(backends) != 1 or "modelopt" not in min(backends):
                changed.append((card, "backends"))
if changed:
    raise SystemExit(f"changed: {changed}")
PY
"$work/venv/bin/python" "$work/look.py"
echo 'as seen on 2026-11-29: FP8 experts are slower than bfloat16 ones in the tables of vLLM alone'
