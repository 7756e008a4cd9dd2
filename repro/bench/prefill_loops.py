"""LAPS's Figures 1, 3, 5 and 6 on a measured instance: python -m repro.bench.prefill_loops --help

Every step is run and timed; the clock between steps is virtual. Each cell gives a row, written once it is measured. On a card, turns,
budgets and objective are those of the simulated H200. The tiny model has those of the platform cpu-tiny.
"""

import argparse
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from types import MappingProxyType

import yaml

from engines.errors import UserError
from repro.bench.common import Rows, add_causal, add_counts, causal_facts, causal_of, parser_of, row_text, run
from repro.families.cluster.instance import MeasuredInstance, Setting, measured_instance, setting_of
from repro.families.cluster.laps import PrefillSystemEntry
from repro.families.cluster.laps_record import PREFILL
from repro.families.platforms import PrefillPart, platform
from repro.runs.cell import Cell, Scalar
from repro.runs.record import RunRecord
from repro.runs.system import SYSTEMS

GRIDS = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
FIGURES = ("fig1", "fig3", "fig5", "fig6")
SCALED = ("think_s", "max_window_s")
MOST_TOKENS = 16_384
"""Most tokens of a conversation on a card."""
LEAST_TURNS = 4


def platform_of(setting: Setting) -> str:
    return "cpu-tiny" if setting.model == "tiny" else "h200"


def part_of(setting: Setting) -> PrefillPart:
    """Defaults for an instance of this size."""
    part = platform(platform_of(setting)).part(PrefillPart)
    if part.gpu is None:
        return part
    return replace(part, gpu=None, model=setting.model, most_instances=1, most_tokens=MOST_TOKENS)


def run_cell(instance: MeasuredInstance, cell: Cell) -> RunRecord:
    system = SYSTEMS.get(cell.system)
    if not isinstance(system, PrefillSystemEntry):
        raise UserError(f"system={cell.system!r} prefills nothing: use laps, or one it is compared with")
    deployment, workload = system.prepare(cell, part_of(instance.setting))
    return replace(deployment, settings=replace(deployment.settings, instance=instance)).run(workload)


def cells_of(
    setting: Setting,
    figures: Sequence[str],
    *,
    num_turns: int,
    seeds: Sequence[int],
    replaced: Mapping[str, Sequence[Scalar]] = MappingProxyType({}),
) -> Iterator[Cell]:
    """Yield the cells of the figures' grids (prefill_loops.yaml); ``replaced`` replaces some of the varied values. Each cell has
    ``num_turns`` turns, but at least ``LEAST_TURNS`` for each client."""
    part = part_of(setting)
    for seed, grid in product(seeds, GRIDS):
        varied = {name: replaced.get(name, values) for name, values in grid["varied"].items()}
        for values in product(*varied.values()) if set(figures) & set(grid["figures"]) else ():
            knobs = {**grid.get("fixed", {}), **dict(zip(varied, values, strict=True))}
            clients = sum(knobs.get(name, 0) for name in ("clients", "long_clients", "short_clients"))
            if clients == 0:
                continue
            knobs |= {name: part.time_scale * knobs[name] for name in SCALED if name in knobs}
            system = knobs.pop("system")
            yield Cell(
                figure=grid["name"],
                system=system,
                dataset=part.dataset,
                platform=platform_of(setting),
                executor="torch",
                seed=seed,
                knobs=(("num_prompts", max(num_turns, LEAST_TURNS * clients)), *knobs.items()),
            )


def main() -> None:
    options = _options()
    device_options = causal_of(options)
    setting = setting_of(options.model)
    setting = replace(setting, max_len=part_of(setting).most_tokens)
    if device_options["device"].startswith("cuda"):
        # Take a quarter of the grid, because capturing all of it would take longer than the loops.
        setting = replace(setting, lengths=setting.lengths[1::2], batches=setting.batches[::2])
    instance = measured_instance(setting, **device_options, repeats=options.repeats)
    requested = {"clients": options.concurrency, "system": options.systems}
    instead = {name: values for name, values in requested.items() if values}
    seeds = range(options.seeds)
    # Each row has the run's metrics (docs/metrics.md), and the reasons if they may not be used.
    rows = Rows(options.json, {**causal_facts(device_options, instance.executor), "instance": instance.facts})
    print(row_text(instance.facts), flush=True)
    for cell in cells_of(setting, options.figures, num_turns=options.num_turns, seeds=seeds, replaced=instead):
        record = run_cell(instance, cell)
        metrics = PREFILL.summarize(record)
        facts = {"figure": cell.figure, "system": cell.system, "seed": cell.seed, "knobs": dict(cell.knob_values)}
        rows.add({**facts, "invalid": PREFILL.assess(record).reasons, "metrics": metrics})
        means = {name: metrics[name]["mean"] for name in ("ttft_all_s", "ttft_short_s", "ttft_long_s")}
        shown = {**cell.knob_values, "rps": metrics["rps"], **means, "late": metrics["slo_violations"]}
        print(cell.figure, cell.system, row_text(shown), flush=True)


def _options() -> argparse.Namespace:
    parser = parser_of(__doc__)
    add_causal(parser)
    parser.add_argument("--figures", nargs="+", default=list(FIGURES), choices=FIGURES)
    parser.add_argument("--systems", nargs="+")
    parser.add_argument("--concurrency", nargs="+", type=int)
    add_counts(
        parser,
        seeds=(3, "of each cell"),
        num_turns=(300, "of a cell"),
        repeats=(5, "of each step of the profile that policies rest on"),
    )
    return parser.parse_args()


if __name__ == "__main__":
    run(main)
