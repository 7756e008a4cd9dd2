#!/usr/bin/env bash
# Vidur 0.0.26: its Poisson arrivals are cut at three mean intervals, so they come faster and more evenly than asked.
#
# Guess: a Poisson process of 10 requests/s has exponential intervals: 10 requests/s, and a coefficient of variation of 1.
# Seen: no interval exceeds 0.3 s. 10.5 requests/s come, and the coefficient of variation is 0.88. Nothing is said. The gamma
# process with cv=1, which is the same process by definition, sends 10.0 requests/s with 1.0.
# Who is hurt: whoever finds the load that a simulated cluster carries: it is 5 % above the number printed, and has no lulls.
#
# Needs bash, python3 (3.11) and 1 GB; some two minutes, no card. Exits 1 if the behaviour changes.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
# The two generators alone: the package depends on 1 GB for its plots and its web page.
{ "$work/venv/bin/python" -m pip -q --disable-pip-version-check install --no-compile --no-deps vidur==0.0.26 &&
  "$work/venv/bin/python" -m pip -q --disable-pip-version-check install --no-compile numpy==2.4.6 scipy==1.17.1 pandas==3.1.1
} 2>"$work/pip" || { cat "$work/pip"; exit 2; }

cat > "$work/draw.py" <<'PY'
import random
import sys
from importlib.metadata import version

import numpy as np
from vidur.config import GammaRequestIntervalGeneratorConfig, PoissonRequestIntervalGeneratorConfig
from vidur.request_generator.gamma_request_interval_generator import GammaRequestIntervalGenerator
from vidur.request_generator.poisson_request_interval_generator import PoissonRequestIntervalGenerator

random.seed(0)
np.random.seed(0)
print("Vidur", version("vidur"))


def draw(generator):
    seconds = np.array([generator.get_next_inter_request_time() for _ in range(40000)])
    rate, cv = 1 / seconds.mean(), seconds.std() / seconds.mean()
    print(f"{type(generator).__name__}: {rate:.2f} requests/s, cv {cv:.3f}, longest interval {seconds.max():.3f} s")
    return rate, cv, seconds.max()


poisson = draw(PoissonRequestIntervalGenerator(PoissonRequestIntervalGeneratorConfig(qps=10)))
gamma = draw(GammaRequestIntervalGenerator(GammaRequestIntervalGeneratorConfig(qps=10, cv=1)))
cut = poisson[0] > 10.35 and poisson[1] < 0.92 and poisson[2] < 0.301
whole = 9.8 < gamma[0] < 10.2 and 0.97 < gamma[1] < 1.03 and gamma[2] > 0.6
sys.exit(not (cut and whole))
PY
"$work/venv/bin/python" "$work/draw.py"
