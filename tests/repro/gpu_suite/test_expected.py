"""What a cell is expected to take is simulated once per code."""

from dataclasses import replace
from pathlib import Path

from support.cells import a_cell

from engines.cost.roofline import Calibration, gpu
from repro.gpu_suite.suite import PREPARATION_S, predict, simulated
from repro.runs.cell import Cell
from repro.runs.family import served_per_second
from repro.runs.store import SUFFIX, Store


def cell(platform: str = "h200", **knobs: int | str) -> Cell:
    return a_cell(platform=platform, num_prompts=2, gen_length=32, steps=32, weights="random", **knobs)


def written(folder: Path) -> dict[str, int]:
    """When each run was stored."""
    return {path.name: path.stat().st_mtime_ns for path in folder.glob(f"*{SUFFIX}")}


def test_what_was_simulated_is_not_again(tmp_path):
    store = Store(tmp_path)
    cells = [cell(), cell(max_num_seqs=1)]
    first = predict(cells, store)
    assert all(each.seconds > PREPARATION_S for each in first)
    assert first[0].seconds < first[1].seconds
    # One request at a time makes fewer tokens a second than two.
    assert first[0].throughput_tok_s > first[1].throughput_tok_s > 0
    stored = written(tmp_path)
    assert predict(cells, store) == first
    assert predict([cells[1]], store) == first[1:]
    assert written(tmp_path) == stored
    assert len(stored) == 2


def test_a_stored_calibration_changes_nothing():
    for name in ("h200", "l40s"):
        deployment = simulated(cell(name)).deployment
        assert deployment.calibration == Calibration.datasheet(gpu(name))


def test_what_a_calibration_predicts_is_its_rooflines():
    """Composed steps know nothing of it."""
    slow = Calibration.datasheet(gpu("h200"))
    speeds = [
        served_per_second(simulated(cell(), each).run(), "output_len")
        for each in (slow, replace(slow, matmul_efficiency=0.25, bandwidth_efficiency=0.25))
    ]
    assert speeds[0] > 2 * speeds[1]


def test_what_only_measuring_knows_is_left_out():
    knobs = simulated(cell(profile_every=7)).cell.knob_values
    assert not knobs.keys() & {"weights", "profile_every"}
    assert knobs["num_prompts"] == 2


def test_what_is_expected_of_a_baseline_is_of_our_implementation():
    """Which is what the card runs: published code is slower."""
    assert simulated(replace(cell(), system="fast-dllm")).cell.knob_values["reading"] == "efficient"
    assert "reading" not in simulated(cell()).cell.knob_values
