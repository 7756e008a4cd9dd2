"""Whether committed results are those that their tables of runs give: all of them, and with faults planted."""

import csv
import io
import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from support.tables import data_beside, edit
from typer.testing import CliRunner

from engines.errors import UserError
from paper_figures.common.runs import Measure
from repro import paths
from repro.checks import results as checks
from repro.checks.results import WITHOUT_RUNS, Checked, check_reports, check_results, judged_text, redraw, remake_sample
from repro.cli.main import app
from repro.families.cost import load_calibration
from repro.files import csv_text, sealed
from repro.paths import RESULTS
from repro.reports.claims import Finding, judge_all, load_claims
from repro.reports.figures import BLOCK, PAPERS
from repro.reports.fitting import PROTOCOLS, medians, report, report_path, write_report
from repro.reports.run_table import read_table, tables_in

CASES = data_beside(__file__, "cases")

COPIED = (
    *(f"h20-llada2-mini/sglang-h20-llada2-mini.{ending}" for ending in ("csv", "txt", "runs.csv")),
    *(f"h200-sdar-8b/block-diffusion-h200-sdar-8b.{ending}" for ending in ("csv", "txt", "runs.csv")),
    *(
        f"{card}-diffusiongemma/canvases-{card}-diffusiongemma.{ending}"
        for card in ("h100", "h200")
        for ending in ("csv", "txt", "runs.csv")
    ),
    *(f"h20x32/table1-h20x32.{ending}" for ending in ("csv", "md", "runs.csv")),
    *("claims-block.csv", "flips-block.csv"),
)
SGLANG, BESIDE = "h20-llada2-mini/sglang-h20-llada2-mini", "h200-sdar-8b/block-diffusion-h200-sdar-8b"


@pytest.fixture
def root(tmp_path) -> Path:
    """A copy of some results that may be spoilt."""
    for name in COPIED:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(RESULTS / name, tmp_path / name)
    return tmp_path


def faults(root: Path) -> list[str]:
    return [str(each.path.relative_to(root)) for each in check_results(root) if each.is_fault]


def test_the_committed_results_are_those_of_their_tables():
    found = check_results(RESULTS)
    assert [f"{each.path}: {each.reason}" for each in found if each.is_fault] == []
    assert {each.figure for each in found} >= {"claims", "block/sglang", "ampd/table1", "laps/table2"}


def test_words_are_drawn_again_and_numbers_are_not(root):
    (table,) = (each for each in map(read_table, tables_in(root)) if each.entry.name == "block/sglang")
    caption = table.stem.with_name(table.stem.name + ".txt")
    before = caption.read_bytes()
    edit(caption, "published", "printed")
    assert caption in redraw(table)
    assert caption.read_bytes() == before
    assert redraw(table) == []
    edit(caption.with_suffix(".csv"), "h20", "h21")
    with pytest.raises(UserError, match="other numbers"):
        redraw(table)


def test_results_as_they_were_drawn_are_the_same(root):
    assert [(each.figure, each.status) for each in check_results(root)] == [
        ("block/canvases", "same"),
        ("block/sglang", "same"),
        ("block/canvases", "same"),
        ("block/block-diffusion", "same"),
        ("ampd/table1", "same"),
        ("claims", "same"),
    ]


def change_column(path: Path, column: str, change: Callable[[str], str], rows: int | None = None) -> None:
    """Changes a column of the first rows of a table, or of all."""
    head, _, rest = path.read_text(encoding="utf-8").partition("\n")
    names, *found = csv.reader(io.StringIO(rest))
    at = names.index(column)
    for row in found[:rows]:
        row[at] = change(row[at])
    path.write_text(f"{head}\n{csv_text(names, found)}", encoding="utf-8")


def change_run(column: str, change: Callable[[str], str]) -> Callable[[Path], None]:
    return lambda root: change_column(root / f"{SGLANG}.runs.csv", column, change, rows=1)


def change_text(name: str, before: str, after: str) -> Callable[[Path], None]:
    return lambda root: edit(root / name, before, after)


RUNS = f"{SGLANG}.runs.csv"
IN_TABLE = [RUNS, "claims-block.csv"]


