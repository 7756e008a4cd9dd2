import json
from dataclasses import replace

import pytest
from support.cells import CPU_TINY, RTX4090
from support.stored_runs import CPU, caption_of, changed, drawn_lines, panel, read_csv, runs_of, stored, text_of

import repro.paths
from engines.errors import UserError
from paper_figures.common import style
from paper_figures.dllm_serve import fig3, rates
from paper_figures.dllm_serve.comparison import SYSTEMS as COMPARED
from repro.families.platforms import DllmPart
from repro.reports.figures import View
from repro.runs.cell import Cell
from repro.runs.family import Validity
from repro.runs.store import StoredRun
from repro.runs.system import SYSTEMS

pytestmark = pytest.mark.usefixtures("unsaved")

RATES = (2.0, 4.0, 8.0, 16.0)
CPU_VIEW = View(platform=CPU_TINY.with_part(DllmPart, rates=RATES), reading="efficient")
CARD_VIEW = View(platform=RTX4090, reading="published")


def throughput(cell: Cell) -> float:
    """dLLM-Serve follows the load up to 0.3 (8 on the CPU) req/s; the others reach 20."""
    assert cell.rate is not None
    return min(cell.rate * 60, 8 * 60) if cell.system == "dllm-serve" else 20.0


def made(view: View) -> list[StoredRun]:
    return runs_of(fig3.FIGURE.cells(view), throughput)


def test_every_system_has_a_look_of_its_own():
    looks = [style.system_look(name) for name in SYSTEMS]
    assert [look.title for look in looks] == [SYSTEMS.get(name).title for name in SYSTEMS]
    for family in ("dllm", "ar"):
        own = [style.system_look(name) for name in SYSTEMS if SYSTEMS.get(name).family.name == family]
        assert len({(look.color, look.marker) for look in own}) == len(own) > 3
    shown = [style.system_look(name) for name in COMPARED]
    assert len({look.color for look in shown}) == len({look.marker for look in shown}) == len(shown)


def test_grid_on_the_cpu():
    cells = fig3.FIGURE.cells(CPU_VIEW)
    assert len({cell.key for cell in cells}) == len(cells) == 3 * len(COMPARED) * len(RATES)
    assert {(cell.executor, cell.seed, cell.figure) for cell in cells} == {("torch", 0, "fig3")}
    assert {cell.rate for cell in cells} == set(RATES)
    assert {(cell.rate, cell.knobs) for cell in cells} == {
        (rate, (("comparison", "rates"), ("num_prompts", n))) for rate, n in zip(RATES, (8, 8, 11, 22), strict=True)
    }
    few = replace(CPU_VIEW, knobs=(("num_prompts", 3),))
    assert {few.applied(cell).knob_values["num_prompts"] for cell in fig3.FIGURE.cells(few)} == {3}
    policy = fig3.FIGURE.cells(replace(CPU_VIEW, reading="policy"))
    assert {cell.comparison for cell in policy} == {"rates-policy"}
    alone = fig3.FIGURE.cells(replace(CPU_VIEW, is_grouped=False))
    assert not any(cell.comparison for cell in alone)


def test_a_system_without_a_valid_run_has_no_peak(tmp_path):
    nothing = Validity(valid=False, reasons=("4 of 4 requests did not finish",))
    runs = []
    for run in made(CPU_VIEW):
        if run.cell.system == "dllm-cache" and run.cell.dataset == "osc":
            run = changed(run, validity=nothing, summary={**run.summary, "throughput_tok_s": None})
        runs.append(run)
    rendered = fig3.FIGURE.render(runs, CPU_VIEW, tmp_path)
    at = rendered.columns.index("dLLM-Cache")
    assert {row[at] for row in rendered.rows if row[0].startswith("OSC")} == {"-"}
    assert sum(note.startswith("INVALID") for note in rendered.notes) == len(RATES)
    assert sum(row["throughput_tok_s"] == "" for row in read_csv(rendered)) == len(RATES)


def test_missing_runs_are_counted_and_told_by_what_points_differ_in(tmp_path):
    rendered = fig3.FIGURE.render(made(CPU_VIEW)[:-1], CPU_VIEW, tmp_path)
    assert "1 of 48 points are missing: sparse-dllm osc at 16/s num_prompts=22" in rendered.notes
    view = replace(CPU_VIEW, num_runs=2)
    rendered = fig3.FIGURE.render(made(view)[4:-1], view, tmp_path)
    (note,) = (note for note in rendered.notes if "missing" in note)
    assert note.startswith("3 of 48 points are missing: dllm-serve livebench at 2/s num_prompts=8, "), (
        "one repeat lacks"
    )


def test_a_panel_without_runs_says_so(tmp_path, drawn):
    fig3.FIGURE.render([run for run in made(CARD_VIEW) if run.cell.dataset == "osc"], CARD_VIEW, tmp_path)
    (picture,) = drawn
    assert [text.get_text() for text in panel(picture, "Burst").texts] == ["no runs stored"]
    assert not list(panel(picture, "OSC").texts)
    assert len(drawn_lines(panel(picture, "OSC"))) == 5


