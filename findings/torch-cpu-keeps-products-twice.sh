#!/usr/bin/env bash
# torch on a CPU keeps the oneDNN products of every number of rows in two caches of 1,024 each, bounded by two variables.
#
# Guess: ONEDNN_PRIMITIVE_CACHE_CAPACITY, which oneDNN documents, bounds what linear layers of ever new batch sizes leave behind.
# Seen: torch 2.13.0 (CPU build) with a linear layer of 128 x 576 in oneDNN's order and 1 to 1,000 rows grows by 1.2 GB.
# With ONEDNN_PRIMITIVE_CACHE_CAPACITY=1 it grows as much, and with LRU_CACHE_CAPACITY=1 alone too: torch's own cache (ideep)
# holds the same products by its own count, and that variable stands in no documentation. Both at 1: next to nothing stays.
# Who is hurt: servers on a CPU, whose steps have as many sizes as there are tokens to compute. Memory grows for thousands of
# requests without a leak that a profiler of Python would show.
#
# Needs bash, python3 (3.11), Linux and 1 GB; some two minutes, no card. Exits 1 if the behaviour changes.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
pip() { "$work/venv/bin/python" -m pip -q --disable-pip-version-check install "$@"; }
pip 'torch==2.13.0+cpu' --extra-index-url https://download.pytorch.org/whl/cpu
pip numpy==2.4.6

cat > "$work/grow.py" <<'PY'
import torch

torch.set_num_threads(1)


def resident_mb():
    return int(open("/proc/self/statm").read().split()[1]) * 4096 / 1e6


with torch.no_grad():
    weight = torch.ops.mkldnn._reorder_linear_weight(torch.randn(576, 128))
    product = torch.ops.mkldnn._linear_pointwise
    product(torch.randn(1001, 128), weight, None, "none", [], "")
    before = resident_mb()
    for rows in range(1, 1001):
        product(torch.randn(rows, 128), weight, None, "none", [], "")
    print(round(resident_mb() - before))
PY

grow() { env "$@" "$work/venv/bin/python" "$work/grow.py" 2> /dev/null; }
neither=$(grow A=1)
documented=$(grow ONEDNN_PRIMITIVE_CACHE_CAPACITY=1)
torchs=$(grow LRU_CACHE_CAPACITY=1)
both=$(grow ONEDNN_PRIMITIVE_CACHE_CAPACITY=1 LRU_CACHE_CAPACITY=1)
echo "MB left by 1,000 sizes of one product: bounded by nothing $neither, by oneDNN's variable $documented," \
  "by torch's $torchs, by both $both"
((documented > neither / 2 && torchs > neither / 2 && both < neither / 8)) || { echo "the behaviour changed"; exit 1; }
