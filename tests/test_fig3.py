from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from matplotlib.figure import Figure

import repro.paths
from engines.errors import UserError
from paper_figures import style
from paper_figures.dllm_serve import fig3
from repro.cell import Cell
from repro.figures import Rendered, figure
from repro.metrics import summarize
from repro.paper import load_figures
from repro.platforms import CPU_TINY, RTX4090, Platform
from repro.record import REQUEST_COLUMNS, STEP_COLUMNS, RunRecord
from repro.store import StoredRun
from repro.systems import SYSTEMS
from repro.validity import Validity

CPU = "A Processor 9000"
CALIBRATION = "rtx4090, fitted on one cell; another cell"
VALID = Validity(valid=True, reasons=())


def stored(cell: Cell, *, tok_s: float, gen_length: int = 64, n: int = 4, validity: Validity = VALID) -> StoredRun:
    """A run of ``n`` requests, all due at 0, that finish together when the throughput is ``tok_s``."""
    end = n * gen_length / tok_s
    requests: dict[str, list[Any]] = {column.name: [None] * n for column in REQUEST_COLUMNS}
    requests |= {
        "request_id": list(range(n)), "arrival_s": [0.0] * n, "finished_s": [end] * n, "prompt_len": [9] * n,
        "gen_length": [gen_length] * n, "status": ["ok"] * n,
    }  # fmt: skip
    steps: dict[str, list[Any]] = {column.name: [0] for column in STEP_COLUMNS}
    simulated = cell.executor == "roofline"
    steps |= {"duration_s": [end], "end_s": [end], "forward_s": [end if simulated else 0.75 * end]}
    record = RunRecord(
        requests=requests,
        steps=steps,
        manifest={
            "obtained": "simulated" if simulated else "measured",
            "calibration": CALIBRATION if simulated else None,
            "dataset": {"source": "embedded", "location": "datasets/x.yaml", "length_scale": 1.0},
            "facts": {"batch_size": cell.knob_values.get("batch_size", 3)} if cell.system != "dllm-serve" else {},
        },
    )
    return StoredRun(
        cell=replace(cell, knobs=(*cell.knobs, ("basis", "abc"))),
        record=record,
        summary=summarize(record),
        validity=validity,
        manifest={},
        provenance={"cpu": {"model": CPU, "count": 4, "usable": 2}, "gpu": None},
    )


def throughput(cell: Cell) -> float:
    """dLLM-Serve follows the load up to 0.3 (8 on the CPU) req/s; the others reach 20, or 10 at batch 1."""
    assert cell.rate is not None
    if cell.system == "dllm-serve":
        return min(cell.rate * 60, 8 * 60)
    return 10.0 if "batch_size" in cell.knob_values else 20.0


def runs_of(platform: Platform) -> list[StoredRun]:
    return [stored(cell, tok_s=throughput(cell)) for cell in fig3.cells(platform)]


def read_csv(rendered: Rendered) -> list[dict[str, str]]:
    (path,) = (file for file in rendered.files if file.suffix == ".csv")
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """The figures handed to ``style.save``, to look into them."""
    figures: list[Figure] = []
    save = style.save

    def keep(figure: Figure, out: Path, name: str) -> tuple[Path, Path]:
        figures.append(figure)
        return save(figure, out, name)

    monkeypatch.setattr(style, "save", keep)
    return figures


def panel(figure: Figure, title: str) -> Axes:
    (axes,) = (axes for axes in figure.axes if axes.get_title() == title)
    return axes


def lines(axes: Axes) -> dict[str, Any]:
    return {str(line.get_label()): line for line in axes.get_lines()}


def text_of(figure: Figure) -> str:
    """Title and caption, as one line."""
    return " ".join(" ".join(text.get_text() for text in (figure._suptitle, figure._supxlabel)).split())  # type: ignore[attr-defined]


def test_is_the_registered_figure() -> None:
    assert figure("fig3").load() is fig3
    assert figure("fig3").title == fig3.TITLE


def test_every_system_has_a_look_of_its_own() -> None:
    assert set(SYSTEMS) <= set(style.SYSTEMS)
    assert {name: SYSTEMS[name].title for name in SYSTEMS} == {name: style.SYSTEMS[name].title for name in SYSTEMS}
    looks = style.SYSTEMS.values()
    assert len({look.color for look in looks}) == len({look.marker for look in looks}) == len(looks)


def test_grid_on_the_cpu() -> None:
    cells = fig3.cells(CPU_TINY)
    assert len({cell.key for cell in cells}) == len(cells) == 3 * 2 * len(CPU_TINY.rates)
    assert {(cell.executor, cell.seed, cell.figure) for cell in cells} == {("torch", 0, "fig3")}
    assert {cell.rate for cell in cells} == set(CPU_TINY.rates)
    assert not any(cell.knobs for cell in cells)