def test_sources_and_bases_that_differ_are_told_apart(tmp_path, drawn):
    runs = made(CPU_VIEW)
    for i, run in enumerate(runs):
        if run.cell.dataset == "burst":
            dataset = {"source": "local", "location": "burstgpt/x.csv", "length_scale": 0.25}
            runs[i] = changed(run, record=run.record.with_manifest(dataset=dataset))
        if run.cell.system != "dllm-serve":
            runs[i] = changed(runs[i], provenance={"cpu": {"model": "Another", "usable": 8}})
    text = caption_of(fig3.FIGURE.render(runs, CPU_VIEW, tmp_path))
    assert f"measured: {CPU}, 2 cores and Another, 8 cores; embedded tiny LLaDA" in text_of(drawn[0])
    assert "Burst (local burstgpt/x.csv, prompts cut to lengths x 0.25, n = 4)" in text
    assert (
        f"dLLM-Serve: measured on {CPU}, 2 cores. Fast-dLLM, dLLM-Cache, Sparse-dLLM: measured on Another, 8 cores."
        in text
    )


def test_a_run_on_a_gpu_names_the_gpu(tmp_path, drawn):
    card = {"gpu": {"name": "NVIDIA H200"}, "cpu": {"model": CPU, "usable": 2}}
    cells = [
        replace(cell, executor="torch", knobs=(*cell.knobs, ("device", "cuda")))
        for cell in fig3.FIGURE.cells(CARD_VIEW)
    ]
    runs = [changed(stored(cell, tok_s=5.0), provenance=card) for cell in cells]
    view = replace(CARD_VIEW, platform=replace(RTX4090, executor="torch"))
    assert "All runs measured on NVIDIA H200." in caption_of(fig3.FIGURE.render(runs, view, tmp_path))
    assert "measured: NVIDIA H200; llada-8b" in text_of(drawn[0])


def test_errors_of_predictions_are_quoted(tmp_path, monkeypatch):
    monkeypatch.setattr(repro.paths, "CALIBRATION", tmp_path / "calibration")
    fitted = replace(CARD_VIEW, knobs=(("cost", "roofline"),))
    runs = runs_of([fitted.applied(cell) for cell in fig3.FIGURE.cells(fitted)], throughput)

    def note() -> str:
        (found,) = (note for note in fig3.FIGURE.render(runs, fitted, tmp_path).notes if "stated numbers" in note)
        return found

    assert (
        note()
        == "No comparison of the rtx4090 calibration with stated numbers is stored: run 'repro calibrate --platform rtx4090 --keep'."
    )
    report = tmp_path / "calibration" / "rtx4090-report.json"
    report.parent.mkdir()
    comparisons = [
        {"claim": "a", "role": "prediction", "error_percent": 5.0},
        {"claim": "b", "role": "fitted", "error_percent": 0.01},
        {"claim": "c", "role": "prediction", "error_percent": None},
        {"claim": "d", "role": "prediction", "error_percent": -10.0},
        {"claim": "e", "role": "implied by the fit", "error_percent": 50.0},
    ]
    medians = {"throughputs": {"count": 2, "median_percent": 7.5}}
    report.write_text(json.dumps({"schema_version": 4, "comparisons": comparisons, "medians": medians}))
    assert note() == (
        "Predictions of rtx4090 against stated numbers, median absolute error: 7.5 % over 2 throughputs; worst d -10 % "
        "(results/calibration/rtx4090-report.json)."
    )
    report.write_text(json.dumps({"held": []}))
    with pytest.raises(UserError, match=r"rtx4090-report\.json cannot be used"):
        note()


@pytest.mark.parametrize("runs", [[], "foreign"])
def test_refuses_what_is_not_the_figures(runs, tmp_path):
    if runs == "foreign":
        cell = replace(fig3.FIGURE.cells(CPU_VIEW)[0], rate=None)
        runs = [stored(cell, tok_s=1.0)]
    assert not isinstance(runs, str)
    with pytest.raises(UserError, match=r"has no runs|give runs of"):
        fig3.FIGURE.render(runs, CPU_VIEW, tmp_path)


def test_findings_answer_known_claims_on_the_papers_card_only():
    for view in (CPU_VIEW, replace(CARD_VIEW, reading="efficient")):
        assert fig3.FIGURE.findings(made(view), view) == []
    slow = runs_of(fig3.FIGURE.cells(CARD_VIEW), lambda cell: 10.0 if cell.system == "dllm-serve" else 20.0)
    (ranks,) = (f.value for f in fig3.FIGURE.findings(slow, CARD_VIEW) if f.claim == "dllm-serve-best-tput")
    assert ranks == (4, 4, 4)


def test_rates_too_near_to_a_named_one_have_no_name():
    assert rates._tick_names([0.09, 0.14, 0.32, 0.5]) == ["", "0.14", "0.32", "0.5"]
