#!/usr/bin/env bash
# Vidur 0.0.26: `gpu_memory_utilization`, `--seed` and the arrivals' own seed change nothing: every request's times stay the same.
#
# Guess: less of a card's memory holds fewer requests at once; another seed sends other arrivals, or routes them elsewhere.
# Seen: two A40s and Llama-3-8B, routed at random. With other seeds, and a utilization of 0.3 or 0.99, all requests have the same
# times, though 0.3 of an A40 has no room for the weights. The memory comes from `memory_margin_fraction`: by default 0.9 is
# used while `gpu_memory_utilization` says 0.8. The request generator sets its own seed after `--seed`, for routing too.
# Who is hurt: sweeps over memory, which find that it does not matter, and repeats with other seeds, whose spread is 0.
#
# Needs bash, python3 (3.11) and 1 GB; some four minutes, no card. Exits 1 if the behaviour changes.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
# Without what its plots as images and its web page need.
{ "$work/venv/bin/python" -m pip -q --disable-pip-version-check install --no-compile --no-deps vidur==0.0.26 &&
  "$work/venv/bin/python" -m pip -q --disable-pip-version-check install --no-compile numpy==2.4.6 scipy==1.17.1 pandas==3.1.1 scikit-learn==1.9.1 fasteners==0.20 ddsketch==3.0.1 plotly_express==0.4.1 wandb==0.31.0 huggingface_hub==2.4.0
} 2>"$work/pip" || { cat "$work/pip"; exit 2; }

cat > "$work/simulate.py" <<'PY'
"""vidur.main with steps of 10 ms, since the times measured on cards are fetched from a hub."""
from vidur.config import RandomForrestExecutionTimePredictorConfig
from vidur.execution_time_predictor import BaseExecutionTimePredictor, ExecutionTimePredictorRegistry
from vidur.main import main

parts = dict.fromkeys(BaseExecutionTimePredictor.__abstractmethods__, lambda self, batch: 0.0)
parts["_get_mlp_layer_up_proj_execution_time"] = lambda self, batch: 10 / 32  # in each of 32 layers
kind = RandomForrestExecutionTimePredictorConfig.get_type()
ExecutionTimePredictorRegistry.unregister(kind)
ExecutionTimePredictorRegistry.register(kind, type("Constant", (BaseExecutionTimePredictor,), parts))
main()
PY

simulate() {
  local name=$1
  shift
  "$work/venv/bin/python" "$work/simulate.py" --global_scheduler_config_type random --cluster_config_num_replicas 2 \
    --replica_config_model_name meta-llama/Llama-3-8B --replica_config_device a40 \
    --replica_config_tensor_parallel_size 1 --replica_config_num_pipeline_stages 1 --replica_scheduler_config_type sarathi \
    --sarathi_scheduler_config_chunk_size 8192 \
    --request_generator_config_type synthetic --synthetic_request_generator_config_num_requests 400 \
    --length_generator_config_type fixed --fixed_request_length_generator_config_prefill_tokens 3900 \
    --fixed_request_length_generator_config_decode_tokens 100 --interval_generator_config_type poisson \
    --poisson_request_interval_generator_config_qps 200 --execution_time_predictor_config_type random_forrest \
    --no-random_forrest_execution_time_predictor_config_use_native_execution_time_predictor \
    --metrics_config_wandb_project '' --no-metrics_config_store_plots --no-metrics_config_enable_chrome_trace \
    --metrics_config_output_dir "$work/$name" "$@" >"$work/log" 2>&1 || { tail "$work/log" >&2; exit 2; }
  mv "$work/$name"/*/request_metrics.csv "$work/$name.csv"
}

simulate low --replica_config_gpu_memory_utilization 0.3 --seed 1 --poisson_request_interval_generator_config_seed 1
simulate high --replica_config_gpu_memory_utilization 0.99 --seed 2 --poisson_request_interval_generator_config_seed 2
simulate margin --cache_config_memory_margin_fraction 0.5
simulate seed --synthetic_request_generator_config_seed 2

cat > "$work/compare.py" <<'PY'
import sys
from importlib.metadata import version

import pandas

low, high, margin, seed = (pandas.read_csv(f"{sys.argv[1]}/{name}.csv") for name in ("low", "high", "margin", "seed"))
print("Vidur", version("vidur"))
for name, requests in {
    "gpu_memory_utilization 0.3, seeds 1": low,
    "gpu_memory_utilization 0.99, seeds 2": high,
    "memory_margin_fraction 0.5": margin,
    "the generator's seed 2": seed,
}.items():
    print(f"{name}: {len(requests)} requests, mean end-to-end {requests.request_e2e_time.mean():.3f} s, the last arrives "
          f"{requests.request_inter_arrival_delay.sum():.3f} s after the first")
slower = margin.request_e2e_time.mean() > 2 * low.request_e2e_time.mean()
sys.exit(not (low.equals(high) and slower and not low.equals(seed)))
PY
"$work/venv/bin/python" "$work/compare.py" "$work"
