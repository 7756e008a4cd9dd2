#!/usr/bin/env bash
# Triton's interpreter (TRITON_INTERPRET=1) computes reductions, sorts, scans and products of bfloat16 on the raw 16 bits.
#
# Guess: triton 3.7.1, which torch 2.13.0 asks for, is right, and a later release differs by rounding at most.
# Seen: `sum`, `sort` and `dot` read bfloat16 as unsigned integers in both 3.7.1 and 3.9.0; `argmax` and `cumsum` are right in 3.7.1
# and do so too in 3.9.0. `max` is right in both. Nothing is said: 1 - 2 + 0.5 - 3 gives -1.3e38, and the largest of it is -3.
# Who is hurt: whoever tests kernels on a CPU. A kernel that is right on a card fails there, or passes in one release alone.
#
# Needs bash, python3 (3.11) and 2 GB; some two minutes, no card. Exits 1 if the behaviour changes.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
pip() { "$work/venv/bin/python" -m pip -q --disable-pip-version-check install "$@"; }
pip 'torch==2.13.0+cpu' --extra-index-url https://download.pytorch.org/whl/cpu
pip numpy==2.4.6

cat > "$work/try.py" <<'PY'
import sys

import torch
import triton
import triton.language as tl

VALUES = torch.tensor([1.0, -2.0, 0.5, -3.0], dtype=torch.bfloat16)


@triton.jit
def reduce(x, out, KIND: tl.constexpr):
    place = tl.arange(0, 4)
    v = tl.load(x + place)
    if KIND == "sum":
        tl.store(out, tl.sum(v, axis=0))
    elif KIND == "max":
        tl.store(out, tl.max(v, axis=0))
    elif KIND == "argmax":
        tl.store(out, tl.argmax(v, axis=0))
    elif KIND == "sort":
        tl.store(out + place, tl.sort(v))
    else:
        tl.store(out + place, tl.cumsum(v, axis=0))


@triton.jit
def product(x, y, out):
    place = tl.arange(0, 16)[:, None] * 16 + tl.arange(0, 16)[None, :]
    tl.store(out + place, tl.dot(tl.load(x + place), tl.load(y + place)))


right = {
    "sum": (VALUES.float().sum(), 1),
    "max": (VALUES.float().max(), 1),
    "argmax": (VALUES.float().argmax(), 1),
    "sort": (VALUES.float().sort().values, 4),
    "cumsum": (VALUES.float().cumsum(0), 4),
}
wrong = []
for kind, (expected, size) in right.items():
    out = torch.zeros(size, dtype=torch.int32 if kind == "argmax" else torch.float32)
    reduce[(1,)](VALUES, out, kind)
    is_right = torch.allclose(out.float(), expected.float().reshape(-1))
    print(f"{triton.__version__} {kind}: {[float(f'{each:.3g}') for each in out.tolist()]}, right is {expected.tolist()}")
    wrong += [] if is_right else [kind]
one, table, out = torch.eye(16).bfloat16(), torch.arange(256).reshape(16, 16).bfloat16(), torch.zeros(16, 16)
product[(1,)](one, table, out)
print(f"{triton.__version__} dot of the identity with 0, 1, 2, 3, ...: {out[0, :4].tolist()}, ...")
wrong += [] if torch.equal(out, table.float()) else ["dot"]
if wrong != sys.argv[1].split():
    sys.exit(f"the behaviour changed: {triton.__version__} is wrong at {wrong}")
PY
for version in 3.7.1 3.9.0; do
  pip --no-deps "triton==$version"
  case $version in
    3.7.1) wrong='sum sort dot' ;;
    *) wrong='sum argmax sort cumsum dot' ;;
  esac
  TRITON_INTERPRET=1 "$work/venv/bin/python" "$work/try.py" "$wrong"
done
