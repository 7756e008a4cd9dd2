"""Composed steps beside a card's own: python benchmarks/silicon_card.py --help

Every dLLM run that a card has served with all requests there at once (results/CARD/runs, of 'repro gpu-suite') is simulated again with
the pool, or the static batch, that was measured, so that both run one schedule; its steps are charged by the kernels of vLLM, SGLang
and TensorRT-LLM, measured by others and fitted to nothing here, and by datasheet peaks. No overhead of a step is in any of them.

    steps      measured, and simulated where they differ
    of card    measured throughput over that of composed steps, by vLLM's kernels
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from common import Rows, parser_of, run, shown, table, write_csv

from engines.cost.kernels import FRAMEWORKS
from engines.cost.roofline import gpu
from engines.errors import UserError
from repro.gpu_suite.expected import simulated
from repro.gpu_suite.stages import BLOCK, title_of
from repro.runs.cell import Cell
from repro.runs.experiment import prepare
from repro.runs.family import served_per_second
from repro.runs.store import SUFFIX, part_of, parts_of
from repro.systems.dllm.deployment import DllmDeployment, sized
from repro.systems.platforms import PLATFORMS


@dataclass(frozen=True, kw_only=True)
class Served:
    model: str = shown("model")
    memory_gb: float = shown("GB", ".0f")
    system: str = shown("system")
    requests: int = shown("requests")
    tokens: int = shown("tokens")
    """In an answer."""
    steps: int = shown("steps")
    simulated_steps: int = shown("simulated")
    in_graphs: float = shown("in graphs", ".0%")
    """Share of steps that were replayed."""
    measured_tok_s: float = shown("measured", ".1f")
    vllm_tok_s: float = shown("vllm", ".1f")
    sglang_tok_s: float = shown("sglang", ".1f")
    trtllm_tok_s: float = shown("trtllm", ".1f")
    datasheet_tok_s: float = shown("datasheet", ".1f")
    of_card: float = shown("of card", ".2f")


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("runs", type=Path, help="folder of a card's runs, such as results/h200/runs")
    parser.add_argument("--csv", type=Path, help="write the rows here as a table")
    options = parser.parse_args()
    rows = Rows(options.json)
    for file in sorted(options.runs.glob(f"*{SUFFIX}")):
        for row in _served(parts_of(file.read_bytes())):
            print(f"{row.system}, {row.requests} requests", file=sys.stderr)
            rows.add(row)
    if not rows.rows:
        raise UserError(f"runs={str(options.runs)!r} holds no valid run of a load: give results/CARD/runs of a card")
    rows.rows.sort(key=lambda row: (row.model, -row.memory_gb, -row.requests, -row.measured_tok_s))
    print(table(rows.rows))
    if options.csv:
        write_csv(options.csv, rows.rows)


def _served(parts: dict[str, bytes]) -> Iterator[Served]:
    """The run's row, if it is one of a load, valid and not taken apart."""
    told, manifest, summary = (part_of(parts, name) for name in ("cell", "manifest", "summary"))
    knobs = {name: value for name, value in told["knobs"].items() if name != "basis"}
    if told["figure"] != "saturation" or not manifest["validity"]["valid"] or "profile_every" in knobs:
        return
    cell = Cell(**{**told, "knobs": tuple(knobs.items())})
    if cell.system == BLOCK:
        yield from _served_blocks(
            cell, manifest["facts"], summary["throughput_tok_s"], len(part_of(parts, "steps")["step"])
        )
        return
    facts = manifest["facts"]["facts"]
    again = {each: _again(replace(cell, knobs=(*cell.knobs, ("kernels", each))), facts) for each in FRAMEWORKS}
    bound = _again(replace(cell, knobs=(*cell.knobs, ("cost", "roofline"))), facts)
    speeds = {each: served_per_second(record, "output_len") for each, record in again.items()}
    measured, graph = summary["throughput_tok_s"], part_of(parts, "steps")["graph"]
    yield Served(
        model=manifest["facts"]["model"],
        memory_gb=facts["enforced_memory_bytes"] / 1e9,
        system=title_of(cell),
        requests=manifest["facts"]["dataset"]["lengths"]["n"],
        tokens=knobs["gen_length"],
        steps=len(graph),
        simulated_steps=len(again["vllm"].tables["steps"]["step"]),
        in_graphs=sum(map(bool, graph)) / len(graph),
        measured_tok_s=measured,
        **{f"{each}_tok_s": speed for each, speed in speeds.items()},
        datasheet_tok_s=served_per_second(bound, "output_len"),
        of_card=measured / speeds["vllm"],
    )


def _served_blocks(cell: Cell, facts: dict[str, Any], measured: float, steps: int) -> Iterator[Served]:
    """On the platform of the run's card and model, where there is one."""
    where = f"{cell.platform}-{facts['model']}"
    if where not in PLATFORMS:
        return
    own = {name: value for name, value in cell.knob_values.items() if name not in ("model", "device", "dtype")}
    knobs = {**own, "num_tokens": facts["num_tokens"]}

    def again(**charged: str) -> Any:
        asked = replace(cell, platform=where, executor="roofline", knobs=(*knobs.items(), *charged.items()))
        return prepare(asked).run()

    records = {each: again(kernels=each) for each in FRAMEWORKS}
    speeds = {each: served_per_second(record, "output_len") for each, record in records.items()}
    yield Served(
        model=facts["model"],
        memory_gb=gpu(cell.platform).memory_bytes / 1e9,
        system=title_of(cell),
        requests=facts["dataset"]["lengths"]["n"],
        tokens=int(str(own["gen_length"])),
        steps=steps,
        simulated_steps=len(records["vllm"].tables["steps"]["step"]),
        in_graphs=0.0,
        measured_tok_s=measured,
        **{f"{each}_tok_s": speed for each, speed in speeds.items()},
        datasheet_tok_s=served_per_second(again(cost="roofline"), "output_len"),
        of_card=measured / speeds["vllm"],
    )


def _again(cell: Cell, facts: dict[str, Any]) -> Any:
    """The record of the simulated cell, with the pool that was measured."""
    experiment = simulated(cell)
    deployment = experiment.deployment
    assert isinstance(deployment, DllmDeployment)
    if "kv_rows" in facts:
        deployment = replace(deployment, kv_rows=facts["kv_rows"])
    else:
        deployment = sized(deployment, {**deployment.facts, "batch_size": facts["batch_size"]})
    return replace(experiment, deployment=deployment).run()


if __name__ == "__main__":
    run(main)
