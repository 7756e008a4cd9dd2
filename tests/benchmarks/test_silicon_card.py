"""Composed steps beside a card's: of the same schedule, and the committed table is what its runs give."""

import csv
from dataclasses import replace

import pytest
import silicon_card

from repro.gpu_suite.stages import scale_of, stages, title_of
from repro.paths import RESULTS
from repro.runs.store import parts_of

RUNS, TABLE = RESULTS / "h200" / "runs", RESULTS / "h200" / "composed-h200.csv"


@pytest.fixture(scope="module")
def committed() -> dict[tuple[str, str], dict[str, str]]:
    with TABLE.open(encoding="utf-8", newline="") as opened:
        return {(row["system"], row["requests"]): row for row in csv.DictReader(opened)}


@pytest.mark.parametrize("file", sorted(RUNS.glob("*_osc_*.gz")), ids=lambda file: file.name.rpartition("_")[2][:6])
def test_a_measured_run_is_simulated_on_its_own_schedule(committed, file, monkeypatch):
    monkeypatch.setattr(silicon_card, "FRAMEWORKS", ("vllm",))
    again, asked = silicon_card._again, []

    def counted(cell, facts):
        asked.append(cell)
        return again(cell, facts)

    monkeypatch.setattr(silicon_card, "_again", counted)
    parts = parts_of(file.read_bytes())
    # One framework's is enough: the others stand in for nothing that is asked here.
    monkeypatch.setattr(silicon_card, "Served", lambda **fields: fields)
    rows = list(silicon_card._served(parts))
    if not rows:  # failed, or taken apart
        assert not asked
        return
    (row,) = rows
    stored = committed[row["system"], str(row["requests"])]
    assert row["steps"] == row["simulated_steps"] == int(stored["steps"])
    for name in ("measured_tok_s", "vllm_tok_s", "datasheet_tok_s", "of_card"):
        assert row[name] == pytest.approx(float(stored[name]), rel=1e-3), name
    assert row["measured_tok_s"] < row["datasheet_tok_s"]


def test_every_system_served_is_in_the_table(committed):
    assert len(committed) == 14
    assert all(0 < float(row["of_card"]) < 1 for row in committed.values())


def test_block_diffusion_is_simulated_on_the_platform_of_its_card_and_model():
    (cell,) = [
        each.cell
        for each in stages(scale_of("h200"))
        if each.stage == "block" and title_of(each.cell) == "block-diffusion, sdar-8b"
    ]
    small = replace(cell, knobs=tuple({**cell.knob_values, "num_prompts": 8, "gen_length": 32}.items()))
    facts = {"model": "sdar-8b", "num_tokens": 50_000, "dataset": {"lengths": {"n": 8}}}
    (row,) = silicon_card._served_blocks(small, facts, 1000.0, 17)
    # What is left of a prompt opens a block: an answer has nine, of two forwards each.
    assert row.simulated_steps == 18
    assert row.datasheet_tok_s > row.vllm_tok_s == pytest.approx(1000.0 / row.of_card)
    assert not list(silicon_card._served_blocks(replace(small, platform="l40s"), facts, 1000.0, 17))
