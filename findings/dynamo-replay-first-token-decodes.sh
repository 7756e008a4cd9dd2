#!/usr/bin/env bash
# ai-dynamo-runtime 1.5.1: in the replay of a trace the first token costs a decode step besides its prefill.
#
# Guess: the step that ends a prompt samples the first token, as in vLLM. So a request for one token takes its prefill, and one of 11 tokens
#   ten decode steps more.
# Seen: a prompt of 3,328 tokens takes 175.4 ms and its first token comes at 186.2 ms, where the request of one token ends as well. A request
#   of 11 tokens decodes 11 times.
# Who is hurt: whoever compares the replay's TTFT with a server's. Here it is 11 ms, a decode step of the whole batch, too long.
#
# Needs bash, python3 (3.11) and 1 GB; about a minute. Exits 1 if the behaviour changes.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/python" -m pip -q --disable-pip-version-check install --no-deps ai-dynamo-runtime==1.5.1 aiconfigurator-core==0.12.0 \
  pyyaml==6.0.3 packaging==25.0 numpy==2.3.5 pandas==2.3.3 scipy==1.16.3 python-dateutil==2.9.0.post0 pytz==2025.2 tzdata==2025.2 six==1.17.0

cat > "$work/look.py" <<'PY'
import json
import sys

from dynamo._core import MockEngineArgs, run_mocker_trace_replay
from dynamo._internal.aic import create_session

MODEL = {"aic_backend": "vllm", "aic_system": "h200_sxm", "aic_model_path": "Qwen/Qwen3-32B", "aic_tp_size": 2}
ENGINE = {"num_gpu_blocks": 40000, "block_size": 16, "max_num_batched_tokens": 8192, "enable_prefix_caching": False}


def replay(*requests):
    """Requests of (milliseconds of arrival, prompt, answer) on one worker."""
    path, block = sys.argv[1], 0
    with open(path, "w") as file:
        for arrival, prompt, answer in requests:
            row = {"timestamp": arrival, "input_length": prompt, "output_length": answer}
            blocks = list(range(block, block + -(-prompt // 512)))
            block += len(blocks)
            file.write(json.dumps({**row, "hash_ids": blocks}) + "\n")
    engine = MockEngineArgs.from_json(json.dumps({**MODEL, **ENGINE}))
    return run_mocker_trace_replay([path], extra_engine_args=engine, trace_block_size=512).summary


aic = create_session("vllm", "h200_sxm", "Qwen/Qwen3-32B", 2)
prefill, decode = aic.predict_prefill(1, 3328, 0), aic.predict_decode(1, 3329, 2)
one, eleven = (replay((0, 3328, answer)) for answer in (1, 11))
steps = (eleven["mean_e2e_latency_ms"] - prefill) / decode
print(f"a prefill {prefill:.1f} ms, a decode {decode:.1f} ms; one token {one['mean_e2e_latency_ms']:.1f} ms, eleven: {steps:.2f} decodes")
if abs(one["mean_e2e_latency_ms"] - prefill - decode) > 0.1 or abs(one["mean_ttft_ms"] - eleven["mean_ttft_ms"]) > 0.1 or round(steps, 1) != 11:
    raise SystemExit("changed")
PY
"$work/venv/bin/python" "$work/look.py" "$work/trace.jsonl" 2> /dev/null | grep token
echo 'as seen on 2026-11-29: the first token takes its prefill and a decode'