def test_grid_on_the_papers_card_has_the_published_batch_of_one() -> None:
    cells = fig3.cells(RTX4090)
    assert len({cell.key for cell in cells}) == len(cells) == 3 * 3 * len(RTX4090.rates)
    assert {cell.executor for cell in cells} == {"roofline"}
    single = [cell for cell in cells if cell.knobs]
    assert {(cell.system, cell.knobs) for cell in single} == {("sparse-dllm", (("batch_size", 1),))}
    assert len(single) == 3 * len(RTX4090.rates)


def test_measured_figure(tmp_path: Path, drawn: list[Figure]) -> None:
    rendered = fig3.render(runs_of(CPU_TINY), CPU_TINY, tmp_path)
    assert [path.name for path in rendered.files] == ["fig3-cpu-tiny.png", "fig3-cpu-tiny.pdf", "fig3-cpu-tiny.csv"]
    assert [path.name for path in sorted(tmp_path.iterdir())] == sorted(path.name for path in rendered.files)

    (picture,) = drawn
    assert [axes.get_title() for axes in picture.axes] == ["LiveBench", "Burst", "OSC"]
    assert {axes.get_xlabel() for axes in picture.axes} == {"arrival rate (req/s)"}
    assert picture.axes[0].get_ylabel() == "throughput (tok/s)"
    for axes in picture.axes:
        found = lines(axes)
        assert list(found) == ["offered load", "dLLM-Serve", "Sparse-dLLM (largest static batch)"]
        ours = found["dLLM-Serve"]
        assert list(ours.get_xdata()) == list(CPU_TINY.rates)
        assert list(ours.get_ydata()) == pytest.approx([120, 240, 480, 480])
        assert (to_hex(ours.get_color()).upper(), ours.get_marker()) == ("#0072B2", "o")
        assert ours.get_fillstyle() == "full"
        load = found["offered load"]
        assert [y / x for x, y in zip(load.get_xdata(), load.get_ydata(), strict=True)] == pytest.approx([64, 64])
        assert axes.get_ylim()[1] == pytest.approx(1.15 * 480)  # the load goes on beyond: it is cut, not fitted
    (legend,) = picture.legends
    assert [text.get_text() for text in legend.get_texts()] == list(lines(picture.axes[0]))

    text = text_of(picture)
    assert f"All curves measured on {CPU}, 2 cores." in text
    assert (
        "LiveBench (embedded generator, lengths assumed, n = 4); Burst (embedded generator, lengths fitted, n = 4)"
        in text
    )
    assert "Largest static batch: LiveBench 3, Burst 3, OSC 3." in text
    assert "paper" not in text
    assert "simulated" not in text


def test_table_and_notes(tmp_path: Path) -> None:
    rendered = fig3.render(runs_of(CPU_TINY), CPU_TINY, tmp_path)
    assert [len(row) for row in rendered.rows] == [len(rendered.columns)] * 6
    assert rendered.rows[0] == ("LiveBench", "dLLM-Serve", "480.0", "8", "-", "measured", "yes")
    assert rendered.rows[1] == (
        "LiveBench",
        "Sparse-dLLM (largest static batch)",
        "20.0",
        "2",
        "24.00x",
        "measured",
        "yes",
    )
    notes = "\n".join(rendered.notes)
    assert "24.00x (LiveBench), 24.00x (Burst), 24.00x (OSC)" in notes
    assert "outside the model's forward (measured): dLLM-Serve 25.0 to 25.0 %" in notes
    assert "INVALID" not in notes
    assert "missing" not in notes
    assert "calibration" not in notes


def test_a_system_that_follows_the_load_is_not_called_saturated(tmp_path: Path) -> None:
    slow = replace(CPU_TINY, rates=(2.0, 4.0))
    rendered = fig3.render(runs_of(slow), slow, tmp_path)
    assert rendered.rows[0][2] == "240.0 (not saturated)"
    assert any(
        note.startswith("Not saturated at the highest rate") and "Burst dLLM-Serve" in note for note in rendered.notes
    )


