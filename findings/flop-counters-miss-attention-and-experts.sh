#!/usr/bin/env bash
# calflops 0.3.2 and PyTorch 2.13.0's FlopCounterMode: on a CPU a transformers model as it is loaded has no FLOPs for attention or for chosen experts.
#
# Guess: FLOPs of a prompt of 2,048 tokens include attention's and, in a mixture, those of the experts that the tokens chose.
# Seen: FLOPs grow in proportion to the prompt. The default attention, scaled_dot_product_attention, counts 0 in both tools. The small
# Llama here gets 6.71 GFLOP instead of 15.30. The default experts of a Qwen3-MoE (grouped_mm) count 0 as well: 1.91 GFLOP instead of 12.11.
# With attn_implementation="eager" and experts_implementation="eager" both tools count both. No warning is printed.
# Who is hurt: a utilization (MFU) by these FLOPs is too low for long prompts and mixtures, and models compare wrongly.
#
# Needs bash, python3 (3.11) and 2 GB; some two minutes, no card. Exits 1 if the behaviour changes.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
pip() { "$work/venv/bin/python" -m pip -q --disable-pip-version-check install --no-compile "$@" 2>"$work/pip" || { cat "$work/pip"; exit 2; }; }
pip torch==2.13.0 --extra-index-url https://download.pytorch.org/whl/cpu
pip calflops==0.3.2 transformers==5.13.0 numpy==2.4.6

cat > "$work/count.py" <<'PY'
import sys
import warnings
from importlib.metadata import version

import torch
from calflops import calculate_flops
from torch.utils.flop_counter import FlopCounterMode
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

warnings.filterwarnings("ignore")
torch.set_num_threads(1)
print("calflops", version("calflops"), "transformers", version("transformers"), "torch", version("torch"))
LAYERS, WIDTH, EXPERTS, CHOSEN = 2, 256, 16, 2
usual = {"vocab_size": 512, "hidden_size": WIDTH, "intermediate_size": 768, "num_hidden_layers": LAYERS, "num_attention_heads": 8, "num_key_value_heads": 2}


def count(model, tokens):
    """GFLOP by calflops, by FlopCounterMode, by the dense products with weights that every token meets, by attention over all pairs, and by the experts alone."""
    prompt = {"input_ids": torch.zeros(1, tokens, dtype=torch.long), "attention_mask": torch.ones(1, tokens, dtype=torch.long)}
    told, _, parameters = calculate_flops(model=model, kwargs=prompt, print_results=False, output_as_string=False)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(**prompt)
    named = list(model.named_parameters())
    expert = 2 * tokens * sum(each.numel() for name, each in named if ".experts." in name) * CHOSEN / EXPERTS
    dense = 2 * tokens * sum(each.numel() for name, each in named if each.dim() > 1 and "embed" not in name and ".experts." not in name)
    assert parameters == sum(each.numel() for _, each in named)
    return [each / 1e9 for each in (told, counter.get_total_flops(), dense, LAYERS * 4 * WIDTH * tokens**2, expert)]


rows = {}
for kind, make, config in (("Llama", LlamaForCausalLM, LlamaConfig(**usual)), ("Qwen3-MoE", Qwen3MoeForCausalLM, Qwen3MoeConfig(**usual, head_dim=32, moe_intermediate_size=128, num_experts=EXPERTS, num_experts_per_tok=CHOSEN))):
    for form in ({}, {"attn_implementation": "eager", "experts_implementation": "eager"}):
        model = make._from_config(config, **form).eval()
        print(f"{kind}, {model.config._attn_implementation} attention, {model.config._experts_implementation} experts")
        for tokens in (512, 2048):
            told, torch_told, dense, attention, expert = rows[kind, bool(form), tokens] = count(model, tokens)
            print(f"  {tokens:4} tokens: {told:.2f} GFLOP; dense products {dense:.2f} + attention {attention:.2f} + experts {expert:.2f} = {dense + attention + expert:.2f}; FlopCounterMode {torch_told:.2f}")
right = True
for (_, eager, _), (told, torch_told, dense, attention, expert) in rows.items():
    stated = dense + attention + expert if eager else dense
    right &= abs(told / stated - 1) < 0.02 and abs(torch_told / stated - 1) < 0.02
sys.exit(not right)
PY
HF_HUB_OFFLINE=1 "$work/venv/bin/python" "$work/count.py" 2>"$work/log" || { code=$?; cat "$work/log"; exit "$code"; }
