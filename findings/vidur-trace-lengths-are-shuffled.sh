#!/usr/bin/env bash
# Vidur 0.0.26: a trace's arrivals keep their order and its lengths are shuffled, so no request has the lengths of its own row.
#
# Guess: arrivals and lengths read from one trace file belong together: a burst of long prompts in the trace is one in the simulation.
# Seen: the second half of a trace has prompts of 4,000 tokens, the first of 100; the simulated halves have nearly the same mean. Prompt and output
# of a row stay together. `seed` selects another order, and no option of these two generators keeps the trace's.
# `trace_replay`, which wants other columns, keeps it; its prompts are 0.3 and its times 0.04 of the trace's unless the factors are set to 1.
# Who is hurt: replays of traces for their bursts: queueing behind long prompts is averaged out, and so are the tails of TTFT.
#
# Needs bash, python3 (3.11) and 1 GB; a minute, no card. Exits 1 if the behaviour changes.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
# The request generators alone: the package depends on 1 GB for its plots and its web page.
{ "$work/venv/bin/python" -m pip -q --disable-pip-version-check install --no-compile --no-deps vidur==0.0.26 &&
  "$work/venv/bin/python" -m pip -q --disable-pip-version-check install --no-compile numpy==2.4.6 scipy==1.17.1 pandas==3.1.1 scikit-learn==1.9.1 fasteners==0.20 ddsketch==3.0.1 huggingface_hub==2.4.0
} 2>"$work/pip" || { cat "$work/pip"; exit 2; }

cat > "$work/replay.py" <<'PY'
import logging
import statistics
import sys
from importlib.metadata import version

from vidur.config import SyntheticRequestGeneratorConfig, TraceRequestGeneratorConfig, TraceRequestIntervalGeneratorConfig, TraceRequestLengthGeneratorConfig
from vidur.request_generator.synthetic_request_generator import SyntheticRequestGenerator
from vidur.request_generator.trace_replay_request_generator import TraceReplayRequestGenerator

logging.disable(logging.INFO)
print("Vidur", version("vidur"))
path, half, minute = sys.argv[1], 500, 60
rows = [(i, 100, 10) if i < half else (i, 4000, 1000) for i in range(2 * half + 1)]
with open(path, "w") as file:
    file.write("arrival_time,num_prefill_tokens,num_decode_tokens\n")
    for i, prompt, output in rows:
        file.write(f"2024-05-10 {i // 3600:02}:{i // minute % minute:02}:{i % minute:02},{prompt},{output}\n")


with open(f"{path}.replay", "w") as file:
    file.write("Date,Time,PromptTokenCount,CompletionTokenCount\n")
    file.writelines(f"2024-05-10,{i},{prompt},{output}\n" for i, prompt, output in rows)


def means(requests):
    return [statistics.mean(prompt for _, prompt, _ in part) for part in (requests[:half], requests[half:])]


def replay(seed):
    intervals = TraceRequestIntervalGeneratorConfig(trace_file=path, start_time="2024-05-09 23:59:59", end_time="2024-05-11 00:00:00", time_scale_factor=1.0)
    lengths = TraceRequestLengthGeneratorConfig(trace_file=path, max_tokens=8192, seed=seed)
    requests = SyntheticRequestGenerator(SyntheticRequestGeneratorConfig(length_generator_config=lengths, interval_generator_config=intervals, num_requests=2 * half, seed=seed)).generate_requests()
    return [(each.arrived_at, each.num_prefill_tokens, each.num_decode_tokens) for each in requests]


def replay_rows(**factors):
    requests = TraceReplayRequestGenerator(TraceRequestGeneratorConfig(trace_file=f"{path}.replay", date="2024-05-10", max_tokens=8192, **factors)).generate_requests()
    return [(float(each.arrived_at), int(each.num_prefill_tokens), int(each.num_decode_tokens)) for each in requests]


stated = []
for seed in (1, 2):
    replayed = replay(seed)
    first, second = means(replayed)
    pairs = sorted({each[1:] for each in replayed})
    print(f"trace, seed {seed}: {len(replayed)} requests in {replayed[-1][0]:g} s, mean prompt {first:.0f} tokens in the first half, {second:.0f} in the second; prompt and output are {pairs}")
    stated.append(abs(first / second - 1) < 0.25 and pairs == [(100, 10), (4000, 1000)])
kept, usual = replay_rows(prefill_scale_factor=1, decode_scale_factor=1, time_scale_factor=1), replay_rows()
for name, requests in (("factors 1", kept), ("as it is", usual)):
    print(f"trace_replay, {name}: {len(requests)} requests in {requests[-1][0]:g} s, mean prompt {means(requests)[0]:.0f} and {means(requests)[1]:.0f}")
sys.exit(not (all(stated) and kept == rows and abs(usual[-1][0] / kept[-1][0] - 0.04) < 1e-6 and means(usual) == [30, 1200]))
PY
"$work/venv/bin/python" "$work/replay.py" "$work/trace.csv" 2>"$work/log" || { code=$?; cat "$work/log"; exit "$code"; }
