"""``repro reproduce truth --aisimulate PYTHON`` compares our simulated cluster with AISimulate's core on the same request files.

The core is in the wheel of ai-dynamo-runtime, which another Python has installed (docs/truth.md). ``aisimulate.yaml`` has the cases.
"""

import gzip
import json
import shutil
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import islice
from pathlib import Path
from random import Random
from statistics import fmean
from typing import Any, NamedTuple

import yaml

from engines.cluster.hardware import Hardware, StepCost
from engines.cost.kernels import ELEMENTWISE_S, ELEMENTWISE_SHARE
from engines.cost.roofline import DecodeLine
from engines.errors import UserError, require
from engines.policies.views import Chunk
from repro.runs.cell import Cell
from repro.runs.experiment import Experiment, prepare
from repro.workloads.card import find_data_dir

_DATA: Mapping[str, Any] = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
Case = Mapping[str, Any]
CASES: Sequence[Case] = _DATA["cases"]


class Means(NamedTuple):
    """Means over the requests of one run or of several runs."""

    ttft_ms: float
    tpot_ms: float
    e2e_ms: float
    reuse: float
    """Share of the prompt tokens that are prefix-cache hits."""
    cpu_s: float


def compare(python: Path, folder: Path) -> Iterator[dict[str, Any]]:
    """Serves each case three times: by our simulator, by ours with AISimulate's step times, and by AISimulate. Writes the cases' request
    files to ``folder``. Leaves out cases whose trace is missing from the data directory."""
    program = shutil.which(python)
    require(program is not None, f"aisimulate={str(python)!r} is no program: give a Python (docs/truth.md)")
    for index, case in enumerate(CASES):
        path = folder / f"case-{index}.jsonl"
        rows = requests(case) if "rate" in case else conversations(case)
        if not rows:
            continue
        path.write_text("\n".join(rows), encoding="utf-8")
        runs = []
        for speed in case.get("speeds", (1.0,)):
            start_s = time.process_time()
            simulation = experiment(case, path, speed)
            ours = means(simulation, start_s)
            theirs = replayed(str(program), case, path, speed)
            runs.append((ours, means(repriced(simulation), time.process_time()), theirs))
        sides = [Means(*map(fmean, zip(*side, strict=True)))._asdict() for side in zip(*runs, strict=True)]
        yield {"case": case["name"], **dict(zip(("ours", "repriced", "aisimulate"), sides, strict=True))}


