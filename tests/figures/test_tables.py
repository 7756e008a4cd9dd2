"""Tables 1 to 4, the registry of figures, and the Makefile's list of them."""

import subprocess

import pytest
from support.cells import RTX4090
from support.stored_runs import read_csv

from paper_figures.dllm_serve import table3
from repro.families.platforms import platform
from repro.reports.claims import load_figures
from repro.reports.figures import FIGURES, View, default_reading, figure

CARD_VIEW = View(platform=RTX4090, reading="published")


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


def test_table_3_says_where_it_does_not_agree(tmp_path, monkeypatch):
    ours = table3.defaults()
    monkeypatch.setattr(table3, "defaults", lambda: {**ours, "Kernel Size": 5})
    rows = read_csv(table3.FIGURE.render([], CARD_VIEW, tmp_path))
    assert [row["parameter"] for row in rows if row["agrees"] == "NO"] == ["Kernel Size"]
