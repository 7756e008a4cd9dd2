"""A figure is there with all its files, or not at all."""

from typing import Any

import pytest

from engines.errors import UserError
from repro.files import replace_text
from repro.reports import drawing
from repro.reports.drawing import draw
from repro.reports.figures import View, figure
from repro.systems.platforms import platform

TABLE = figure("ampd/table1")
VIEW = View(platform=platform("h20x32"), reading="published", num_runs=1)


def test_a_figure_and_its_stamp(tmp_path):
    rendered = draw(TABLE, VIEW, [], tmp_path / "o")
    assert {path.name for path in rendered.files} == {"table1-h20x32.md", "table1-h20x32.csv"}
    assert all(path.is_file() and path.parent == tmp_path / "o" for path in rendered.files)
    assert {path.name for path in (tmp_path / "o").iterdir()} == {
        f"table1-h20x32.{kind}" for kind in ("md", "csv", "json")
    }


def test_a_disk_that_fills_up_leaves_what_was_there(tmp_path, monkeypatch):
    draw(TABLE, VIEW, [], tmp_path)
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}

    def full(*arguments: Any) -> None:
        folder = arguments[-1].files[0].parent
        (folder / "table1-h20x32.md").write_text("half")
        raise OSError(28, "No space left on device", str(folder / "table1-h20x32.json"))

    monkeypatch.setattr(drawing, "write_stamp", full)
    with pytest.raises(OSError, match="No space") as raised:
        draw(TABLE, VIEW, [], tmp_path)
    assert raised.value.filename == str(tmp_path / "table1-h20x32.json")
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_folder_in_the_place_of_a_file(tmp_path):
    replace_text(tmp_path / "table1-h20x32.csv" / "x", "mine")
    with pytest.raises(UserError, match="table1-h20x32"):
        draw(TABLE, VIEW, [], tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["table1-h20x32.csv"]
