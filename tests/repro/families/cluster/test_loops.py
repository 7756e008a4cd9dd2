"""On an instance of any size LAPS's systems serve the family's own turns."""

from dataclasses import replace
from typing import Any

import pytest
from support.exact_instance import ExactInstance
from support.refusals import refuses

from repro.bench.prefill_loops import FIGURES, GRIDS, LEAST_TURNS, MOST_TOKENS, cells_of, part_of, run_cell
from repro.families.cluster import on_torch
from repro.families.cluster.instance import TINY, setting_of
from repro.families.cluster.laps_record import PREFILL
from repro.families.cluster.laps_settings import SHORT_PROMPT
from repro.runs.cell import Cell
from repro.runs.experiment import prepare

STUB: Any = ExactInstance()
CARD: Any = ExactInstance(setting=setting_of("qwen2.5-14b"))


def first(figure: str, instance: Any = STUB, **instead: Any) -> Cell:
    return next(cells_of(instance.setting, [figure], num_turns=100, seeds=(0,), replaced=instead))


@pytest.mark.parametrize("system", GRIDS[-1]["varied"]["system"])
@pytest.mark.parametrize("instance", [STUB, CARD], ids=["tiny", "card"])
def test_runs_are_whole_and_obey_littles_law(system, instance):
    record = run_cell(instance, first("fig6", instance, clients=(8,), system=(system,)))
    assert PREFILL.assess(record).reasons == ()
    assert record.facts["slo_s"] == (0.08 if instance is STUB else 0.4)
    assert record.facts["instance"] == instance.facts


def test_a_run_on_the_tiny_instance_is_a_cell_of_the_platform(monkeypatch):
    monkeypatch.setattr(on_torch, "instance", lambda max_len: STUB)
    cell = first("fig6", clients=(4,), system=("laps",))
    assert run_cell(STUB, cell).tables == prepare(cell).run().tables


def test_short_first_shields_shorts_from_longs():
    """Figure 3's point, on exact steps: with 4 longs about, short requests wait for them under SGLang."""
    cells = cells_of(TINY, ["fig3"], num_turns=400, seeds=(0,), replaced={"long_clients": (4,), "short_clients": (4,)})
    mean_s = {cell.system: PREFILL.summarize(run_cell(STUB, cell))["ttft_short_s"]["mean"] for cell in cells}
    assert mean_s["laps"] < mean_s["sglang-pd"]
    assert mean_s["reserve"] < mean_s["sglang-pd"]


def test_cells_of_the_figures():
    cells = list(cells_of(TINY, FIGURES, num_turns=50, seeds=(0,)))
    assert len(cells) == 24 + 6 + 15
    assert len({cell.key for cell in cells}) == len(cells)
    windows = sorted({cell.knob_values["max_window_s"] for cell in cells if cell.figure == "fig5"})
    assert windows == pytest.approx([0.0, 0.001, 0.004]), "a fifth of the paper's"
    assert list(cells_of(TINY, ["fig6"], num_turns=50, seeds=(0,))) == [cell for cell in cells if cell.figure == "fig6"]
    windowed = [cell.knob_values for cell in cells if cell.figure == "fig5"]
    assert {(knobs["num_prompts"], knobs["max_tokens"]) for knobs in windowed} == {(LEAST_TURNS * 16, SHORT_PROMPT)}


def test_what_runs_on_a_card_by_default():
    part = part_of(CARD.setting)
    assert (part.gpu, part.model, part.length_scale, part.time_scale) == (None, "qwen2.5-14b", 1.0, 1.0)
    assert part.most_tokens == MOST_TOKENS


def test_systems_that_prefill_nothing_are_refused():
    with refuses("system='ampd'"):
        run_cell(STUB, replace(first("fig6"), system="ampd"))
