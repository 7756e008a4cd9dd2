#!/usr/bin/env bash
# LLMeter 0.2.0: with fewer than 100 requests the p99 of a latency is larger than the slowest request.
#
# Guess: a percentile lies between the fastest and the slowest request, as NumPy's does. With 30 requests the p99 is near the maximum.
# Seen: 29 requests take 1 s and one takes 5 s. The p99 of `time_to_last_token` is 7.76 s, and nothing took that long. With 8 requests it is
#   8.64 s, and with 99 or more it is 5 s. The p90 of 8 requests is beyond the maximum as well. The estimator extends the line through the
#   last two values (`statistics.quantiles`, exclusive).
# Who is hurt: an objective on p99 fails by latencies that no request had, and the shorter the run, the higher its p99.
#
# Needs bash, and Python 3.12 or later as $PYTHON or python3.12; some two minutes. Exits 1 if the behaviour changes.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"${PYTHON:-python3.12}" -m venv "$work/venv"
# The last three are pinned since pip searches for a fitting set for many minutes otherwise.
"$work/venv/bin/python" -m pip -q --disable-pip-version-check install --no-compile llmeter==0.2.0 numpy==2.4.0 \
  boto3==1.43.117 aiobotocore==3.10.0 s3fs==2026.6.0 2>"$work/pip" || { cat "$work/pip"; exit 2; }
cat > "$work/measure.py" <<'PY'
import sys
from importlib.metadata import version

import numpy
from llmeter.endpoints.base import InvocationResponse
from llmeter.results import Result

print("LLMeter", version("llmeter"))
seen = {}
for requests in (8, 30, 99, 200):
    times = [1.0] * (requests - 1) + [5.0]
    responses = [InvocationResponse(id=str(i), response_text="x", time_to_last_token=time) for i, time in enumerate(times)]
    told = Result(responses=responses, total_requests=requests, clients=1, n_requests=requests).stats
    seen[requests] = tuple(round(told[f"time_to_last_token-p{p}"], 2) for p in (90, 99))
    print(f"{requests} requests, the slowest of 5 s: p90 {seen[requests][0]} s, p99 {seen[requests][1]} s; NumPy's p99 {numpy.percentile(times, 99):.2f} s")
sys.exit(seen != {8: (5.4, 8.64), 30: (1.0, 7.76), 99: (1.0, 5.0), 200: (1.0, 1.0)})
PY
"$work/venv/bin/python" "$work/measure.py"
