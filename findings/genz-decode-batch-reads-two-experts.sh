#!/usr/bin/env bash
# genz-llm 0.0.16: a decode of any batch reads the experts of one token: 256 rows of Mixtral-8x7B read 2 of 8 experts in each layer.
#
# Guess: rows choose different experts. A batch of 256 rows of Mixtral reads all 8 experts, as the package's prefill of 256 tokens does.
# Seen: a decode reads 2 experts a layer at batches of 1, 16 and 256. The other 6 count as unused weights, which fill memory and take no time.
# With routing at random, 7.9 of 8 experts are expected to be chosen by 16 rows. The products' FLOPs do grow with the batch.
# Who is hurt: throughput and latency of batched decodes of mixtures come out too good, and mixtures beat dense models where they should not.
#
# Needs bash, and Python 3.12 or later as $PYTHON or python3.12; a minute. Exits 1 if the behaviour changes.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"${PYTHON:-python3.12}" -m venv "$work/venv"
"$work/venv/bin/python" -m pip -q --disable-pip-version-check install --no-compile genz-llm==0.0.16 2>"$work/pip" || { cat "$work/pip"; exit 2; }
cat > "$work/measure.py" <<'PY'
import sys

from GenZ import decode_moddeling, prefill_moddeling

EXPERTS, CHOSEN = 8, 2
MB_AN_EXPERT = 3 * 4096 * 14336 * 2 / 4 / 2**20  # three matrices in 16 bits, split over four cards
usual = {"model": "mistralai/mixtral-8x7b", "system_name": "H100_GPU", "bits": "bf16", "tensor_parallel": 4}


def layer(told):
    """Experts that one layer reads, the milliseconds that its expert products take, and their GFLOP."""
    rows = told["model_df"]
    rows = rows[rows["Layer Name"].isin(["up+gate", "down"]) & (rows["Latency (msec)"] > 0)]
    return rows["Input_w (MB)"].sum() / MB_AN_EXPERT, rows["Latency (msec)"].sum(), rows["Num ops (MFLOP)"].sum() / 1e3


seen = []
for batch in (1, 16, 256):
    seen.append(layer(decode_moddeling(**usual, batch_size=batch, Bb=1, input_tokens=256, output_tokens=1)))
    expected = EXPERTS * (1 - (1 - CHOSEN / EXPERTS) ** batch)
    print(f"decode of {batch:3} rows: {seen[-1][0]:.1f} experts read (at random {expected:.1f}), {seen[-1][1]:.3f} ms and {seen[-1][2]:.2f} GFLOP a layer")
prefill = layer(prefill_moddeling(**usual, batch_size=1, input_tokens=256))
print(f"prefill of 256 tokens: {prefill[0]:.1f} experts read, {prefill[1]:.3f} ms and {prefill[2]:.2f} GFLOP a layer")
two = all(abs(experts - CHOSEN) < 1e-6 for experts, _, _ in seen)
sys.exit(not (two and abs(prefill[0] - EXPERTS) < 1e-6 and abs(seen[-1][2] / seen[0][2] - 256) < 1e-6 and prefill[1] > 3.5 * seen[-1][1]))
PY
"$work/venv/bin/python" -c 'import importlib.metadata as m; print("genz-llm", m.version("genz-llm"))'
"$work/venv/bin/python" "$work/measure.py"
