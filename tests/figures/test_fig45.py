"""Figures 4 and 5, which draw the runs of Figure 3."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from support.cells import CPU_TINY, L40S, RTX4090
from support.stored_runs import FAILED, caption_of, changed, drawn_lines, read_csv, runs_of

from paper_figures.dllm_serve import fig3, fig4, fig5
from repro.reports.figures import View
from repro.runs.cell import Cell

pytestmark = pytest.mark.usefixtures("unsaved")

CPU_VIEW = View(platform=CPU_TINY, reading="efficient")
CARD_VIEW = View(platform=RTX4090, reading="published")
SPEED = {"dllm-serve": 80.0, "fast-dllm": 40.0, "dllm-cache": 16.0, "sparse-dllm": 20.0}


def speed(cell: Cell) -> float:
    return SPEED[cell.system]


def test_printed_latencies_are_not_drawn_beside_those_of_another_number_of_requests(tmp_path, drawn):
    for where in (RTX4090, L40S):
        view = View(platform=where, reading="efficient", knobs=(("num_prompts", 300),))
        rendered = fig4.FIGURE.render(runs_of(fig4.FIGURE.cells(view), speed), view, tmp_path)
        assert not any("paper" in label for axes in drawn[-1].axes for label in drawn_lines(axes))
        assert not any(row["obtained"] == "paper" for row in read_csv(rendered))
        assert "of other numbers of requests, are not drawn" in caption_of(rendered)


def test_latency_findings():
    runs = runs_of(fig4.FIGURE.cells(CARD_VIEW), speed)
    broken = [changed(r, validity=FAILED) if r.cell.system == "dllm-serve" else r for r in runs]
    assert fig4.FIGURE.findings(broken, CARD_VIEW) == []
    assert fig4.FIGURE.findings(runs_of(fig4.FIGURE.cells(CPU_VIEW), speed), CPU_VIEW) == []


def test_jitter_is_the_best_baselines_spread_over_ours(tmp_path, drawn):
    # Latencies end * {1/4, 2/4, 3/4, 1} have span 0.75 end; spreads go as 1 / speed.
    runs = runs_of(fig5.FIGURE.cells(CARD_VIEW), speed, stretch=0.75)
    rendered = fig5.FIGURE.render(runs, CARD_VIEW, tmp_path)
    rows = [row for row in read_csv(rendered) if row["obtained"] != "paper"]
    assert {(row["best_baseline"], round(float(row["gain"]), 9)) for row in rows} == {("fast-dllm", 2.0)}
    (span,) = (row for row in rows if (row["dataset"], row["measure"]) == ("burst", "span_latency_s"))
    assert float(span["dllm_serve_s"]) == pytest.approx(0.75 * 256 / 80)
    paper = {row["measure"]: float(row["gain"]) for row in read_csv(rendered) if row["obtained"] == "paper"}
    assert paper == {"std_latency_s": pytest.approx(1 / 0.44), "span_latency_s": pytest.approx(1 / 0.47)}
    heights = [bar.get_height() for container in drawn[0].axes[0].containers for bar in container]
    assert heights == pytest.approx([2.0] * 6)


def test_jitter_without_a_valid_baseline_says_so(tmp_path):
    runs = runs_of(fig5.FIGURE.cells(CPU_VIEW), speed, stretch=0.5)
    broken = [changed(r, validity=FAILED) if r.cell.system != "dllm-serve" else r for r in runs]
    rendered = fig5.FIGURE.render(broken, CPU_VIEW, tmp_path)
    columns = ("best_baseline", "best_baseline_s", "gain")
    assert {tuple(row[name] for name in columns) for row in read_csv(rendered)} == {("", "", "")}
    assert sum(note.startswith("INVALID") for note in rendered.notes) == 9


def test_a_logarithmic_axis_has_geometric_means_whose_intervals_stay_above_zero(tmp_path, drawn):
    """Latencies of 4, 40 and 400 s: Student's interval of their mean begins below -390 s, that of their logarithms above 0."""
    view = replace(CPU_VIEW, num_runs=3)
    runs = runs_of(fig4.FIGURE.cells(view), lambda cell: 64 / 10**cell.seed)
    fig4.FIGURE.render(runs, view, tmp_path)
    line = next(c for c in drawn[0].axes[0].containers if c.get_label() == "dLLM-Serve")
    assert list(line[0].get_ydata()) == pytest.approx([40.0] * len(CPU_VIEW.dllm.rates))
    assert all(segment[:, 1].min() > 0 for segment in line[2][0].get_segments())
    assert drawn[0].axes[0].get_ylim()[0] > 0
    assert {axes.get_yscale() for axes in drawn[0].axes} == {"log"}


def test_panels_have_rates_at_their_own_knees_between_the_same_ends():
    for where in (RTX4090, L40S):
        part = View(platform=where, reading="published").dllm
        own = [part.rates_of(dataset) for dataset in ("livebench", "burst", "osc")]
        assert len(set(own)) == 3
        assert all(sorted(set(rates)) == list(rates) for rates in own)
        assert {(rates[0], rates[-1]) for rates in own} == {(part.rates[0], part.rates[-1])}
    asked = View(platform=L40S, reading="published", rates=(0.3, 0.7))
    assert {cell.rate for cell in fig3.FIGURE.cells(asked)} == {0.3, 0.7}


SCRIPT = """
import sys
from pathlib import Path
from test_fig45 import CARD_VIEW, fig5, speed
from support.stored_runs import runs_of
fig5.FIGURE.render(runs_of(fig5.FIGURE.cells(CARD_VIEW), speed, stretch=0.75), CARD_VIEW, Path(sys.argv[1]))
"""


def test_same_bytes_in_another_process(tmp_path, monkeypatch):
    """Another hash seed, another day and another order of runs change nothing."""
    monkeypatch.undo()  # the files are what is looked into
    runs = runs_of(fig5.FIGURE.cells(CARD_VIEW), speed, stretch=0.75)
    here = fig5.FIGURE.render(runs[::-1], CARD_VIEW, tmp_path / "here").files
    path = os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)])
    environment = {**os.environ, "PYTHONPATH": path, "PYTHONHASHSEED": "12345", "SOURCE_DATE_EPOCH": "1"}
    command = [sys.executable, "-c", SCRIPT, str(tmp_path / "there")]
    subprocess.run(command, cwd=Path(__file__).parent, env=environment, check=True)
    for path in here:
        assert path.read_bytes() == (tmp_path / "there" / path.name).read_bytes(), path.name
