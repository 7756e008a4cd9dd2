"""LAPS's Figures 1, 3, 5 and 6 on a measured instance: python -m repro.bench.prefill_loops --help

Every step is run and timed; the clock between them is virtual. One row a cell, written as it is measured.
"""

import argparse
from dataclasses import replace

from repro.bench.common import Rows, add_causal, add_counts, causal_facts, causal_of, parser_of, run, said
from repro.families.cluster.instance import measured_instance, setting_of
from repro.families.cluster.laps_record import PREFILL
from repro.families.cluster.loops import FIGURES, LoopGrid, part_of, run_cell


def main() -> None:
    options = _options()
    where = causal_of(options)
    setting = setting_of(options.model)
    setting = replace(setting, max_len=part_of(setting).most_tokens)
    if where["device"].startswith(
        "cuda"
    ):  # a quarter of the grid: capturing all of it would take longer than the loops
        setting = replace(setting, lengths=setting.lengths[1::2], batches=setting.batches[::2])
    instance = measured_instance(setting, **where, repeats=options.repeats)
    grid = LoopGrid(
        setting=setting,
        num_turns=options.num_turns,
        seeds=range(options.seeds),
        **({"concurrency": options.concurrency} if options.concurrency else {}),
        **({"compared": options.systems, "interference": options.systems} if options.systems else {}),
    )
    # Of each the run's metrics (docs/metrics.md), and why they may not be used where they may not.
    rows = Rows(options.json, {**causal_facts(where, instance.executor), "instance": instance.facts})
    print(said(instance.facts), flush=True)
    for cell in grid.cells(options.figures):
        record = run_cell(instance, cell)
        found = PREFILL.summarize(record)
        known = {"figure": cell.figure, "system": cell.system, "seed": cell.seed, "knobs": dict(cell.knob_values)}
        rows.add({**known, "invalid": PREFILL.assess(record).reasons, "metrics": found})
        means = {name: found[name]["mean"] for name in ("ttft_all_s", "ttft_short_s", "ttft_long_s")}
        told = {**cell.knob_values, "rps": found["rps"], **means, "late": found["slo_violations"]}
        print(cell.figure, cell.system, said(told), flush=True)


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
