"""docs/workbench.ipynb says what its cells answer today."""

import copy
import json
import re

import pytest

pytest.importorskip("nbclient", reason="needs nbclient and ipykernel of the extra dev: nbclient is not installed")
pytest.importorskip("ipykernel", reason="needs nbclient and ipykernel of the extra dev: ipykernel is not installed")

from support.notebook import PATH, executed, read, said

from repro.paths import REPO

MOST_BYTES = 300_000


def test_the_numbers_are_those_of_today(tmp_path):
    stored = read()
    assert len(said(stored)) >= 5
    again = said(executed(copy.deepcopy(stored), tmp_path))
    assert again == said(stored), "run PYTHONPATH=tests python -m support.notebook"
    assert {path.name for path in tmp_path.iterdir()} >= {"runs", "own", "shortest.py"}


def test_it_is_executed_whole_and_small():
    """In order, with a picture, without what one machine alone says."""
    text = PATH.read_text(encoding="utf-8")
    assert len(text) < MOST_BYTES
    cells = [cell for cell in read().cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in cells] == [*range(1, len(cells) + 1)]
    pictures = [each for cell in cells for each in cell.outputs if "image/png" in each.get("data", {})]
    assert len(pictures) == 1
    assert not re.search(r"/tmp/|/home/|Traceback", text)
    assert str(REPO) not in text
    assert json.loads(text)["metadata"].keys() == {"kernelspec"}


def test_links_lead_somewhere():
    text = "\n".join(cell.source for cell in read().cells if cell.cell_type == "markdown")
    for target in re.findall(r"\]\(([^)#\s]+)", text):
        assert (PATH.parent / target).exists(), target
