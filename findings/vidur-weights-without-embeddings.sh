#!/usr/bin/env bash
# Vidur 0.0.26: weights are those of the layers alone, so the K/V cache also gets the memory of the embeddings and the head.
#
# Guess: Llama-3-8B leaves on an A40 what 8.03 G parameters in 16 bits leave; its configuration has the vocabulary of 128,256.
# Seen: 6.98 G parameters are counted. The embeddings and the head, 2.1 GB, are nowhere, and the vocabulary does not change the count.
# The cache takes 225,280 tokens where 209,248 fit: 7.7 % more. With CodeLlama-34B on one A100 it is 11.0 %.
# Who is hurt: whoever sizes batches or finds the load at which a card preempts, most where the weights nearly fill the card.
#
# Needs bash, python3 (3.11) and 1 GB; some two minutes, no card. Exits 1 if the behaviour changes.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
# The planner of memory alone: the package depends on 1 GB for its plots and its web page.
{ "$work/venv/bin/python" -m pip -q --disable-pip-version-check install --no-compile --no-deps vidur==0.0.26 &&
  "$work/venv/bin/python" -m pip -q --disable-pip-version-check install --no-compile numpy==2.4.6 scipy==1.17.1 pandas==3.1.1 scikit-learn==1.9.1 fasteners==0.20 ddsketch==3.0.1 huggingface_hub==2.4.0
} 2>"$work/pip" || { cat "$work/pip"; exit 2; }

cat > "$work/plan.py" <<'PY'
import sys
from importlib.metadata import version

from vidur.config import CacheConfig, ReplicaConfig
from vidur.utils.memory_planner import MemoryPlanner
from vidur.utils.param_counter import ParamCounter

print("Vidur", version("vidur"))
stated = []
for name, device, network in (("meta-llama/Llama-3-8B", "a40", "a40_pairwise_nvlink"), ("codellama/CodeLlama-34b-Instruct-hf", "a100", "a100_pairwise_nvlink")):
    replica = ReplicaConfig(model_name=name, num_pipeline_stages=1, tensor_parallel_size=1, device=device, network_device=network)
    model, margin = replica.model_config, CacheConfig().memory_margin_fraction
    counted = ParamCounter(replica).get_num_parameters_per_device()
    ends = 2 * model.vocab_size * model.embedding_dim
    tokens = MemoryPlanner(replica, CacheConfig()).get_max_kv_cache_size_in_tokens()
    per_token = 2 * 2 * model.num_layers * model.num_kv_heads * replica.attention_head_dim
    fit = (replica.device_config.total_memory_gb * 2**30 * (1 - margin) - 2 * (counted + ends)) // per_token
    model.vocab_size *= 8
    other = ParamCounter(replica).get_num_parameters_per_device()
    print(f"{name}, {device}: {counted / 1e9:.2f} G parameters counted, {(counted + ends) / 1e9:.2f} G with embeddings and head ({2 * ends / 1e9:.2f} GB)")
    print(f"  {tokens:.0f} tokens for {fit:.0f}, {100 * (tokens / fit - 1):.1f} % more; with a vocabulary 8 times as large {other / 1e9:.2f} G parameters")
    stated.append(tokens > 1.02 * fit and other == counted)
sys.exit(not all(stated))
PY
"$work/venv/bin/python" "$work/plan.py" 2>"$work/log" || { code=$?; cat "$work/log"; exit "$code"; }
