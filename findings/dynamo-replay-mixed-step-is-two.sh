#!/usr/bin/env bash
# ai-dynamo-runtime 1.5.1: the replay of a trace charges a step that prefills and decodes as two steps.
#
# Guess: a step with a prompt and decodes reads the weights once. aiconfigurator-core 0.12.0, whose kernels the replay takes, has a price of
#   such a step (mixed_step_latency), so the replay charges that: a request that decodes waits 105.6 ms for a prompt of 2,048 tokens.
# Seen: it waits 114.3 ms. That is a prefill of 2,048 tokens, 103.0 ms, and a whole decode step of both requests, 11.3 ms.
# Who is hurt: whoever takes the replay's time between tokens for that of chunked prefill. Here it is 8 % longer than the tables say.
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
longest = replay((0, 512, 200), (500, 2048, 2))["max_itl_ms"]
apart = aic.predict_prefill(1, 2048, 0), aic.predict_decode(2, 1300, 2)
mixed = aic._engine.mixed_step_latency(ctx_tokens=2048, gen_tokens=1, isl=2048, osl=2)
print(f"longest gap {longest:.1f} ms; a prefill and a decode {apart[0]:.1f} + {apart[1]:.1f} ms; a mixed step {mixed:.1f} ms")
if abs(longest - sum(apart)) > 0.1 or longest < 1.07 * mixed:
    raise SystemExit("changed")
PY
"$work/venv/bin/python" "$work/look.py" "$work/trace.jsonl" 2> /dev/null | grep gap
echo 'as seen on 2026-11-29: a mixed step is charged as a prefill and a decode'