def requests(case: Case) -> list[str]:
    """Poisson arrivals as rows in Mooncake's format. All rows share ``hash_ids``, because these cases have no prefix cache."""
    rng, at_s, rows = Random(1), 0.0, []
    for _ in range(case["num"]):
        at_s += rng.expovariate(case["rate"])
        prompt, answer = rng.randint(200, 3400), rng.randint(20, 260)
        row = {"timestamp": round(1000 * at_s), "input_length": prompt, "output_length": answer}
        rows.append(json.dumps({**row, "hash_ids": [*range(-(-prompt // 512))]}))
    return rows


def conversations(case: Case) -> list[str]:
    """The first rows of Mooncake's conversation trace; an empty list if no data directory has it."""
    published = (find_data_dir(None) or Path()) / "mooncake" / "conversation_trace.jsonl.gz"
    if not published.is_file():
        return []
    with gzip.open(published, "rt", encoding="utf-8") as lines:
        return [line.strip() for line in islice(lines, case["num"])]


def experiment(case: Case, path: Path, speed: float) -> Experiment:
    load_knobs = {"workload": str(path), "num_prompts": case["num"], "time_scale": speed}
    cell_fields = {"system": case["system"], "dataset": path.stem, "platform": "h200", "executor": "roofline"}
    knobs = {**_DATA["knobs"], **case["knobs"], **load_knobs}
    return prepare(Cell(**cell_fields, knobs=tuple(knobs.items())))


def means(target: Experiment, began: float) -> Means:
    """Runs the experiment and returns its means. ``began`` is the process time at which its preparation began."""
    record = target.run()
    cpu_s = time.process_time() - began
    summary = target.family.summarize(record)
    return Means(
        ttft_ms=1e3 * summary["ttft_rounds_s"]["mean"],
        tpot_ms=1e3 * summary["itl_s"]["mean"],
        e2e_ms=1e3 * summary["e2el_s"]["mean"],
        reuse=record.facts.get("prefix_cache", {}).get("reuse") or 0.0,
        cpu_s=cpu_s,
    )


def replayed(python: str, case: Case, path: Path, speed: float) -> Means:
    replay = {**case["replay"], "arrival_speedup_ratio": speed}
    job = {"file": str(path), "engine": {**_DATA["engine"], **case.get("engine", {})}, "replay": replay}
    command = [python, "-c", _DATA["script"]]
    process = subprocess.run(command, input=json.dumps(job), capture_output=True, text=True, check=False)
    try:
        answer = json.loads(process.stdout.splitlines()[-1])
        return Means(*(float(answer[name]) for name in Means._fields))
    except (LookupError, TypeError, ValueError):
        last = (process.stderr.splitlines() or ["it says nothing"])[-1]
        raise UserError(
            f"aisimulate={python!r} replays no file ({last:.200}): give a Python with ai-dynamo-runtime (docs/truth.md)"
        ) from None


def repriced(original: Experiment) -> Experiment:
    deployment: Any = original.deployment
    hardware = deployment.settings.ground.hardware
    values = {field.name: getattr(hardware, field.name) for field in fields(hardware) if field.init}
    ground = replace(deployment.settings.ground, hardware=RepricedHardware(**values))
    return replace(original, deployment=replace(deployment, settings=replace(deployment.settings, ground=ground)))


@dataclass(frozen=True, kw_only=True)
class RepricedHardware(Hardware):
    """Hardware whose steps take as long as in AISimulate."""

    def cost(self, degree: int, *, is_remote: bool = False) -> StepCost:
        return RepricedCost(super().cost(degree, is_remote=is_remote), self, degree, decodes=not is_remote)


_ROTATION_S = 13.2e-6
"""AISimulate adds this time to each layer's attention over prompts of any length, three times if queries and keys have norms."""


class RepricedCost:
    """Step times by AISimulate's rules. A step that prefills and decodes takes as long as a prefill and then a decode, which includes the
    prompts that just ended. All prompts of a step have their mean length. Elementwise kernels are two norms and the activation;
    ``_ROTATION_S`` replaces the others of a prefill."""

    def __init__(self, cost: StepCost, hardware: Hardware, degree: int, *, decodes: bool) -> None:
        shape = hardware.shape.on_rank(degree)
        rotations = 2 if shape.qk_norm else 1
        values = 2 * rotations * (shape.q_width + shape.kv_width) + 4 * shape.kv_width
        self._cost, self._decodes = cost, decodes
        self._less_s = shape.n_layers * ELEMENTWISE_S * (rotations + 1)
        self._less_row_s = shape.n_layers * values * shape.dtype_bytes / (ELEMENTWISE_SHARE * hardware.gpu.bandwidth)
        self._prompts_s = shape.n_layers * _ROTATION_S * (2 * rotations - 1)

    def step_s(self, chunks: Sequence[Chunk], decoding: int, context: int, mode: object = None) -> float:
        step_s, num, tokens = 0.0, len(chunks), sum(chunk.tokens for chunk in chunks)
        if chunks:
            mean = Chunk(sum(chunk.history for chunk in chunks) // num, -(-tokens // num))
            step_s = self._cost.step_s([mean] * num, 0, 0, mode) - self._saved_s(tokens) + self._prompts_s
        if self._decodes:
            ended = chunks if tokens + decoding < _DATA["engine"]["max_num_batched_tokens"] else chunks[:-1]
            decoding += len(ended)
            context += sum(chunk.history + chunk.tokens for chunk in ended)
        return step_s + (self._cost.step_s((), decoding, context, mode) - self._saved_s(decoding) if decoding else 0.0)

    def decode_line(self, decoding: int) -> DecodeLine:
        base_s, slope_s, floor_s = self._cost.decode_line(decoding)
        return DecodeLine(base_s - self._saved_s(decoding), slope_s, floor_s - self._saved_s(decoding))

    def _saved_s(self, rows: int) -> float:
        return self._less_s + rows * self._less_row_s
