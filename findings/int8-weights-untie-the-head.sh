#!/usr/bin/env bash
# torchao 0.18.0 and optimum-quanto 0.2.7: weights in int8 make Gemma 3 270M larger than it is in bfloat16, since its tied head becomes a copy.
#
# Guess: weights in int8 take about half the bytes of bfloat16; a head that is tied to the embeddings stays tied, quantized or not.
# Seen: the head is quantized to a tensor of its own, and the embeddings stay in bfloat16. The 536 MB of bfloat16 become
# 606 MB with torchao and 604 MB with quanto. Without the head, which both can leave out, 437 and 436 MB remain. No warning is printed.
# Who is hurt: memory budgets of small models, which is where weights in 8 bits are tried first, and tables of bytes against accuracy.
#
# Needs bash, python3 (3.11) and 5 GB; some three minutes, no card. Exits 1 if the behaviour changes.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
pip() { "$work/venv/bin/python" -m pip -q --disable-pip-version-check install --no-compile "$@" 2>"$work/pip" || { cat "$work/pip"; exit 2; }; }
pip torch==2.13.0 --extra-index-url https://download.pytorch.org/whl/cpu
pip transformers==5.13.0 torchao==0.18.0 ninja==1.13.2
pip --no-deps optimum-quanto==0.2.7

cat > "$work/weigh.py" <<'PY'
import sys
import warnings
from importlib.metadata import version

warnings.filterwarnings("ignore")
import torch
from optimum.quanto import freeze, qint8, quantize
from torchao.quantization import Int8WeightOnlyConfig, quantize_
from transformers import Gemma3ForCausalLM, Gemma3TextConfig

print(" ".join(f"{name} {version(name)}" for name in ("torchao", "optimum-quanto", "transformers", "torch")))
torch.set_num_threads(1)
GEMMA = Gemma3TextConfig(vocab_size=262144, hidden_size=640, intermediate_size=2048, num_hidden_layers=18, num_attention_heads=4, num_key_value_heads=1, head_dim=256)


def whole(tensor):
    """The plain tensors that hold a parameter."""
    return [part for name in tensor.__tensor_flatten__()[0] for part in whole(getattr(tensor, name))] if hasattr(tensor, "__tensor_flatten__") else [tensor]


def megabytes(model):
    parts = {part.data_ptr(): part.numel() * part.element_size() for each in model.parameters() for part in whole(each)}
    return sum(parts.values()) / 1e6


def torchao(model, head):
    quantize_(model, Int8WeightOnlyConfig(), filter_fn=None if head else lambda module, name: isinstance(module, torch.nn.Linear) and name != "lm_head")


def quanto(model, head):
    quantize(model, weights=qint8, exclude=None if head else ["lm_head"])
    freeze(model)


stated = []
for tool in (torchao, quanto):
    sizes = []
    for head in (True, False):
        with torch.device("meta"):
            model = Gemma3ForCausalLM(GEMMA).to(torch.bfloat16)
        model.to_empty(device="cpu").tie_weights()
        for each in model.parameters():
            each.data.fill_(0.01)
        assert model.lm_head.weight is model.model.embed_tokens.weight
        before = megabytes(model)
        tool(model, head)
        sizes.append(megabytes(model))
    print(f"Gemma 3 270M: {before:.0f} MB in bfloat16, {sizes[0]:.0f} MB by {tool.__name__} ({100 * (sizes[0] / before - 1):+.0f} %), {sizes[1]:.0f} MB without the head")
    stated.append(sizes[0] > 1.1 * before and sizes[1] < 0.85 * before)
sys.exit(not all(stated))
PY
"$work/venv/bin/python" "$work/weigh.py" 2>"$work/log" || { code=$?; cat "$work/log"; exit "$code"; }
