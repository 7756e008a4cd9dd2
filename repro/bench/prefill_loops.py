"""LAPS's Figures 1, 3, 5 and 6 on a measured instance: python -m repro.bench.prefill_loops --help

Every step is run and timed; the clock between them is virtual. One row a cell, written as it is measured. On a card turns, budgets
and objective are those of the simulated H200; the tiny model has those of the platform cpu-tiny.
"""

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from engines.errors import UserError
from repro.bench.common import Rows, add_causal, add_counts, causal_facts, causal_of, parser_of, run, said
from repro.families.cluster.instance import MeasuredInstance, Setting, measured_instance, setting_of
from repro.families.cluster.laps import PrefillSystemEntry
from repro.families.cluster.laps_record import PREFILL
from repro.families.cluster.laps_settings import SHORT_PROMPT
from repro.families.platforms import PrefillPart, platform
from repro.runs.cell import Cell, Scalar
from repro.runs.record import RunRecord
from repro.runs.system import SYSTEMS

FIGURES = ("fig1", "fig3", "fig5", "fig6")
MOST_TOKENS = 16_384
"""The most tokens of a conversation on a card."""
LEAST_TURNS = 4


def platform_of(setting: Setting) -> str:
    return "cpu-tiny" if setting.model == "tiny" else "h200"


def part_of(setting: Setting) -> PrefillPart:
    """What runs on an instance of this size by default."""
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


@dataclass(frozen=True, kw_only=True)
class LoopGrid:
    """What the figures vary."""

    setting: Setting
    num_turns: int
    """Turns of a run, but no fewer than ``LEAST_TURNS`` for each client."""
    seeds: Sequence[int] = (0, 1, 2)
    long_clients: Sequence[int] = (0, 1, 4)
    short_clients: Sequence[int] = (0, 4, 16)
    interference: Sequence[str] = ("sglang-pd", "laps", "reserve")
    """Systems of Figures 1 and 3."""
    windows_s: Sequence[float] = (0.0, 0.005, 0.02)
    """W_max of Figure 5, for an objective of 0.4 s, as is the next."""
    thinks_s: Sequence[float] = (0.0, 0.05)
    window_clients: int = 16
    concurrency: Sequence[int] = (1, 4, 16)
    compared: Sequence[str] = ("sglang-pd", "laps-graphs-only", "laps-disaggregation-only", "laps", "reserve")
    """Systems of Figure 6."""

    def cells(self, figures: Sequence[str]) -> Iterator[Cell]:
        for seed in self.seeds:
            if "fig1" in figures or "fig3" in figures:
                for system in self.interference:
                    for longs in self.long_clients:
                        for shorts in self.short_clients:
                            if longs or shorts:
                                yield self._cell("fig1-3", system, seed, long_clients=longs, short_clients=shorts)
            if "fig5" in figures:
                scale = part_of(self.setting).time_scale
                alone: dict[str, Scalar] = {"clients": self.window_clients, "max_tokens": SHORT_PROMPT}
                for think_s in self.thinks_s:
                    for window_s in self.windows_s:
                        times = {"think_s": scale * think_s, "max_window_s": scale * window_s}
                        yield self._cell("fig5", "laps", seed, **alone, **times)
            if "fig6" in figures:
                for clients in self.concurrency:
                    for system in self.compared:
                        yield self._cell("fig6", system, seed, clients=clients)

    def _cell(self, figure: str, system: str, seed: int, **knobs: Scalar) -> Cell:
        clients = sum(int(knobs.get(name) or 0) for name in ("clients", "long_clients", "short_clients"))
        num_prompts = max(self.num_turns, LEAST_TURNS * clients)
        return Cell(
            figure=figure,
            system=system,
            dataset=part_of(self.setting).dataset,
            platform=platform_of(self.setting),
            executor="torch",
            rate=None,
            seed=seed,
            knobs=tuple({"num_prompts": num_prompts, **knobs}.items()),
        )


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
