"""How often a figure is repeated where nothing is asked: measured times vary, simulated ones, memory and accuracy do not."""

import pytest
from typer.testing import CliRunner

from engines.errors import UserError
from repro.cli.figure import FigureOptions, check_rates
from repro.cli.main import app
from repro.paths import LOCAL_FIGURES
from repro.reports.evidence import sources
from repro.reports.figures import DLLM_SERVE, FIGURES, MEASURED_RUNS, figure
from repro.runs.cell import Cell
from repro.runs.system import SYSTEMS, TUNE


@pytest.mark.parametrize(
    ("name", "repeats"),
    [
        ("fig2", {"cpu-tiny": 1, "rtx4090": 1, "l40s": 1}),
        ("fig3", {"cpu-tiny": MEASURED_RUNS, "rtx4090": 5}),
        ("fig6", {"cpu-tiny": 1}),
        ("fig7", {"cpu-tiny": MEASURED_RUNS, "rtx4090": 1, "l40s": 1}),
        ("fig8", {"cpu-tiny": MEASURED_RUNS, "rtx4090": 5, "l40s": 5}),
    ],
)
def test_measured_times_are_repeated(name, repeats):
    assert {view.platform.name: view.num_runs for view in FigureOptions().views(name)} == repeats
    assert {view.num_runs for view in FigureOptions(num_runs=5).views(name)} == {5}


@pytest.mark.parametrize("name", FIGURES)
def test_the_rates_that_are_asked_for_are_run(name):
    views = FigureOptions(request_rate=["0.3", "0.7"]).views(name)
    cells = [cell for view in views for cell in figure(name).load().cells(view)]
    own = [cell for view in FigureOptions().views(name) for cell in figure(name).load().cells(view)]
    if cells == own and cells:
        with pytest.raises(UserError, match=f"request_rate has no effect on {name}, which has "):
            check_rates(name, views, cells)
    elif cells:
        check_rates(name, views, cells)
        assert {cell.rate for cell in cells} - {None} <= {0.3, 0.7}


def test_which_figures_have_rates_of_their_own():
    for name in ("fig3", "fig4", "fig8", "table4", "fig2"):
        view = FigureOptions(request_rate=["0.3"]).views(name)[0]
        check_rates(name, [view], figure(name).load().cells(view))
    view = FigureOptions(request_rate=["0.3"]).views("fig6")[0]
    with pytest.raises(UserError, match="no axis of rates"):
        check_rates("fig6", [view], figure("fig6").load().cells(view))


def test_a_card_that_is_measured_is_repeated_too():
    (view,) = FigureOptions(platform=["rtx4090"], executor="torch").views("fig3")
    assert view.num_runs == MEASURED_RUNS
    assert {cell.comparison for cell in figure("fig3").load().cells(view)} == {"rates"}


def test_papers_have_folders_of_their_own_and_figures_go_where_the_runs_do(tmp_path):
    """Tables of one name: neither replaces the other, and none lands outside the folder that is given."""
    for name in ("table1", "ampd/table1"):
        result = CliRunner().invoke(app, ["reproduce", name, "--result-dir", str(tmp_path)])
        assert result.exit_code == 0, result.output
    made = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("table1-*.md")}
    assert made == {"figures/dllm-serve/table1-rtx4090.md", "figures/ampd/table1-h20x32.md"}
    assert FigureOptions().out_folder("laps/fig2") == LOCAL_FIGURES / "laps"
    assert FigureOptions(out_dir=tmp_path).out_folder("laps/fig2") == tmp_path


def test_the_cells_of_every_simulated_figure_may_be_composed():
    """One for each platform, system and set of knobs; the digest of the tables is in what their runs rest on."""
    kinds: dict[tuple[str, ...], Cell] = {}
    for name in FIGURES:
        for view in FigureOptions(cost="composed").views(name):
            for cell in figure(name).load().cells(view) if view.is_simulated else ():
                asked = view.applied(cell)
                kinds.setdefault((asked.platform, asked.system, *(knob for knob, _ in asked.knobs)), asked)
    assert {cell.platform for cell in kinds.values()} >= {"l40s", "rtx4090", "h20x32", "h200"}
    for cell in kinds.values():
        deployment, _ = SYSTEMS.get(cell.system).prepare(cell.without(TUNE))  # what a search tries is charged alike
        assert deployment.obtained in ("composed", "measured"), cell  # the planner's own time is measured


def test_a_composed_figure_has_files_of_its_own():
    (view,) = FigureOptions(platform=["l40s"], cost="composed", kernels="sglang").views("fig3")
    assert (view.obtained, view.stem) == ("composed", "l40s-composed-sglang")
    assert view.charged_options == ["--cost composed", "--kernels sglang"]
    (plain,) = FigureOptions(platform=["l40s"]).views("fig3")
    assert (plain.obtained, plain.stem, plain.charged_options) == ("composed", "l40s", [])
    (charged,) = FigureOptions(platform=["l40s"], cost="roofline").views("fig3")
    assert (charged.obtained, charged.stem) == ("simulated", "l40s-roofline")


def test_claims_are_judged_by_composed_steps_where_they_are_simulated():
    found = sources(DLLM_SERVE.entries, charged=(("cost", "composed"),))
    costs = {(source.view.is_simulated, cell.knob_values.get("cost")) for source in found for cell in source.cells}
    assert costs == {(True, "composed"), (False, None)}


def test_a_plain_picture_has_neither_title_nor_caption_and_the_next_one_has_both(tmp_path, unsaved, drawn):
    for words in (["--plain"], []):
        CliRunner().invoke(app, ["reproduce", "laps/fig2", *words, "--out-dir", str(tmp_path)], catch_exceptions=False)
    assert [figure._suptitle is None for figure in drawn] == [True, False]
    assert [figure._supxlabel is None for figure in drawn] == [True, False]
