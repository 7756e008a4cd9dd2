#!/usr/bin/env bash
# llm-analysis 0.2.2: of a Llama's three MLP matrices two are counted, as four widths wide: Llama-2-70B has 55 G parameters.
#
# Guess: its own configuration of Llama-2-70B has 69 G parameters as published, 17.2 GB a GPU of eight in 16 bits.
# Seen: 13.8 GB a GPU, 55.3 G parameters. MLPs are two matrices of 4 x 8,192 = 32,768, where the checkpoint has three of 28,672. Llama-7B comes out
# right to 1 %, since 2 x 4 widths are nearly 3 x 11,008; the grouped keys and values are counted as they are.
# Who is hurt: weights that do not fit are said to fit, and a decode of a small batch, which reads all weights, takes a fifth less than it can.
#
# Needs bash, and Python 3.10 as $PYTHON or python3.10 (its transformers is of 2023); a minute. Exits 1 if the behaviour changes.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"${PYTHON:-python3.10}" -m venv "$work/venv"
"$work/venv/bin/python" -m pip -q --disable-pip-version-check install llm-analysis==0.2.2 2>"$work/pip" || { cat "$work/pip"; exit 2; }
cat > "$work/measure.py" <<'PY'
import sys

from llm_analysis.analysis import infer

VOCABULARY = 32000
found = []
for model, gpus, layers, width, inner, kv in (
    ("upstage_Llama-2-70b-instruct-v2", 8, 80, 8192, 28672, 1024),
    ("decapoda-research_llama-7b-hf", 1, 32, 4096, 11008, 4096),
):
    told = infer(model_name=model, gpu_name="a100-sxm-80gb", tp_size=gpus, seq_len=1024, num_tokens_to_generate=32, log_level="ERROR")
    counted = told["weight_memory_per_gpu"] * gpus / 2
    # As published; its count has one table for embeddings and head.
    attention, mlp = 2 * width * (width + kv), 3 * width * inner
    real = layers * (attention + mlp) + VOCABULARY * width
    two = layers * (attention + 2 * width * 4 * width) + VOCABULARY * width
    found.append((counted / real, counted / two))
    print(f"{model}: {counted / 1e9:.1f} G parameters, published {real / 1e9:.1f} without a head ({counted / real:.2f}); with two matrices of 4 widths {two / 1e9:.1f} ({counted / two:.2f})")
(large, large_two), (small, small_two) = found
sys.exit(not (0.75 < large < 0.85 and abs(large_two - 1) < 0.01 and abs(small_two - 1) < 0.01))
PY
"$work/venv/bin/python" -c 'import importlib.metadata as m; print("llm-analysis", m.version("llm-analysis"))'
"$work/venv/bin/python" "$work/measure.py" 2>/dev/null
