"""What a cell is expected to take is simulated once per code."""

import json
from dataclasses import replace

import pytest
from support.cells import a_cell

from engines.cost.roofline import Calibration, gpu
from repro.gpu_suite import expected as expecting
from repro.gpu_suite.expected import PREPARATION_S, expected, simulated
from repro.runs.cell import Cell
from repro.runs.family import served_per_second


def cell(platform: str = "h200", **knobs: int | str) -> Cell:
    return a_cell(platform=platform, num_prompts=2, gen_length=32, steps=32, weights="random", **knobs)


def test_what_was_simulated_is_not_again(tmp_path, monkeypatch):
    cache = tmp_path / "local" / "expected.json"
    cells = [cell(), cell(max_num_seqs=1)]
    first = expected(cells, cache)
    assert all(each.seconds > PREPARATION_S for each in first)
    assert first[0].seconds < first[1].seconds
    # One request at a time makes fewer tokens a second than two.
    assert first[0].throughput_tok_s > first[1].throughput_tok_s > 0
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["expected.json"]

    stored = json.loads(cache.read_text())
    with monkeypatch.context() as patch:
        patch.setattr(expecting, "Sweep", None)
        assert expected(cells, cache) == first
        assert expected([cells[1]], cache) == first[1:]
        # By other code it is another simulation.
        cache.write_text(json.dumps({f"{key.split()[0]} 0": told for key, told in stored.items()}))
        with pytest.raises(TypeError):
            expected(cells, cache)
    cache.write_text("[1")
    assert expected(cells, cache) == first
    assert json.loads(cache.read_text()) == stored


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
