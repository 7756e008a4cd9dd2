#!/usr/bin/env bash
# torchao 0.18.0: Int4WeightOnlyConfig leaves three quarters of SmolLM2-135M's layers in bfloat16, and says nothing.
#
# Guess: a layer whose width the group size (128) does not divide is an error or a warning.
# Seen: SmolLM2-135M is 576 wide, which is four and a half groups. `quantize_` returns, and the queries, keys, values, outputs, gates and ups of each block
#   are as before: 75 % of the weights of its layers. A line at level INFO tells, which Python does not show. The 360M one (960 wide) goes alike. The
#   configurations IntxWeightOnlyConfig and Int8DynamicActivationIntxWeightConfig refuse the same layer and group with an error that names both.
#   With groups of 64 the layers are taken: on a CPU that asks for the package of the kernels, as the 1536 wide downs do with 128.
# Who is hurt: bytes, speed and accuracy "in 4 bits" of the small models that such methods are tried on first.
#
# Needs bash, Python 3.10 or later as $PYTHON or python3, and 2 GB; some three minutes, no card. Exits 1 if the behaviour changes.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"${PYTHON:-python3}" -m venv "$work/venv"
pip() { "$work/venv/bin/python" -m pip -q --disable-pip-version-check install --no-compile "$@" 2>"$work/pip" || { cat "$work/pip"; exit 2; }; }
pip torch==2.13.0 --extra-index-url https://download.pytorch.org/whl/cpu
pip torchao==0.18.0 numpy

cat > "$work/quantize.py" <<'PY'
import logging
import sys
import warnings
from importlib.metadata import version

import torch
from torch.nn import Linear
from torchao.quantization import Int4WeightOnlyConfig, Int8DynamicActivationIntxWeightConfig, IntxWeightOnlyConfig, PerGroup, quantize_

told = []
handler = logging.Handler()
handler.emit = lambda record: told.append((record.levelname, record.getMessage()))


def block(width, inner, keys):
    """The layers of a block of a Llama in bfloat16."""
    shapes = {"q": (width, width), "k": (width, keys), "v": (width, keys), "o": (width, width)}
    shapes |= {"gate": (width, inner), "up": (width, inner), "down": (inner, width)}
    return torch.nn.ModuleDict({name: Linear(*shape, bias=False, dtype=torch.bfloat16) for name, shape in shapes.items()})


def quantized(config, layers, chosen):
    """How many of the chosen layers a configuration changed, or its error."""
    before = {name: layers[name].weight for name in chosen}
    try:
        quantize_(layers, config, filter_fn=lambda module, name: name in chosen)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    plain = [name for name in chosen if type(layers[name].weight) is torch.nn.Parameter and torch.equal(layers[name].weight, before[name])]
    return len(chosen) - len(plain)


print("torchao", version("torchao"), "torch", version("torch"))
logging.getLogger("torchao").addHandler(handler)
wide = ["q", "k", "v", "o", "gate", "up"]
right = True
for name, shape in {"SmolLM2-135M": (576, 1536, 192), "SmolLM2-360M": (960, 2560, 320)}.items():
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        seen = quantized(Int4WeightOnlyConfig(group_size=128), block(*shape), wide)
    layers = block(*shape)
    share = sum(layers[each].weight.numel() for each in wide) / sum(each.weight.numel() for each in layers.values())
    loud = [text for level, text in told if level != "INFO"] + [str(each.message) for each in warned if "int4" in str(each.message)]
    print(f"{name}, groups of 128: {seen} of {len(wide)} layers quantized ({share:.0%} of the weights stay); warnings {loud}")
    right &= seen == 0 and not loud and share == 0.75
for config in (IntxWeightOnlyConfig, Int8DynamicActivationIntxWeightConfig):
    group = {"granularity" if config is IntxWeightOnlyConfig else "weight_granularity": PerGroup(128)}
    seen = quantized(config(weight_dtype=torch.int4, **group), block(576, 1536, 192), wide)
    print(f"{config.__name__}: {seen}")
    right &= "576" in str(seen) and "128" in str(seen)
for groups, chosen in ((64, wide), (128, ["down"])):
    seen = quantized(Int4WeightOnlyConfig(group_size=groups), block(576, 1536, 192), chosen)
    print(f"Int4WeightOnlyConfig, groups of {groups}, {' '.join(chosen)}: {seen}")
    right &= "mslk" in str(seen)
sys.exit(not right)
PY
"$work/venv/bin/python" "$work/quantize.py" 2>"$work/err" || { tail -5 "$work/err"; exit 1; }