def test_csv_of_the_papers_card(tmp_path: Path) -> None:
    rows = read_csv(fig3.render(runs_of(RTX4090), RTX4090, tmp_path))
    assert tuple(rows[0]) == fig3.CSV_COLUMNS
    ours = [row for row in rows if row["obtained"] != "paper"]
    assert len(ours) == len(fig3.cells(RTX4090))
    assert {row["obtained"] for row in ours} == {"simulated"}
    assert {(row["system"], row["batch_size"]) for row in ours} == {
        ("dllm-serve", ""), ("sparse-dllm", "1"), ("sparse-dllm", "3"),
    }  # fmt: skip
    first = ours[0]
    assert (first["dataset"], first["system"], first["rate_req_s"]) == ("livebench", "dllm-serve", "0.1")
    assert float(first["throughput_tok_s"]) == pytest.approx(6)
    assert float(first["mean_latency_s"]) == float(first["p50_latency_s"]) == pytest.approx(4 * 64 / 6)
    assert (first["p99_latency_s"], first["num_requests"], first["valid"]) == ("", "4", "true")
    assert float(first["outside_forward_share"]) == 0
    assert first["run_folder"].startswith("dllm-serve_livebench_rtx4090_roofline_r0.1_s0_")

    paper = [row for row in rows if row["obtained"] == "paper"]
    (entry,) = (entry for entry in load_figures("dllm-serve") if entry.id == "dllm-serve/fig3")
    printed = {name.lower(): value for name, value in entry.values["Burst_peak"].items()}
    assert {row["system"]: float(row["throughput_tok_s"]) for row in paper} == printed
    assert {(row["dataset"], row["rate_req_s"], row["run_folder"], row["valid"]) for row in paper} == {
        ("burst", "", "", "")
    }


def test_paper_values_are_hollow_and_only_on_the_papers_card(tmp_path: Path, drawn: list[Figure]) -> None:
    rendered = fig3.render(runs_of(RTX4090), RTX4090, tmp_path)
    (picture,) = drawn
    hollow = {label: line for label, line in lines(panel(picture, "Burst")).items() if "paper" in label}
    assert {label: list(line.get_ydata()) for label, line in hollow.items()} == {
        "dLLM-Serve (paper, peak)": [76.6],
        "Fast-dLLM (paper, peak)": [42.4],
    }
    for line in hollow.values():
        assert line.get_fillstyle() == "none"
        assert list(line.get_xdata()) == [max(RTX4090.rates)]
    for title in ("LiveBench", "OSC"):
        assert not any("paper" in label for label in lines(panel(picture, title)))
    assert "Sparse-dLLM (batch 1, as its published code)" in lines(panel(picture, "OSC"))
    text = text_of(picture)
    assert f"All curves simulated, each step charged to the roofline of {CALIBRATION}." in text
    assert "Hollow markers" in text
    assert [row[5] for row in rendered.rows[-2:]] == ["paper", "paper"]
    assert any("Paper, Burst: 1.81x over Fast-dLLM; that system was not run here" in note for note in rendered.notes)
    assert not any("outside the model's forward" in note for note in rendered.notes)


def test_invalid_runs_are_crossed_and_named(tmp_path: Path, drawn: list[Figure]) -> None:
    runs = runs_of(CPU_TINY)
    bad = next(i for i, run in enumerate(runs) if run.cell.system == "dllm-serve" and run.cell.rate == 8.0)
    runs[bad] = replace(
        runs[bad], validity=Validity(valid=False, reasons=("1 of 4 requests failed, the first with: x",))
    )
    rendered = fig3.render(runs, CPU_TINY, tmp_path)
    (picture,) = drawn
    found = lines(panel(picture, "LiveBench"))
    cross = found["dLLM-Serve, INVALID run"]
    assert (cross.get_marker(), list(cross.get_xdata()), list(cross.get_ydata())) == ("x", [8.0], [pytest.approx(480)])
    assert list(found["dLLM-Serve"].get_xdata()) == [2.0, 4.0, 16.0]
    assert "INVALID" not in "".join(lines(panel(picture, "Burst")))
    assert rendered.rows[0][-1] == "1 of 4 runs INVALID"
    assert rendered.notes[0] == f"INVALID: {runs[bad].cell.folder_name}: 1 of 4 requests failed, the first with: x"
    assert [row["valid"] for row in read_csv(rendered)].count("false") == 1


def test_a_series_without_a_valid_run_has_no_peak(tmp_path: Path) -> None:
    nothing = Validity(valid=False, reasons=("4 of 4 requests did not finish",))
    runs = []
    for run in runs_of(CPU_TINY):
        if run.cell.system == "sparse-dllm" and run.cell.dataset == "osc":
            run = replace(run, validity=nothing, summary={**run.summary, "throughput_tok_s": None})
        runs.append(run)
    rendered = fig3.render(runs, CPU_TINY, tmp_path)
    assert rendered.rows[-1][2:5] == ("-", "-", "-")
    assert sum(note.startswith("INVALID (nothing to draw)") for note in rendered.notes) == len(CPU_TINY.rates)
    assert sum(row["throughput_tok_s"] == "" for row in read_csv(rendered)) == len(CPU_TINY.rates)


