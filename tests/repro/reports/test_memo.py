"""A figure that nothing has changed of stays as it is, and anything that has changed draws it again."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.command import repro

from engines.named import load_named
from repro.reports import drawing, memo
from repro.reports.figures import Rendered, View
from repro.reports.memo import Memo, may_be_kept
from repro.systems.platforms import platform

SAID = {"figures": [{"title": "Figure 1", "rows": [["é", 0.1]]}], "lines": []}
VIEW = View(platform=platform("h20x32"), reading="published")


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with code, a data file, two runs and a drawn figure, and a memo of it."""
    for name in ("code/engine.py", "code/deep/data.yaml", "runs/a.gz", "runs/b.gz", "figures/fig.csv"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"{name}\n")
    monkeypatch.setattr(memo, "_RESTED_ON", (tmp_path / "code",))
    monkeypatch.delenv("REPRO_DATA_DIR", raising=False)
    _memo(tmp_path).keep(_runs(tmp_path), [tmp_path / "figures" / "fig.csv"], SAID)
    return tmp_path


def _memo(place: Path, *asked: object) -> Memo:
    return Memo(place / "runs", asked or ("fig", "h200"))


def _runs(place: Path) -> list[Any]:
    files = sorted((place / "runs").glob("*.gz"))
    return [SimpleNamespace(file=file, content=file.read_bytes()) for file in (*files, files[0])]


def test_what_was_said_may_be_kept_as_long_as_nothing_changes(place):
    (place / "runs" / "c.gz").write_text("of another figure")
    assert _memo(place).recalled() == SAID
    assert _memo(place, "fig", "h200", 3).recalled() is None, "never asked"


@pytest.mark.parametrize("name", ["code/engine.py", "code/deep/data.yaml", "runs/a.gz", "runs/b.gz", "figures/fig.csv"])
@pytest.mark.parametrize("change", [Path.unlink, lambda path: path.write_text(path.read_text().upper())])
def test_a_file_that_changes_or_goes(place, name, change):
    change(place / name)
    assert _memo(place).recalled() is None


@pytest.mark.parametrize("name", ["code/more.py", "code/deep/more.yaml", "code/empty"])
def test_a_file_that_comes(place, name):
    (place / name).touch()
    assert _memo(place).recalled() is None


def test_a_file_that_moves(place):
    (place / "code" / "engine.py").rename(place / "code" / "motor.py")
    assert _memo(place).recalled() is None


def test_what_python_compiles_is_no_change_and_a_link_to_nothing_no_fault(place):
    (place / "code" / "__pycache__").mkdir()
    (place / "code" / "__pycache__" / "engine.pyc").touch()
    assert _memo(place).recalled() == SAID
    (place / "code" / ".#engine.py").symlink_to(place / "nobody")
    assert _memo(place).recalled() is None


@pytest.mark.parametrize("name", ["REPRO_DATA_DIR", "MPLCONFIGDIR"])
def test_an_environment_of_ones_own(place, monkeypatch, name):
    monkeypatch.setenv(name, str(place))
    assert _memo(place).recalled() is None
    _memo(place).keep(_runs(place), [], SAID)
    assert (_memo(place).recalled() is None) == (name == "REPRO_DATA_DIR")
    monkeypatch.delenv(name)
    assert _memo(place).recalled() is None, "kept of other data"


def test_another_folder_or_library(place, monkeypatch):
    (library := place / "site-packages").mkdir()
    monkeypatch.syspath_prepend(library)
    assert _memo(place).recalled() == SAID
    (library / "matplotlib-99.dist-info").mkdir()
    assert _memo(place).recalled() is None
    (library / "matplotlib-99.dist-info").rmdir()
    monkeypatch.chdir(place)
    assert _memo(place).recalled() is None


def test_a_memo_that_was_edited_or_cannot_be_written(place):
    (path,) = (place / "runs" / "memos").iterdir()
    whole = path.read_text()
    for broken in (whole.replace("Figure 1", "Figure 2"), whole[:40], "[]", ""):
        path.write_text(broken)
        assert _memo(place).recalled() is None
    path.unlink()
    path.parent.rmdir()
    path.parent.touch()
    _memo(place).keep(_runs(place), [], SAID)
    assert _memo(place).recalled() is None


def test_only_what_is_simulated_by_our_own_code_may_be_kept():
    def run(obtained: str = "simulated", *modules: str) -> Any:
        code = {"digest": repr(modules), "modules": dict.fromkeys(("engines.ar", *modules), "0")}
        return SimpleNamespace(manifest={"obtained": obtained, "code": code})

    ours = "paper_figures.ampd.fig4"
    assert may_be_kept(ours, [VIEW], [])
    assert may_be_kept(ours, [VIEW], [run(), run("simulated", "baselines.ar")])
    assert not may_be_kept(ours, [VIEW], [run(), run("measured")])
    assert not may_be_kept(ours, [VIEW], [run("simulated", "helper"), run()])
    assert not may_be_kept("support.md1", [VIEW], [])
    assert not may_be_kept(ours, [VIEW, replace(VIEW, platform=load_named("platform", "support.md1:WORKSHOP"))], [])
    assert not may_be_kept(ours, [replace(VIEW, platform=replace(VIEW.platform, executor="torch"))], [])


def test_the_command_draws_once(tmp_path, monkeypatch):
    drawn: list[str] = []
    draw = drawing.draw

    def counted(*given: Any) -> Rendered:
        drawn.append(given[0].name)
        return draw(*given)

    monkeypatch.setattr(drawing, "draw", counted)
    monkeypatch.delenv("REPRO_DATA_DIR", raising=False)
    small = ("table4", "--platform", "l40s", "--num-prompts", 2, "--result-dir", tmp_path)
    folder = tmp_path / "figures" / "dllm-serve"

    first = repro("reproduce", *small)
    files = {path: path.stat().st_mtime_ns for path in folder.iterdir()}
    second = repro("reproduce", *small)
    assert (first.code, second.code, second.out, len(drawn)) == (0, 0, first.out, 1)
    assert f"0 runs done, {first.err.split()[0]} reused (e.g. done: same cell, finished " in second.err
    assert "nothing to do: " in second.err
    assert "nothing to do: " not in first.err
    assert {path: path.stat().st_mtime_ns for path in folder.iterdir()} == files
    of_json = json.loads(repro("reproduce", *small, "--json").out)
    assert len(drawn) == 1

    assert json.loads(repro("figure", *small, "--json").out) == of_json
    assert len(drawn) == 2, "asked to draw"
    assert "nothing to do" not in repro("-v", "reproduce", *small).err
    assert len(drawn) == 3, "asked what is reused"
    assert "0 reused" in repro("reproduce", *small, "--force").err
    assert len(drawn) == 4
    repro("reproduce", *small, "--num-runs", 2)
    assert len(drawn) == 5
    (folder / "table4-l40s.csv").write_text("edited")
    again = repro("reproduce", *small)
    assert (again.out, len(drawn)) == (first.out, 6)
    assert "nothing new to run: " in again.err
    run = min(tmp_path.glob("*.jsonl.gz"))
    run.write_bytes(run.read_bytes()[:-1] + b"?")
    assert "1 run done" in repro("reproduce", *small).err
    assert len(drawn) == 7
    assert repro("reproduce", *small).out == first.out
    assert len(drawn) == 7
