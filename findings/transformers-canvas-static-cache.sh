#!/usr/bin/env bash
# transformers 5.24.0's DiffusionGemma answers otherwise with a static cache once the prompt is longer than the window.
#
# Guess: cache_implementation="static", which its documentation advises for speed, gives the tokens that the default cache gives.
# Seen: a prompt shorter than the window gets the same tokens. A longer one gets others: layers with a window lose the prompt.
# Nothing is said. Compilation is off here, since on a CPU it takes minutes and the weights are random.
# Who is hurt: whoever follows that advice with prompts of more than sliding_window tokens (1,024 in the released model).
#
# Needs bash, python3 (3.11) and 2 GB; some three minutes, no card. Exits 1 if the behaviour changes.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
pip() { "$work/venv/bin/python" -m pip -q --disable-pip-version-check install "$@"; }
pip torch==2.13.0 --extra-index-url https://download.pytorch.org/whl/cpu
pip transformers==5.24.0

cat > "$work/ask.py" <<'PY'
import sys
import warnings

import torch
from transformers import DiffusionGemmaConfig, DiffusionGemmaForBlockDiffusion
from transformers.utils import logging

warnings.filterwarnings("ignore")
logging.set_verbosity_error()
text = {
    "hidden_size": 32, "intermediate_size": 40, "moe_intermediate_size": 16, "num_experts": 4, "top_k_experts": 2,
    "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 64,
    "global_head_dim": 16, "num_global_key_value_heads": 1, "max_position_embeddings": 256, "sliding_window": 9,
    "layer_types": ["sliding_attention", "full_attention"] * 2, "initializer_range": 0.2,
}
vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8}
torch.manual_seed(0)
config = DiffusionGemmaConfig(text_config=text, vision_config=vision, canvas_length=6, boi_token_id=61, eoi_token_id=62, image_token_id=63)
model = DiffusionGemmaForBlockDiffusion(config).eval()
prompt = [5, 9, 14, 22, 31, 7, 18, 40, 3, 27, 50, 11, 33]


def answer(prompts, **options):
    torch.manual_seed(1)
    made = model.generate(input_ids=torch.tensor(prompts), max_new_tokens=12, max_denoising_steps=8, entropy_bound=2.0, **options)
    return getattr(made, "sequences", made)[:, -12:].tolist()


same = []
for length in (2, 13):
    grows, fixed = answer([prompt[:length]]), answer([prompt[:length]], cache_implementation="static")
    same.append(grows == fixed)
    print(f"prompt of {length} tokens, window of 9: {'the same' if same[-1] else 'other'} tokens\n  default {grows[0]}\n  static  {fixed[0]}")
sys.exit(same != [True, False] and "the behaviour changed")
PY
TORCHDYNAMO_DISABLE=1 "$work/venv/bin/python" "$work/ask.py"
