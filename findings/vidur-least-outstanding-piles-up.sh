#!/usr/bin/env bash
# Vidur 0.0.26: its router of least outstanding requests (`lor`) forgets those that run, and fills the first replica.
#
# Guess: two replicas get about half of the requests each: a request goes where fewer are outstanding.
# Seen: at 20 requests/s of half a second each, of which some ten run at any time, one replica of two gets nine tenths. It counts
# requests that wait for their first step; between steps none waits, all are equal, and the first replica is taken.
# Who is hurt: comparisons of routers, and capacity planned with it: one replica's batches are large and the other's empty.
#
# Needs bash, python3 (3.11) and 1 GB; some three minutes, no card. Exits 1 if the behaviour changes.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
# Without what its plots as images and its web page need.
{ "$work/venv/bin/python" -m pip -q --disable-pip-version-check install --no-compile --no-deps vidur==0.0.26 &&
  "$work/venv/bin/python" -m pip -q --disable-pip-version-check install --no-compile numpy==2.4.6 scipy==1.17.1 pandas==3.1.1 scikit-learn==1.9.1 fasteners==0.20 ddsketch==3.0.1 plotly_express==0.4.1 wandb==0.31.0 huggingface_hub==2.4.0
} 2>"$work/pip" || { cat "$work/pip"; exit 2; }

cat > "$work/simulate.py" <<'PY'
"""vidur.main with steps of 10 ms, since the times measured on cards are fetched from a hub. Tells how many requests each replica ran."""
from vidur.config import RandomForrestExecutionTimePredictorConfig
from vidur.execution_time_predictor import BaseExecutionTimePredictor, ExecutionTimePredictorRegistry
from vidur.main import main

ran = {}


def up_projection_ms(self, batch):
    ran.setdefault(batch.replica_id.id, set()).update(batch.request_ids)
    return 10 / 32  # in each of 32 layers


parts = dict.fromkeys(BaseExecutionTimePredictor.__abstractmethods__, lambda self, batch: 0.0)
parts["_get_mlp_layer_up_proj_execution_time"] = up_projection_ms
kind = RandomForrestExecutionTimePredictorConfig.get_type()
ExecutionTimePredictorRegistry.unregister(kind)
ExecutionTimePredictorRegistry.register(kind, type("Constant", (BaseExecutionTimePredictor,), parts))
main()
print(*(len(ran.get(replica, ())) for replica in range(2)))
PY

route() {
  "$work/venv/bin/python" "$work/simulate.py" --global_scheduler_config_type "$1" --cluster_config_num_replicas 2 \
    --replica_config_tensor_parallel_size 1 --replica_config_num_pipeline_stages 1 --replica_scheduler_config_type sarathi \
    --request_generator_config_type synthetic --synthetic_request_generator_config_num_requests 400 \
    --length_generator_config_type fixed --fixed_request_length_generator_config_prefill_tokens 100 \
    --fixed_request_length_generator_config_decode_tokens 50 --interval_generator_config_type poisson \
    --poisson_request_interval_generator_config_qps 20 --execution_time_predictor_config_type random_forrest \
    --no-random_forrest_execution_time_predictor_config_use_native_execution_time_predictor \
    --metrics_config_wandb_project '' --no-metrics_config_store_plots --no-metrics_config_enable_chrome_trace \
    --metrics_config_output_dir "$work/out" >"$work/log" 2>&1 || { tail "$work/log" >&2; exit 2; }
  tail -1 "$work/log"
}
"$work/venv/bin/python" -c 'from importlib.metadata import version; print("Vidur", version("vidur"))'
round=$(route round_robin)
least=$(route lor)
echo "requests that each of two replicas ran: round robin $round, least outstanding $least"
[ "$round" = "200 200" ] && [ "${least% *}" -gt 340 ] || { echo "the behaviour changed"; exit 1; }
