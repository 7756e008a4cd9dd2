"""What a cell is expected to take is simulated once per code, by datasheet peaks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from engines.hardware.catalogue import gpu
from engines.hardware.roofline import Calibration
from repro.gpu_suite import expected
from repro.gpu_suite.expected import PREPARATION_S, expected_seconds, simulated
from repro.runs.cell import Cell


def cell(platform: str = "h200", **knobs: int | str) -> Cell:
    return Cell(
        system="dllm-serve",
        dataset="osc",
        platform=platform,
        executor="torch",
        rate=None,
        seed=0,
        knobs=(("num_prompts", 2), ("gen_length", 32), ("steps", 32), ("weights", "random"), *knobs.items()),
    )


def test_what_was_simulated_is_not_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = tmp_path / "local" / "expected.json"
    cells = [cell(), cell(max_num_seqs=1)]
    first = expected_seconds(cells, cache)
    assert all(seconds > PREPARATION_S for seconds in first)
    assert first[0] < first[1]
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["expected.json"]

    stored = json.loads(cache.read_text())
    with monkeypatch.context() as patch:
        patch.setattr(expected, "Sweep", None)
        assert expected_seconds(cells, cache) == first
        assert expected_seconds([cells[1]], cache) == first[1:]
        # By other code it is another simulation.
        cache.write_text(json.dumps({f"{key.split()[0]} 0": seconds for key, seconds in stored.items()}))
        with pytest.raises(TypeError):
            expected_seconds(cells, cache)
    cache.write_text("[1")
    assert expected_seconds(cells, cache) == first
    assert json.loads(cache.read_text()) == stored


def test_a_stored_calibration_changes_nothing() -> None:
    for name in ("h200", "l40s"):
        deployment = simulated(cell(name)).deployment
        assert deployment.calibration == Calibration.datasheet(gpu(name))  # type: ignore[attr-defined]


def test_what_only_measuring_knows_is_left_out() -> None:
    knobs = simulated(cell(profile_every=7)).cell.knob_values
    assert not knobs.keys() & {"weights", "profile_every"}
    assert knobs["num_prompts"] == 2
