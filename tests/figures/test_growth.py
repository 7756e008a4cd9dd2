"""Growth tables: what varies on each axis, slopes, memory by logit budget, and how simulated numbers are labelled."""

from dataclasses import replace
from typing import Any

import pytest
from support.cells import CPU_TINY, H200, L40S, RTX4090
from support.stored_runs import FAILED, changed, read_csv, runs_of, text_of

from paper_figures.dllm_serve import growth
from repro.reports.figures import View
from repro.runs.cell import Cell
from repro.runs.store import StoredRun

pytestmark = pytest.mark.usefixtures("unsaved")

CPU_VIEW = View(platform=CPU_TINY, reading="efficient")
H200_VIEW = View(platform=H200, reading="published")
ASSUMED_VIEW = replace(H200_VIEW, knobs=(("cost", "roofline"),))


def speed(cell: Cell) -> float:
    """tok/s ~ (requests at once) ^ 0.5 / (tokens of a request), nothing else."""
    knobs: dict[str, Any] = cell.knob_values
    total = knobs["input_len"] + knobs["gen_length"]
    return 1000 * knobs.get("max_num_seqs", 1) ** 0.5 / total


def planned(run: StoredRun, **measured: int) -> StoredRun:
    rows = int(run.cell.knob_values.get("max_num_logits") or 2048)
    plan = {"weights_bytes": 5, "activation_bytes": 7, "logits_bytes": 1000 * rows, "kv_bytes": 11}
    calibration = "h200, uncalibrated: datasheet peaks" if run.record.obtained == "simulated" else None
    facts = {"memory_plan": plan, "kv_rows": 3, **measured}
    return changed(run, record=run.record.with_manifest(facts=facts, calibration=calibration))


@pytest.mark.parametrize("where", [CPU_TINY, H200, RTX4090, L40S], ids=lambda where: where.name)
def test_every_value_fits_the_platform(where):
    view = View(platform=where, reading="efficient")
    cells = growth.FIGURE.cells(view)
    assert len({cell.key for cell in cells}) == len(cells)
    for cell in cells:
        knobs: dict[str, Any] = cell.knob_values
        assert cell.rate is None
        assert knobs["gen_length"] == knobs["steps"]
        assert 0 < knobs["input_len"] + knobs["gen_length"] <= view.dllm.max_model_len
        assert knobs.get("max_num_seqs", 1) <= view.dllm.max_num_seqs
        assert knobs.get("max_num_logits", 1) <= view.dllm.max_num_batched_tokens


def test_concurrency_is_as_many_requests_as_may_run():
    cells = [cell for cell in growth.FIGURE.cells(H200_VIEW) if "max_num_seqs" in cell.knob_values]
    assert [cell.knob_values["max_num_seqs"] for cell in cells] == [1, 2, 4, 8, 16, 32, 64, 128, 256]
    assert all(cell.knob_values["num_prompts"] == cell.knob_values["max_num_seqs"] for cell in cells)


def test_slopes_are_those_of_the_law(tmp_path, drawn):
    runs = [planned(run) for run in runs_of(growth.FIGURE.cells(H200_VIEW), speed)]
    rendered = growth.FIGURE.render(runs, H200_VIEW, tmp_path)
    rows = [dict(zip(rendered.columns, row, strict=True)) for row in rendered.rows]
    last = {row["axis"]: row for row in rows}
    assert last["concurrency"]["exponent"] == "-0.50"
    assert last["total_len"]["exponent"] == "+1.00"
    assert last["retention_ratio"]["exponent"] == "+0.00"
    assert last["max_num_logits"]["logits exponent"] == "+1.00"
    assert last["concurrency"]["logits exponent"] == "+0.00"
    assert float(last["max_num_logits"]["logits MB"]) == float(last["max_num_logits"]["value"]) / 1000
    assert {row["axis"]: row["exponent"] for row in reversed(rows)} == dict.fromkeys(last, "-")
    assert [axes.get_xlabel() for axes in drawn[0].axes] == [axis.label for axis in growth.AXES]


def test_simulated_without_calibration_is_said_everywhere(tmp_path, drawn):
    cells = [ASSUMED_VIEW.applied(cell) for cell in growth.FIGURE.cells(ASSUMED_VIEW)]
    rendered = growth.FIGURE.render([planned(run) for run in runs_of(cells, speed)], ASSUMED_VIEW, tmp_path)
    assert {row["obtained"] for row in read_csv(rendered)} == {"simulated, uncalibrated"}
    assert {row[-2] for row in rendered.rows} == {"simulated, uncalibrated"}
    assert "uncalibrated" in text_of(drawn[0])
    assert any(note.startswith("Uncalibrated: h200") for note in rendered.notes)
    assert "uncalibrated" in (tmp_path / f"growth-{ASSUMED_VIEW.stem}.md").read_text()


def test_measured_memory_replaces_the_planned(tmp_path):
    runs = runs_of(growth.FIGURE.cells(CPU_VIEW), speed)
    rendered = growth.FIGURE.render(
        [planned(run, measured_logits_bytes=123, measured_activation_bytes=45) for run in runs], CPU_VIEW, tmp_path
    )
    rows = read_csv(rendered)
    assert {(row["logits_bytes"], row["activation_bytes"], row["weights_bytes"], row["obtained"]) for row in rows} == {
        ("123", "45", "5", "measured")
    }


def test_missing_and_invalid_points_are_named(tmp_path):
    runs = [planned(run) for run in runs_of(growth.FIGURE.cells(H200_VIEW), speed)]
    broken = [changed(runs[0], validity=FAILED), *runs[2:]]
    rendered = growth.FIGURE.render(broken, H200_VIEW, tmp_path)
    assert rendered.rows[0][2:5] == ("-", "-", "-")
    assert rendered.rows[0][-1] == "1 of 1 runs INVALID"
    assert rendered.rows[1][1] == "4"
    assert rendered.rows[1][4] == "-", "a slope needs a first point"
    assert any(note.startswith("1 of 23 points are missing: concurrency 2") for note in rendered.notes)


def test_a_measured_view_of_a_card_has_files_of_its_own(tmp_path):
    """With weights that the view names, which every cell then has."""
    view = View(
        platform=replace(RTX4090, executor="torch"),
        reading="efficient",
        knobs=(("weights", "random"), ("num_prompts", 99)),
    )
    cells = [view.applied(cell) for cell in growth.FIGURE.cells(view)]
    assert {cell.knob_values["weights"] for cell in cells} == {"random"}
    assert 99 not in {cell.knob_values["num_prompts"] for cell in cells}, "the figure's own number goes first"
    rendered = growth.FIGURE.render([planned(run) for run in runs_of(cells, speed)], view, tmp_path)
    assert {path.stem for path in rendered.files} == {"growth-rtx4090-measured"}
    assert not any("missing" in note for note in rendered.notes)
    assert any("random weights" in note for note in rendered.notes)


@pytest.mark.parametrize(
    ("first", "last", "slope"),
    [
        ((1, 2.0), (8, 16.0), 1.0),
        ((2, 8.0), (4, 2.0), -2.0),
        ((2.0, 4.0), (8.0, 64.0), 2.0),
        ((8.0, 64.0), (2.0, 4.0), 2.0),
        ((1, 2.0), (1, 2.0), None),
        ((2.0, 9.0), (2.0, 4.0), None),
        *(((1, low), (2, 1.0), None) for low in (None, 0.0, -1.0)),
        *(((1, 4.0), (2, high), None) for high in (None, 0.0, -1.0)),
    ],
)
def test_exponent(first, last, slope):
    assert growth.exponent(first, last) == (None if slope is None else pytest.approx(slope))
