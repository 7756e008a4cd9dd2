#!/usr/bin/env bash
# ai-dynamo-runtime 1.5.1: the replay of a trace charges the prompts of one step as if each had their mean length.
#
# Guess: attention grows with the square of a prompt's length, so a step of prompts of 7,900 and 100 tokens takes longer than one of two
#   prompts of 4,000.
# Seen: both take the same, to the microsecond: that of two prompts of 4,000. The long prompt alone takes longer than with the short one.
# Who is hurt: whoever replays traces whose prompts differ much in length, as conversations' do: a step with one long prompt comes out short.
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
uneven, even, alone = (
    replay(*((0, prompt, 1) for prompt in prompts))["mean_ttft_ms"] for prompts in ((7900, 100), (4000, 4000), (7900,))
)
print(f"7,900 and 100 tokens take {uneven:.2f} ms, two of 4,000 {even:.2f} ms, 7,900 alone {alone:.2f} ms")
if abs(uneven - even) > 0.01 or alone <= uneven:
    raise SystemExit("changed")
PY
"$work/venv/bin/python" "$work/look.py" "$work/trace.jsonl" 2> /dev/null | grep tokens
echo 'as seen on 2026-11-29: prompts of one step are charged as their mean'
