#!/usr/bin/env bash
# Vidur 0.0.26: intervals of a trace are cut to whole seconds, so requests of one second arrive at one moment.
#
# Guess: `interval_generator_config_type=trace` replays a trace's arrival times: four requests a second come 250 ms apart.
# Seen: the four come at once, and the next four a second later. `time_scale_factor` scales what is left: at 0.25 the trace is
# bursts of four every 250 ms. The first row's interval is not given out either: of 12 rows there are 11 intervals.
# Who is hurt: replays of traces with several requests a second, such as Azure's: queueing and TTFT are those of bursts.
#
# Needs bash, python3 (3.11) and 1 GB; some two minutes, no card. Exits 1 if the behaviour changes.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
# The generator alone: the package depends on 1 GB for its plots and its web page.
{ "$work/venv/bin/python" -m pip -q --disable-pip-version-check install --no-compile --no-deps vidur==0.0.26 &&
  "$work/venv/bin/python" -m pip -q --disable-pip-version-check install --no-compile numpy==2.4.6 scipy==1.17.1 pandas==3.1.1
} 2>"$work/pip" || { cat "$work/pip"; exit 2; }

cat > "$work/replay.py" <<'PY'
import sys
from importlib.metadata import version

from vidur.config import TraceRequestIntervalGeneratorConfig
from vidur.request_generator.trace_request_interval_generator import TraceRequestIntervalGenerator

path = f"{sys.argv[1]}/trace.csv"
with open(path, "w") as file:
    file.write("arrival_time\n")
    file.writelines(f"2024-05-10 00:00:{ms // 1000:02}.{ms % 1000:03}\n" for ms in range(0, 3000, 250))


def replay(scale):
    config = TraceRequestIntervalGeneratorConfig(
        trace_file=path, start_time="2024-05-09", end_time="2024-05-11", time_scale_factor=scale
    )
    generator = TraceRequestIntervalGenerator(config)
    return [float(seconds) for seconds in iter(generator.get_next_inter_request_time, None)]


print("Vidur", version("vidur"))
once, faster = replay(1), replay(0.25)
print("12 rows, 0.25 s apart:", once)
print("four times as fast:", faster)
sys.exit(not (once == [0, 0, 0, 1, 0, 0, 0, 1, 0, 0, 0] and faster == [each / 4 for each in once]))
PY
"$work/venv/bin/python" "$work/replay.py" "$work" 2>"$work/log" || { tail -3 "$work/log"; exit 1; }
