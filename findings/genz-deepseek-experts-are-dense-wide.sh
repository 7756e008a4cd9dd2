#!/usr/bin/env bash
# genz-llm 0.0.16: each expert of its DeepSeek models is as wide as the dense layers' MLP, so DeepSeek-V3 weighs 12.4 TB in 16 bits.
#
# Guess: its table has moe_intermediate_size=2048 for DeepSeek-V3, so an expert is 2,048 wide, and the weights take some 1.3 TB (671 G parameters).
# Seen: an expert is intermediate_size wide: 18,432 in DeepSeek-V3, and 10,944 for 1,408 in DeepSeek-MoE-16B. Prefill and decode agree on it.
# The weights are 9.2 and 7.4 times those of the published numbers of parameters.
# Who is hurt: a study of mixtures of experts. DeepSeek-V3 needs 145 cards of 80 GiB where 16 hold its weights, and a decode reads experts 9 times too wide.
#
# Needs bash, and Python 3.12 or later as $PYTHON or python3.12; a minute. Exits 1 if the behaviour changes.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"${PYTHON:-python3.12}" -m venv "$work/venv"
"$work/venv/bin/python" -m pip -q --disable-pip-version-check install --no-compile genz-llm==0.0.16 2>"$work/pip" || { cat "$work/pip"; exit 2; }
cat > "$work/measure.py" <<'PY'
import math
import sys
import warnings

from GenZ import decode_moddeling, prefill_moddeling
from GenZ.Models import get_configs

warnings.simplefilter("ignore")  # "All params would not fit on chip": model_profilling=True goes on all the same.
stated = []
for name, published in (("deepseek-ai/deepseek-moe-16b-base", 16.4e9), ("deepseek-ai/DeepSeek-V3-Base", 671e9)):
    config = get_configs(name)
    usual = {"model": name, "batch_size": 1, "system_name": "H100_GPU", "bits": "bf16", "model_profilling": True, "input_tokens": 256}
    print(f"{name}: the table has intermediate_size {config.intermediate_size}, moe_intermediate_size {config.moe_intermediate_size}")
    for phase, (products, summary) in (("prefill", prefill_moddeling(**usual)), ("decode", decode_moddeling(**usual, Bb=1, output_tokens=1))):
        # One layer's last product has experts x width x hidden weights; a decode has a second row for experts that no token chose.
        wide = products.loc[products["Layer Name"] == "down", "Input_w (MB)"].sum() * 2**20 / 2 / config.hidden_size / config.num_experts
        held = summary["Total Weights (MB)"].iloc[0] * 2**20
        cards = [math.ceil(held_bytes / 80 / 2**30) for held_bytes in (held, 2 * published)]
        print(f"  {phase}: an expert is {wide:g} wide; {held / 1e12:.2f} TB of weights, {held / 2 / published:.1f} times the published; {cards[0]} cards of 80 GiB for {cards[1]}")
        stated.append(wide == config.intermediate_size != config.moe_intermediate_size and held / 2 > 7 * published)
sys.exit(not all(stated))
PY
"$work/venv/bin/python" -c 'import importlib.metadata as m; print("genz-llm", m.version("genz-llm"))'
"$work/venv/bin/python" "$work/measure.py"