def test_missing_runs_are_counted(tmp_path: Path) -> None:
    rendered = fig3.render(runs_of(CPU_TINY)[:-1], CPU_TINY, tmp_path)
    assert "1 of 24 runs are missing: OSC Sparse-dLLM (largest static batch) at 16 req/s" in rendered.notes


def test_a_panel_without_runs_says_so(tmp_path: Path, drawn: list[Figure]) -> None:
    fig3.render([run for run in runs_of(RTX4090) if run.cell.dataset == "osc"], RTX4090, tmp_path)
    (picture,) = drawn
    assert [text.get_text() for text in panel(picture, "Burst").texts] == ["no runs stored"]
    assert not list(panel(picture, "OSC").texts)
    assert len(lines(panel(picture, "OSC"))) == 4


def test_sources_and_bases_that_differ_are_told_apart(tmp_path: Path, drawn: list[Figure]) -> None:
    runs = runs_of(CPU_TINY)
    for i, run in enumerate(runs):
        if run.cell.dataset == "burst":
            dataset = {"source": "local", "location": "burstgpt/x.csv", "length_scale": 0.25}
            runs[i] = replace(run, record=run.record.with_manifest(dataset=dataset))
        if run.cell.system == "sparse-dllm":
            runs[i] = replace(runs[i], provenance={"cpu": {"model": "Another", "usable": 8}})
    fig3.render(runs, CPU_TINY, tmp_path)
    text = text_of(drawn[0])
    assert "Burst (local burstgpt/x.csv, lengths x 0.25, n = 4)" in text
    assert (
        f"dLLM-Serve: measured on {CPU}, 2 cores. Sparse-dLLM (largest static batch): measured on Another, 8 cores."
        in text
    )


def test_a_run_on_a_gpu_names_the_gpu(tmp_path: Path, drawn: list[Figure]) -> None:
    card = {"gpu": {"name": "NVIDIA H200"}, "cpu": {"model": CPU, "usable": 2}}
    cells = [replace(cell, executor="torch", knobs=(*cell.knobs, ("device", "cuda"))) for cell in fig3.cells(RTX4090)]
    fig3.render([replace(stored(cell, tok_s=5.0), provenance=card) for cell in cells], RTX4090, tmp_path)
    assert "All curves measured on NVIDIA H200." in text_of(drawn[0])


def test_held_out_errors_are_quoted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(repro.paths, "CALIBRATION", tmp_path / "calibration")
    runs = runs_of(RTX4090)

    def note() -> str:
        return fig3.render(runs, RTX4090, tmp_path).notes[-1]

    assert (
        note()
        == "No comparison of the rtx4090 calibration with values it was not fitted on is stored: run 'repro calibrate'."
    )
    report = tmp_path / "calibration" / "rtx4090-report.json"
    report.parent.mkdir()
    comparisons = [
        {"what": "a", "role": "held out", "error_percent": 5.0},
        {"what": "b", "role": "fitted", "error_percent": 0.01},
        {"what": "c", "role": "held out", "error_percent": None},
        {"what": "d", "role": "held out", "error_percent": -10.0},
    ]
    report.write_text(json.dumps({"comparisons": comparisons}))
    assert note() == "Simulated against stated values that rtx4090 was not fitted on: a +5.0 %; d -10.0 %."
    report.write_text(json.dumps({"held": []}))
    with pytest.raises(UserError, match=r"rtx4090-report\.json cannot be used"):
        note()


@pytest.mark.parametrize("runs", [[], "foreign"])
def test_refuses_what_is_not_the_figures(runs: Sequence[StoredRun] | str, tmp_path: Path) -> None:
    if runs == "foreign":
        cell = replace(fig3.cells(CPU_TINY)[0], rate=None)
        runs = [stored(cell, tok_s=1.0)]
    assert not isinstance(runs, str)
    with pytest.raises(UserError, match=r"has no runs|give runs of"):
        fig3.render(runs, CPU_TINY, tmp_path)


SCRIPT = """
import sys
from pathlib import Path
from test_fig3 import RTX4090, fig3, runs_of
fig3.render(runs_of(RTX4090), RTX4090, Path(sys.argv[1]))
"""


def test_same_bytes_in_another_process(tmp_path: Path) -> None:
    """Another hash seed, another day and another order of runs change nothing."""
    here = fig3.render(list(reversed(runs_of(RTX4090))), RTX4090, tmp_path / "here").files
    environment = {**os.environ, "PYTHONHASHSEED": "12345", "SOURCE_DATE_EPOCH": "1"}
    subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path / "there")], cwd=Path(__file__).parent, env=environment, check=True
    )
    for path in here:
        assert path.read_bytes() == (tmp_path / "there" / path.name).read_bytes(), path.name
