"""Tables in documents are those of the results."""

import re
import shutil
from pathlib import Path

import pytest
import yaml
from support.tables import data_beside, edit

from engines.errors import UserError
from repro.checks.documents import TABLES, documents, fill, stale_tables, table
from repro.paths import REPO, RESULTS

CELLS = data_beside(__file__, "cells")
SPEEDS = Path(__file__).with_name("speeds.csv").read_text(encoding="utf-8")
PAGE = "# Page\n\nWords.\n\n<!-- generated: speeds -->\n<!-- end -->\n\nMore words.\n"
DECLARED = data_beside(__file__, "documents")["declared"]


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A document with one table, filled."""
    (tmp_path / "results").mkdir()
    (tmp_path / "results/speeds.csv").write_text(SPEEDS)
    (tmp_path / TABLES).mkdir(parents=True)
    (tmp_path / TABLES / "page.yaml").write_text(yaml.safe_dump(DECLARED))
    (tmp_path / "docs/page.md").write_text(PAGE)
    (tmp_path / "README.md").write_text("# Read me\n")
    fill(tmp_path, tmp_path / "results")
    assert faults(tmp_path) == {}
    return tmp_path


def faults(root: Path) -> dict[str, str]:
    return {each.name: each.reason for each in stale_tables(root, root / "results")}


def cell(root: Path, **keys: object) -> str:
    declared = {"of": "speeds.csv", "column": "speed", "rows": {"row": {}}, "columns": {"value": keys}}
    return table(declared, root / "results").splitlines()[-1].removeprefix("| row | ").removesuffix(" |")


def test_every_table_is_what_the_results_say():
    assert stale_tables(REPO, RESULTS) == []


def test_a_headline_names_which_of_several_conditions_it_is_of(repository):
    """One row of a table of two systems: its name, or words that stand for it, are in the text."""
    row = {"where": {"system": "ours"}}

    def made(text: str, **keys: object) -> str:
        declared = {"of": "speeds.csv", "column": "speed", "corner": "finding | conditions", "columns": {"value": {}}}
        return table({**declared, "rows": {text: {**row, **keys}}}, repository / "results")

    assert "speed of ours" in made("speed of ours | all")
    assert "our speed" in made("our speed | all", says={"system": "our speed"})
    for keys in ({}, {"says": {"system": "of ours"}}):
        with pytest.raises(UserError, match="does not name system=ours"):
            made("our speed | all", **keys)


def test_a_table_has_its_rows_and_columns(repository):
    page = (repository / "docs/page.md").read_text()
    expected = "| system | a | b |\n| --- | --- | --- |\n| ours | 8.4 | 1.1 |\n| theirs | 2.0 | 4.2 |"
    assert expected in page
    assert re.sub(r"(?s)<!-- generated: speeds -->.*<!-- end -->", "", page) == "# Page\n\nWords.\n\n\n\nMore words.\n"
    fill(repository, repository / "results")
    assert (repository / "docs/page.md").read_text() == page


@pytest.mark.parametrize(("old", "new"), [("8.4", "8.5"), ("| ours |", "| we |"), ("| theirs | 2.0 | 4.2 |\n", "")])
def test_an_edited_table_is_found_and_filled_again(repository, old, new):
    edit(repository / "docs/page.md", old, new)
    assert "speeds" in faults(repository)
    fill(repository, repository / "results")
    assert faults(repository) == {}


def test_words_outside_a_table_may_change(repository):
    edit(repository / "docs/page.md", "More words", "Other words")
    assert faults(repository) == {}


def test_a_changed_result_is_found(repository):
    edit(repository / "results/speeds.csv", "b,1,theirs,4.4", "b,1,theirs,4.9")
    assert "not what the results say" in faults(repository)["speeds"]


@pytest.mark.parametrize("name", ["page", "other"])
def test_a_block_that_is_not_declared_is_refused(repository, name):
    (repository / f"docs/{name}.md").write_text(PAGE + PAGE.replace("speeds", "sizes"))
    assert "no table 'sizes' is declared" in faults(repository)["sizes"]


@pytest.mark.parametrize(("old", "new"), [("<!-- generated: speeds -->", ""), ("<!-- end -->", "")])
def test_a_declared_table_needs_its_block(repository, old, new):
    edit(repository / "docs/page.md", old, new)
    assert "no block" in faults(repository)["speeds"]


@pytest.mark.parametrize(
    ("name", "text"), [("page.yaml", "speeds: ["), ("page.yaml", "- speeds"), ("gone.yaml", "speeds: {}")]
)
def test_a_declaration_that_cannot_be_read_is_one_sentence(repository, name, text):
    (repository / TABLES / name).write_text(text)
    ((found, reason),) = faults(repository).items()
    assert (found, "\n" in reason) == (name, False)


@pytest.mark.parametrize(("keys", "expected"), CELLS["rows"])
def test_a_cell_comes_from_its_rows(repository, keys, expected):
    assert cell(repository, **keys) == expected


RIVAL = {"each": ["place"], "one": {"system": "ours"}, "other": {"system": "theirs"}}


@pytest.mark.parametrize(("keys", "expected"), CELLS["compared"])
def test_comparisons_have_their_intervals(repository, keys, expected):
    assert cell(repository, **(RIVAL | keys)) == expected


@pytest.mark.parametrize("keys", CELLS["refused"])
def test_a_cell_that_cannot_be_computed_is_one_sentence(repository, keys):
    with pytest.raises(UserError, match="row 'row', column 'value'"):
        cell(repository, **keys)


@pytest.mark.parametrize("declared", CELLS["declared"])
def test_a_declaration_of_another_shape_is_one_sentence(repository, declared):
    with pytest.raises(UserError, match="rows and columns"):
        table(declared, repository / "results")


def test_rows_and_columns_may_be_combined(repository):
    declared = data_beside(__file__, "documents")["combined"]
    assert table(declared, repository / "results").splitlines() == [
        "| place | system | tok/s | note |",
        "| --- | --- | --- | --- |",
        "| a | ours | 8.4 | a |",
        "| a | third | 4.0 | a |",
        "| b | ours | 1.1 | far |",
        "| b | third | 1.0 | far |",
    ]
    declared["rows"][0]["b"]["cells"] = {"remark": "far"}
    with pytest.raises(UserError, match="remark"):
        table(declared, repository / "results")


def test_an_edited_number_in_any_document_is_found(tmp_path):
    """Every committed table, with one digit changed."""
    ignored = shutil.ignore_patterns("*.png", "*.ipynb")
    shutil.copytree(REPO / "docs", tmp_path / "docs", ignore=ignored)
    shutil.copyfile(REPO / "README.md", tmp_path / "README.md")
    edited = set()
    for document, _ in documents(tmp_path):
        for block in re.findall(r"<!-- generated: ([\w-]+) -->", text := document.read_text(encoding="utf-8")):
            start = text.index("\n| ", text.index("| --- |", text.index(f"<!-- generated: {block} -->")))
            digit = re.compile(r"(?<=\| )[-+]?\d").search(text, start)
            assert digit is not None
            text = f"{text[: digit.end()]}7{text[digit.end() :]}"
            edited.add((document, block))
        document.write_text(text, encoding="utf-8")
    assert {(each.document, each.name) for each in stale_tables(tmp_path, RESULTS)} == edited
