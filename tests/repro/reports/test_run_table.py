"""A figure's table of runs: what drawing reads is in it, and the figure drawn from it is the one drawn from the runs."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.figure_runs import figure_runs
from support.tables import data_beside

from engines.errors import UserError
from repro.checks.results import check_figure
from repro.families.platforms import platform
from repro.files import replace_text
from repro.reports import run_table
from repro.reports.figures import FIGURES, View, default_reading, figure, pictures
from repro.reports.run_table import TableError, _columns, _text, _value, _Watched, draw, places_read, read_table
from repro.runs.store import StoredRun

ARITHMETIC = figure("ampd/table1")
VIEW = View(platform=platform("h20x32"), reading="published", num_runs=1)


@pytest.fixture
def no_pictures():
    with pictures("none"):
        yield


def table_in(folder: Path) -> Path:
    (path,) = (path for path in folder.iterdir() if run_table.SUFFIX in path.name)
    return path


def runs_of(name: str, num_runs: int) -> tuple[View, list[StoredRun]]:
    loaded = FIGURES[name].load()
    where = platform(loaded.platforms[0])
    view = View(platform=where, reading=default_reading(where), num_runs=num_runs)
    runs = figure_runs(loaded, view)
    for run in runs:
        vars(run).setdefault("summary", {})  # which a made-up run of memory alone lacks
    return view, runs


@pytest.mark.parametrize("name", FIGURES)
def test_a_figure_comes_out_of_its_table_as_out_of_its_runs(name, tmp_path, no_pictures):
    view, runs = runs_of(name, 2)
    figure = FIGURES[name].load()
    rendered = draw(FIGURES[name], view, runs, tmp_path)
    table = read_table(table_in(tmp_path))
    assert check_figure(table).status == "same", check_figure(table).reason
    assert [run.cell for run in table.runs] == [run.cell for run in runs]
    if view.platform.name in figure.deciding:
        assert figure.findings(table.runs, view) == figure.findings(runs, view)
    assert table.head["notes"] == list(rendered.notes)


@pytest.mark.parametrize("name", ["dllm-serve/fig7", "ampd/fig8", "laps/fig8", "block/sglang"])
def test_a_large_table_is_packed(name, tmp_path, no_pictures, monkeypatch):
    """A figure of every family."""
    view, runs = runs_of(name, 1)
    tables = []
    for most in (1 << 30, 1):
        monkeypatch.setattr(run_table, "PACKED_BYTES", most)
        draw(FIGURES[name], view, runs, tmp_path / str(most))
        tables.append(read_table(table_in(tmp_path / str(most))))
    plain, packed = tables
    assert packed.path.name.endswith(".runs.csv.gz")
    assert gzip.decompress(packed.path.read_bytes()) == plain.path.read_bytes()
    assert packed.rows == plain.rows


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=5,
)


@given(JSON)
def test_every_value_is_read_as_it_was_written(value):
    assert _value(_text(value)) == value
    assert _text(value) != ""


@pytest.mark.parametrize(
    ("read", "places"),
    [
        (lambda run: run["a"]["b"], ["a/b"]),
        (lambda run: (run["a"]["b"], run["a"]["c"]["d"]), ["a/b", "a/c/d"]),
        (lambda run: run["a"].get("missing"), ["a/missing"]),
        (lambda run: dict(run["a"]), ["a"]),
        (lambda run: (sum(run["a"]["c"].values()), run["a"]["b"]), ["a/b", "a/c"]),
        (lambda run: run["a"] is None, ["a"]),
        (lambda run: bool(run["a"]["c"]), ["a/c"]),
        (lambda run: "b" in run["a"], ["a/b"]),
        (lambda run: run["a"]["c"]["x/y"], ["a/c"]),
        (lambda run: run["rows"], ["rows"]),
    ],
)
def test_what_is_read_is_noted_and_no_more(read, places):
    seen: dict[tuple[str, ...], None] = {}
    part: dict[str, Any] = {"a": {"b": 1, "c": {"d": 2, "x/y": 3}}, "rows": [{"e": 1}]}
    read(_Watched(part, (), seen))
    assert ["/".join(place) for place in _columns(seen)] == places


def test_runs_that_no_finding_reads_are_told_from_the_others():
    _, runs = runs_of("block/sglang", 1)
    first = places_read(lambda own: own[0].summary["throughput_tok_s"], runs)
    assert first == [0]
    assert places_read(lambda own: [run.cell.seed for run in own], runs) == []


def test_a_figure_and_its_table(tmp_path):
    rendered = draw(ARITHMETIC, VIEW, [], tmp_path / "o")
    assert {path.name for path in rendered.files} == {"table1-h20x32.md", "table1-h20x32.csv"}
    assert all(path.is_file() and path.parent == tmp_path / "o" for path in rendered.files)
    names = {f"table1-h20x32.{kind}" for kind in ("md", "csv", "runs.csv")}
    assert {path.name for path in (tmp_path / "o").iterdir()} == names


def test_a_disk_that_fills_up_leaves_what_was_there(tmp_path, monkeypatch):
    draw(ARITHMETIC, VIEW, [], tmp_path)
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}

    def full(path: Path, *rest: Any) -> None:
        path.with_suffix(".md").write_text("half")
        raise OSError(28, "No space left on device", str(path.with_suffix(".runs.csv")))

    monkeypatch.setattr(run_table, "write_table", full)
    with pytest.raises(OSError, match="No space") as raised:
        draw(ARITHMETIC, VIEW, [], tmp_path)
    assert raised.value.filename == str(tmp_path / "table1-h20x32.runs.csv")
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_folder_in_the_place_of_a_file(tmp_path):
    replace_text(tmp_path / "table1-h20x32.csv" / "x", "mine")
    with pytest.raises(UserError, match="table1-h20x32"):
        draw(ARITHMETIC, VIEW, [], tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["table1-h20x32.csv"]


HEADS: dict[str, dict[str, Any]] = data_beside(__file__, "run_table")["heads"]


@pytest.mark.parametrize("name", HEADS)
def test_a_head_that_says_nothing_is_refused(name, tmp_path):
    draw(ARITHMETIC, VIEW, [], tmp_path)
    path = table_in(tmp_path)
    first, _, rest = path.read_text(encoding="utf-8").partition("\n")
    path.write_text(f"# {json.dumps({**json.loads(first[1:]), **HEADS[name]})}\n{rest}", encoding="utf-8")
    with pytest.raises(TableError):
        read_table(path)


@pytest.mark.parametrize(
    "content", [b"", b"# {}\n", b"\xff\xfe", b"# {\n", b"x" * 1000, b'# {}\n"', b"a,b\n1,2\n"], ids=repr
)
@pytest.mark.parametrize("ending", [".runs.csv", ".runs.csv.gz"])
def test_a_file_that_is_no_table_is_refused(content, ending, tmp_path):
    path = tmp_path / f"x{ending}"
    path.write_bytes(content)
    with pytest.raises(TableError):
        read_table(path)
