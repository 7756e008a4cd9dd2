"""The table of what every compared configuration solves, and that what reads it reads what was written."""

import pytest
from support.cells import CPU_TINY
from support.stored_runs import FAILED, changed, read_csv, stored

from paper_figures.dllm_serve import accuracy
from repro.reports.figures import View, accuracies, at_dense_accuracy, configuration_of
from repro.runs.cell import Cell
from repro.runs.store import StoredRun

VIEW = View(platform=CPU_TINY, reading="efficient")
N = 300


def share_of(cell: Cell) -> float:
    """What is kept is solved; a system with a rule of its own solves all."""
    ratio = cell.knob_values.get("retention_ratio")
    return 1.0 if ratio is None else float(ratio)


def graded(cell: Cell) -> StoredRun:
    run, k = stored(cell, tok_s=100.0, n=N), round(share_of(cell) * N)
    record = run.record.with_columns("requests", correct=[True] * k + [False] * (N - k), correct_strict=[False] * N)
    return changed(run, record=record)


def test_what_is_written_is_what_figures_at_equal_accuracy_read(tmp_path):
    runs = [graded(cell) for cell in accuracy.FIGURE.cells(VIEW)]
    rendered = accuracy.FIGURE.render(runs, VIEW, tmp_path)
    written = next(path for path in rendered.files if path.suffix == ".csv")
    table = accuracies(written)
    for cell in accuracy.FIGURE.cells(VIEW):
        own = configuration_of(cell.system, cell.knob_values)
        assert own is not None
        assert table[own.contender, own.rule, cell.dataset].share == pytest.approx(share_of(cell), abs=0.5 / N)
    # 294 of 300 are below what the interval of 300 leaves, 296.2.
    assert dict(at_dense_accuracy("sparse-dllm", table).knobs) == {"retention_ratio": 1.0}
    assert rendered.notes[0].startswith("The least that answers as the model without a cache does: dLLM-Serve 100 %")
    assert {row["is_dense"] for row in read_csv(rendered) if row["rule"] == "98 % of the context"} == {"false"}
    by_name = {(row[0], row[1]): row for row in rendered.rows}
    assert by_name["Sparse-dLLM", "50 % of the context"][2:5] == ("50.0 [44.4, 55.6]", "50.0 [44.4, 55.6]", "no")
    assert by_name["LLaDA", "no cache"][4] == "yes"


def test_an_invalid_run_answers_nothing(tmp_path):
    runs = [graded(cell) for cell in accuracy.FIGURE.cells(VIEW)]
    broken = [changed(run, validity=FAILED) if run.cell.system == "llada" else run for run in runs]
    rendered = accuracy.FIGURE.render(broken, VIEW, tmp_path)
    assert rendered.rows[-1][2:4] == ("-", "-")
    assert {row[4] for row in rendered.rows} == {"-", "no"}