def add_run(root: Path) -> None:
    """Adds a run that the figure does not ask for."""
    path = root / f"{SGLANG}.runs.csv"
    _, *rows = path.read_text(encoding="utf-8").partition("\n")[2].splitlines(keepends=True)
    asked = rows[0].split(",")[4]
    with path.open("a", encoding="utf-8") as file:
        file.write(rows[0].replace(asked, asked[::-1]))


FLIPS = """kind,change,claim,default,changed,default_value,changed_value
free,x=1,block-sglang-1,reproduced,not reproduced,1,2
"""
FAULTS: dict[str, tuple[Callable[[Path], object], list[str]]] = {
    "a number in a table": (change_run("summary/throughput_tok_s", lambda text: "1.5"), IN_TABLE),
    "a run's data set": (change_run("dataset", lambda text: "osc"), IN_TABLE),
    "a run's key": (change_run("key", lambda text: text[::-1]), IN_TABLE),
    "a number that nothing shows": (change_run("summary/ttft_s/mean", lambda text: "1.5"), [RUNS]),
    "a digest": (change_run("digest", lambda text: text[::-1]), [RUNS]),
    "a reason": (change_run("reasons", lambda text: '["late"]'), [RUNS]),
    "a seal": (change_text(RUNS, '"seal": "', '"seal": "0'), [RUNS]),
    "a run's cell": (change_run("asked", lambda text: text[::-1]), IN_TABLE),
    "a run that the figure does not ask for": (add_run, IN_TABLE),
    "a number in a CSV": (change_text(f"{SGLANG}.csv", "0.", "0.9"), [RUNS]),
    "a word of a caption": (change_text(f"{SGLANG}.txt", "SGLang", "vLLM"), [RUNS]),
    "a note": (change_text(RUNS, '"notes": ["', '"notes": ["More. '), [RUNS]),
    "a verdict": (change_text("claims-block.csv", ",reproduced,", ",not reproduced,"), ["claims-block.csv"]),
    "a role": (change_text("claims-block.csv", ",prediction,", ",fitted,"), ["claims-block.csv"]),
    "a table that is gone": (
        lambda root: (root / RUNS).unlink(),
        [f"{SGLANG}.csv", f"{SGLANG}.txt", "claims-block.csv"],
    ),
    "a file that is gone": (lambda root: (root / f"{SGLANG}.csv").unlink(), [RUNS]),
    "a file of nothing": (
        lambda root: shutil.copy(root / f"{SGLANG}.csv", root / "h20x32" / "mine.csv"),
        ["h20x32/mine.csv"],
    ),
    "a flip": (lambda root: (root / "flips-block.csv").write_text(FLIPS), ["claims-block.csv"]),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_change_is_found(name, root):
    change, expected = FAULTS[name]
    change(root)
    assert faults(root) == expected


def test_claims_are_not_judged_from_a_part_of_their_runs(root):
    """A table of two repeats, where the figure answers claims by three."""
    path = root / f"{SGLANG}.runs.csv"
    edit(path, '"num_runs": 3', '"num_runs": 2')
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    path.write_text("".join(line for line in lines if not line.startswith("block-diffusion,gsm8k,null,2,")))
    table = read_table(path)
    assert table.is_usual
    assert len(table.runs) == len(lines[2:]) * 2 / 3
    usual = {(table.entry.name, table.view.platform.name): table}
    rows = csv.DictReader(io.StringIO(judged_text("block", root / "claims-block.csv", usual)))
    assert {row["verdict"] for row in rows} == {"not run", "not testable here"}


@pytest.mark.parametrize("other", CASES["other views"])
def test_claims_are_not_judged_from_another_view(other):
    table = read_table(RESULTS / f"{SGLANG}.runs.csv")
    assert table.is_usual
    assert not replace(table, head={**table.head, **other}).is_usual


def test_doubled_throughput_in_drawing_code_is_found(root, monkeypatch):
    plain = Measure.__call__
    monkeypatch.setattr(Measure, "__call__", lambda self, run: 2 * (plain(self, run) or 0.0))
    canvases = [f"{card}-diffusiongemma/canvases-{card}-diffusiongemma" for card in ("h100", "h200")]
    drawn = (canvases[0], SGLANG, canvases[1], BESIDE)
    assert faults(root) == [f"{name}.runs.csv" for name in drawn] + ["claims-block.csv"]


def test_a_number_changed_in_the_papers_claims_is_found(root, tmp_path, monkeypatch):
    changed = tmp_path / "claims.yaml"
    changed.write_text(BLOCK.claims.read_text(encoding="utf-8").replace("value: 0.15", "value: 9.15", 1))
    monkeypatch.setattr(checks, "PAPERS", {**PAPERS, "block": replace(BLOCK, claims=changed)})
    assert faults(root) == ["claims-block.csv"]


# -- figures whose runs are gone ----------------------------------------------------------------------------


@pytest.fixture
def by_digest(root) -> Path:
    """Results of which one figure, that answers no claim, has lost its runs."""
    lines = ["file,sha256"]
    for ending in ("csv", "txt"):
        path = root / f"{BESIDE}.{ending}"
        lines.append(f"{BESIDE}.{ending},{checks._digest(path)}")
    (root / WITHOUT_RUNS).write_text("\n".join(lines) + "\n")
    (root / f"{BESIDE}.runs.csv").unlink()
    return root


def test_a_figure_without_runs_is_held_by_its_digest(by_digest):
    found = {each.figure: each for each in check_results(by_digest)}
    assert (found[BESIDE.partition("/")[2]].status, found["claims"].status) == ("by digest", "same")


@pytest.mark.parametrize(("ending", "before", "after"), [("csv", "1", "9"), ("txt", "Block", "Other")])
def test_a_change_beside_runs_that_are_gone_is_found(by_digest, ending, before, after):
    edit(by_digest / f"{BESIDE}.{ending}", before, after)
    assert faults(by_digest) == [f"{BESIDE}.csv"]


@pytest.mark.parametrize(
    "name", ["h200/benchmark-steps.csv", "h200/composed-h200.csv", "calibration/l40s-sensitivity.csv"]
)
def test_an_edit_of_a_table_of_a_script_is_found(root, name):
    path = root / name
    path.parent.mkdir(exist_ok=True)
    path.write_text("tokens,seconds\n1,0.5\n")
    assert faults(root) == [name], "nothing says what it is"
    (root / WITHOUT_RUNS).write_text(f"file,sha256\n{name},{checks._digest(path)}\n")
    assert faults(root) == []
    edit(path, "0.5", "0.6")
    assert faults(root) == [name]


# -- runs made again ----------------------------------------------------------------------------------------


def again(root: Path, most: int = 2) -> list[Checked]:
    """Not those of canvases, which take longer."""
    for table in root.glob("*-diffusiongemma/*.runs.csv"):
        table.unlink()
    return remake_sample(root, most, seed=3)


def test_runs_made_again_are_spread_over_the_figures_and_the_same(root):
    found = again(root)
    assert {each.figure.partition(":")[0] for each in found} == {"block/sglang", "block/block-diffusion"}
    assert {each.status for each in found} == {"same"}


@pytest.mark.parametrize(
    ("column", "change"),
    [("digest", lambda text: text[::-1]), ("summary/throughput_tok_s", lambda text: repr(1.001 * float(text)))],
)
def test_a_number_that_a_run_does_not_give_is_found(root, column, change):
    for path in root.glob("h2*/*.runs.csv"):
        if "table1" not in path.name:
            change_column(path, column, change)
    assert {each.status for each in again(root)} == {"differs"}


def test_other_constants_behind_the_runs_are_found(root, monkeypatch):
    from repro.runs import experiment

    monkeypatch.setattr(experiment, "BASIS", "other")
    assert {each.status for each in again(root, most=1)} == {"differs"}


# -- calibration reports ------------------------------------------------------------------------------------

TARGET = next(iter(PROTOCOLS["l40s"].targets))


def reported(*findings: Finding) -> dict[str, Any]:
    judged = [each for each in judge_all(load_claims("dllm-serve"), findings) if each.finding is not None]
    return report(load_calibration("l40s"), judged)


def l40s() -> Checked:
    (own,) = (each for each in check_reports() if each.path.name.startswith("l40s"))
    return own


def found(claim: str, value: float) -> Finding:
    return Finding(claim=claim, value=value, obtained="simulated", how="")


@pytest.mark.parametrize("knows_the_seal", [False, True])
@pytest.mark.parametrize(
    "change",
    [{"verdict": "not reproduced"}, {"ours": 91.0}, {"error_percent": 0.0}, {"role": "prediction"}, {"expected": 90.0}],
    ids=lambda change: next(iter(change)),
)
def test_a_falsified_report_is_found(tmp_path, monkeypatch, change, knows_the_seal):
    monkeypatch.setattr(paths, "CALIBRATION", tmp_path)
    write_report(reported(found(TARGET, 90.0)))
    assert l40s().status == "same"
    value = json.loads(report_path("l40s").read_text())
    value["comparisons"][0].update(change)
    if knows_the_seal:
        value["medians"] = medians(value["comparisons"])
        del value["seal"]
        value = sealed(value)
    report_path("l40s").write_text(json.dumps(value))
    assert l40s().is_fault


@pytest.mark.parametrize(("throughput", "speedup"), [(106.0, "reproduced"), (85.7, "not reproduced")])
def test_a_report_judges_what_follows_from_its_own_numbers(tmp_path, monkeypatch, throughput, speedup):
    """A speedup within its tolerance is not reproduced where a throughput that it is made of is not."""
    followed, following = "dllm-t4-burst-serve-tput", "dllm-t4-burst-serve-speedup"
    value = reported(found(followed, throughput), found(following, 2.88))
    monkeypatch.setattr(paths, "CALIBRATION", tmp_path)
    verdicts = {each["claim"]: each for each in value["comparisons"]}
    assert verdicts[followed]["verdict"] == verdicts[following]["verdict"] == speedup
    write_report(value)
    assert l40s().status == "same"
    verdicts[following]["verdict"] = "not reproduced" if speedup == "reproduced" else "reproduced"
    write_report(value)
    assert l40s().is_fault


def test_a_report_of_another_fit_is_found(tmp_path, monkeypatch):
    value = reported(found(TARGET, 90.0))
    monkeypatch.setattr(paths, "CALIBRATION", tmp_path)
    write_report({**value, "calibration": {**asdict(load_calibration("l40s")), "matmul_efficiency": 0.123}})
    assert l40s().is_fault


# -- the command --------------------------------------------------------------------------------------------


def command(*words: str) -> Any:
    return CliRunner().invoke(app, ["check-results", *words])


def test_the_command_says_what_differs_and_how_to_make_it(root):
    result = command("--results", str(root))
    assert result.exit_code == 0, result.output
    edit(root / f"{SGLANG}.csv", "0.", "0.9")
    result = command("--results", str(root))
    assert result.exit_code == 1
    assert "repro reproduce block/sglang --platform h20-llada2-mini" in result.stdout
    result = command("--results", str(root), "--json")
    told: Sequence[dict[str, Any]] = json.loads(result.stdout)["results"]
    assert [each["file"] for each in told if each["fault"]] == [f"{SGLANG}.runs.csv"]


def test_a_figure_that_was_just_made_is_the_same_and_so_are_its_runs(tmp_path):
    small = ("--platform", "rtx4090", "--cost", "roofline", "--request-rate", "0.5", "--num-prompts", "4")
    where = ("--result-dir", str(tmp_path / "runs"), "--out-dir", str(tmp_path / "results" / "rtx4090"))
    made = CliRunner().invoke(app, ["reproduce", "fig3", *small, "--num-runs", "2", *where])
    assert made.exit_code == 0, made.output
    for words in ((), ("--again", "3")):
        result = command("--results", str(tmp_path / "results"), *words, "--json")
        assert result.exit_code == 0, result.output
        found = json.loads(result.stdout)["results"]
        assert len(found) == (3 if words else 1)
        assert {each["status"] for each in found} == {"same"}
    options = "--num-runs 2 --request-rate 0.5 --num-prompts 4 --cost roofline"
    assert f"repro reproduce dllm-serve/fig3 --platform rtx4090 {options}" in found[0]["command"]


def test_the_command_writes_the_verdicts_anew(root):
    before = (root / "claims-block.csv").read_bytes()
    edit(root / "claims-block.csv", ",reproduced,", ",not reproduced,")
    for paper in PAPERS:
        if paper != "block":
            shutil.copy(RESULTS / f"claims-{paper}.csv", root)
    assert command("--results", str(root), "--judge").exit_code == 0
    assert (root / "claims-block.csv").read_bytes() == before


def test_a_folder_without_tables_is_refused(tmp_path):
    with pytest.raises(UserError, match="results"):
        CliRunner().invoke(app, ["check-results", "--results", str(tmp_path)], catch_exceptions=False)
