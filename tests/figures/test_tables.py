"""Tables 1 to 4, the registry of figures, and the Makefile's list of them."""

import subprocess

import pytest
from support.cells import L40S, RTX4090
from support.stored_runs import read_csv, runs_of

from paper_figures.dllm_serve import table1, table2, table3, table4
from repro.reports.figures import FIGURES, View, default_reading, figure
from repro.reports.paper import load_claims, load_figures
from repro.systems.platforms import platform

CLAIMS = {claim.id: claim for claim in load_claims("dllm-serve")}
CARD_VIEW = View(platform=RTX4090, reading="published")
L40S_VIEW = View(platform=L40S, reading="published")
SPEED = {"dllm-serve": 80.0, "fast-dllm": 40.0, "dllm-cache": 16.0, "sparse-dllm": 20.0}


def test_every_figure_and_table_of_the_paper_is_registered():
    """Figure 1 is an overview drawing; every other one has numbers."""
    printed = {name for name in load_figures() if name.startswith("dllm-serve/")} - {"dllm-serve/fig1"}
    assert printed <= set(FIGURES)


def test_every_registered_figure_has_a_make_target():
    lists = "list: ; @echo $(FIGURES) $(AMPD_FIGURES:%=ampd/%) $(LAPS_FIGURES:%=laps/%) $(BLOCK_FIGURES:%=block/%)"
    listed = subprocess.run(["make", "-s", f"--eval={lists}", "list"], check=True, capture_output=True, text=True)
    assert {figure(name).name for name in listed.stdout.split()} == set(FIGURES)


@pytest.mark.parametrize("name", sorted(FIGURES))
def test_modules_keep_their_contract(name):
    entry = FIGURES[name]
    module = entry.load()
    assert entry.title == module.title
    assert module.source
    for where in map(platform, module.platforms):
        cells = module.cells(View(platform=where, reading=default_reading(where)))
        assert len({cell.key for cell in cells}) == len(cells)
        # A platform of a card and a model may be compared with another model on the card.
        assert {cell.platform for cell in cells} <= {where.name, str(where.gpu)}


def test_table_1_counts_what_the_implementations_hold(tmp_path):
    rows = {row["work"]: row for row in read_csv(table1.FIGURE.render([], CARD_VIEW, tmp_path))}
    length, row_bytes = 556, 524_288
    assert float(rows["Fast-dLLM"]["MB per request"]) == pytest.approx(length * row_bytes / 1e6, abs=0.05)
    assert float(rows["dLLM-Cache"]["MB per request"]) == pytest.approx(2 * length * row_bytes / 1e6, abs=0.05)
    sparse = ((length - 32) // 2 + 32) * row_bytes / 1e6
    assert float(rows["Sparse-dLLM"]["MB per request"]) == pytest.approx(sparse, abs=0.05)
    assert float(rows["dLLM-Serve (Ours)"]["MB per request"]) == pytest.approx(sparse, abs=0.05)
    assert rows["SparseD"]["implemented as"] == "not implemented"
    (finding,) = table1.FIGURE.findings([], CARD_VIEW)
    assert finding.holds


def test_table_2_computes_the_headroom(tmp_path):
    rows = read_csv(table2.FIGURE.render([], CARD_VIEW, tmp_path))
    assert [row["left GB"] for row in rows] == ["7.97", "31.97"]
    assert all("fitted on" in row["simulated as"] for row in rows)


def test_table_3_agrees_with_the_papers_settings(tmp_path):
    rows = read_csv(table3.FIGURE.render([], CARD_VIEW, tmp_path))
    assert len(rows) == 11
    assert {row["agrees"] for row in rows} == {"yes"}
    found = {f.claim: f.value for f in table3.FIGURE.findings([], CARD_VIEW)}
    assert found == {"dllm-steps-per-block": 32, "dllm-retention-fixed": 0.5}


def test_table_3_says_where_it_does_not_agree(tmp_path, monkeypatch):
    ours = table3.defaults()
    monkeypatch.setattr(table3, "defaults", lambda: {**ours, "Kernel Size": 5})
    rows = read_csv(table3.FIGURE.render([], CARD_VIEW, tmp_path))
    assert [row["parameter"] for row in rows if row["agrees"] == "NO"] == ["Kernel Size"]


def test_table_4_stands_beside_the_printed_one(tmp_path):
    runs = runs_of(table4.FIGURE.cells(L40S_VIEW), lambda cell: SPEED[cell.system])
    rendered = table4.FIGURE.render(runs, L40S_VIEW, tmp_path)
    assert [row[:2] for row in rendered.rows[:4]] == [
        ("LiveBench", "dLLM-Cache"),
        ("LiveBench", "Sparse-dLLM"),
        ("LiveBench", "Fast-dLLM"),
        ("LiveBench", "dLLM-Serve"),
    ]
    assert rendered.rows[3] == (
        *("LiveBench", "dLLM-Serve", "3.20", "218.5", "-", "-", "80.00", "90.17", "4.00x", "2.79x", "yes"),
    )
    csv_rows = read_csv(rendered)
    assert [row["paper_speedup"] for row in csv_rows[:4]] == ["1.01", "1.0", "1.75", "2.79"]
    found = {f.claim: f.value for f in table4.FIGURE.findings(runs, L40S_VIEW)}
    assert found.keys() <= CLAIMS.keys()
    assert {claim for claim in found if claim.startswith("dllm-t4-")} == {
        claim for claim in CLAIMS if claim.startswith("dllm-t4-") and claim != "dllm-t4-oom"
    }
    assert found["dllm-abs-tput-l40s"] == pytest.approx((2, 2, 2))
    assert found["dllm-serve-best-tput"] == (1, 1, 1)
    assert found["dllm-t4-livebench-lat-gain"] == pytest.approx(2)
    assert found["dllm-l40s-osc-lat-ratio"] == pytest.approx(4)
    assert found["dllm-t4-burst-fast-dllm-speedup"] == pytest.approx(2)
    assert (tmp_path / "table4-l40s.md").read_text().count("|") > 12 * 9
