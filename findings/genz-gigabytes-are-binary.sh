#!/usr/bin/env bash
# genz-llm 0.0.16: a card's memory bandwidth is taken as GiB/s, its FLOP/s as decimal: every decode is 7 % faster than its own table allows.
#
# Guess: the H100 of its table (989 TFLOP/s, Memory_BW 3400, in the summaries "GB/s") reads 3.4e12 bytes/s, as a datasheet's GB/s.
# Seen: a decode's product of 28,672 x 4,096 weights in 16 bits reads 3.65e12 bytes/s, 3400 x 2^30; an A100 likewise. A prefill's product computes
# 989e12 FLOP/s, so the batch at which a card turns from memory to compute comes 7 % early, too.
# Who is hurt: latencies bound by memory (all of a small batch's decode) are too low by 7 %, and a fit of the efficiency to measured decodes hides it.
#
# Needs bash, and Python 3.12 or later as $PYTHON or python3.12; a minute. Exits 1 if the behaviour changes.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"${PYTHON:-python3.12}" -m venv "$work/venv"
"$work/venv/bin/python" -m pip -q --disable-pip-version-check install genz-llm==0.0.16 2>"$work/pip" || { cat "$work/pip"; exit 2; }
cat > "$work/measure.py" <<'PY'
import sys

from GenZ import decode_moddeling, prefill_moddeling
from Systems.system_configs import system_configs

MODEL, INPUTS, OUTPUTS = "meta-llama/llama-3.1-8b", 4096, 28672


def product(told):
    rows = told["model_df"]
    return rows[rows["Layer Name"] == "up+gate"].iloc[0]


rates = []
for name in ("H100_GPU", "A100_40GB_GPU"):
    card, usual = system_configs[name], {"model": MODEL, "batch_size": 1, "system_name": name, "bits": "bf16"}
    decode = product(decode_moddeling(**usual, Bb=1, input_tokens=2048, output_tokens=1))
    prefill = product(prefill_moddeling(**usual, input_tokens=8192))
    read = 2 * (INPUTS * OUTPUTS + INPUTS + OUTPUTS) / (decode["Memory time (msec)"] / 1e3)
    computed = 2 * 8192 * INPUTS * OUTPUTS / (prefill["Compute time (msec)"] / 1e3)
    rates.append((read / card["Memory_BW"] / 1e9, computed / card["Flops"] / 1e12))
    print(f"{name}: stated {card['Memory_BW']} and {card['Flops']}, used {read / 1e9:.1f} GB/s ({rates[-1][0]:.4f}) and {computed / 1e12:.1f} TFLOP/s ({rates[-1][1]:.4f})")
sys.exit(not all(abs(read - 2**30 / 1e9) < 1e-3 and abs(computed - 1) < 1e-3 for read, computed in rates))
PY
"$work/venv/bin/python" -c 'import importlib.metadata as m; print("genz-llm", m.version("genz-llm"))'
"$work/venv/bin/python" "$work/measure.py"
