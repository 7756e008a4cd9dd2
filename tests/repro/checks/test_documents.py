"""Numbers in documents are those of the results."""

import json
import re
import shutil
from pathlib import Path

import pytest
from support.command import refused, repro
from typer.testing import CliRunner

from repro.checks.documents import NAME, READ_WITH, accept, check_documents
from repro.checks.quotes import missing, restate
from repro.checks.stated import statements
from repro.cli.main import app
from repro.paths import REPO, RESULTS
from repro.runs.seal import sealed


@pytest.fixture(scope="module")
def copied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("repository")
    ignored = shutil.ignore_patterns("*.png", "*.pdf", "local", "figures", NAME)
    shutil.copytree(RESULTS, root / "results", ignore=ignored)
    for name in READ_WITH:
        (root / name).parent.mkdir(exist_ok=True)
        shutil.copyfile(REPO / name, root / name)
    accept(root / "results", root)
    return root


@pytest.fixture
def repository(copied: Path) -> Path:
    """Documents and results that are accepted, and are restored after an edit."""
    assert faults(copied) == {}
    return copied


def faults(root: Path) -> dict[str, str]:
    found = check_documents(root / "results", root)
    return {str(each.path.relative_to(root)): each.reason for each in found if each.is_fault}


def edited(path: Path, old: str, new: str, root: Path) -> dict[str, str]:
    text = path.read_text(encoding="utf-8")
    assert old in text
    path.write_text(text.replace(old, new, 1), encoding="utf-8")
    try:
        return faults(root)
    finally:
        path.write_text(text, encoding="utf-8")


PAGES = {
    "README.md",
    "docs/dllm-serve.md",
    "docs/frontier.md",
    "docs/frontier-rows.md",
    "docs/frontier-queues.md",
    "docs/ampd.md",
    "docs/laps.md",
    "docs/using.md",
    "docs/block-diffusion.md",
}


def test_every_statement_stands_in_its_document():
    assert missing(RESULTS, REPO) == []
    assert {each.document for each in statements(RESULTS)} == PAGES


def test_every_number_of_a_statement_counts(tmp_path, monkeypatch):
    """One digit more of its first or last number: the statement is missed, and restating puts it right."""
    (tmp_path / "docs").mkdir()
    for each in statements(RESULTS):
        monkeypatch.setattr("repro.checks.quotes.statements", lambda root, only=each: [only])
        page = tmp_path / each.document
        for place in (1, len(each.parts) - 2):
            number = each.parts[place]
            spoilt = "".join(
                (
                    *each.parts[:place],
                    f"{number.split()[0]}9{number[len(number.split()[0]) :]}",
                    *each.parts[place + 1 :],
                )
            )
            page.write_text(f"It says {spoilt}, so.", encoding="utf-8")
            assert missing(RESULTS, tmp_path) == [(each.document, each.text)]
            assert restate(RESULTS, tmp_path) == []
            assert page.read_text(encoding="utf-8") == f"It says {each.text}, so."


@pytest.mark.parametrize(
    ("document", "old", "new", "reason"),
    [
        ("README.md", "| laps | prediction | ", "| laps | prediction | 9", "as the results do"),
        ("README.md", "mini-code solves ", "mini-code solves 9", "as the results do"),
        ("docs/ampd.md", "| 36 of 36 |", "| 35 of 36 |", "as the results do"),
        (
            "docs/laps.md",
            "Ten seeds of 3,000 turns",
            "Ten seeds of 4,000 turns",
            "4,000 stands under 'How it was made again', where 3,000",
        ),
        (
            "docs/ampd.md",
            "serves sessions of several",
            "serves 3 sessions of",
            "3 stands under 'What the paper says', where",
        ),
        ("docs/metrics.md", "## ", "## 99 ", "99 stands under"),
    ],
)
def test_a_number_changed_in_a_document_is_found(repository, document, old, new, reason):
    found = edited(repository / document, old, new, repository)
    assert found.keys() == {document}
    assert reason in found[document]


def test_words_may_change(repository):
    assert edited(repository / "docs/laps.md", "is worth it", "pays", repository) == {}


def test_results_that_changed_ask_for_their_documents_to_be_read_again(repository):
    path = repository / "results/laps-h200/fig8-h200.csv"
    found = edited(path, path.read_text().splitlines()[-1], "", repository)
    assert found.keys() == {"docs/laps.md"}
    assert "have changed since it was accepted" in found["docs/laps.md"]


@pytest.mark.parametrize(
    "name",
    [
        "paper/ampd/fig7.csv",
        "paper/laps/claims.yaml",
        "calibration/l40s-sensitivity.csv",
        "laps-cpu-tiny/mixing-steps.json",
    ],
)
def test_files_without_a_stamp_are_as_they_were_accepted(repository, name):
    path = repository / "results" / name
    whole = path.read_text(encoding="utf-8")
    digit = re.search(r"[1-8]", whole)
    assert digit is not None
    found = edited(path, digit.group(), "9", repository)
    assert found[f"results/{name}"] == "it is not as it was accepted, and has no stamp"
    path.rename(path.with_suffix(".away"))
    try:
        assert f"results/{name}" in faults(repository)
    finally:
        path.with_suffix(".away").rename(path)


def test_what_was_accepted_cannot_be_edited(repository):
    path = repository / "results" / NAME
    assert edited(path, '"21"', '"31"', repository)["results/accepted.json"] == "it is not as it was written"
    value = json.loads(path.read_text())
    del value["seal"]
    value["documents"]["docs/laps.md"]["numbers"].append("9")
    text = path.read_text()
    path.write_text(json.dumps(sealed(value)))
    assert "nothing stands under" in faults(repository)["docs/laps.md"]
    path.write_text(text)


def test_results_that_cannot_be_read_are_a_fault(repository):
    for name in ("cpu-tiny/accuracy-cpu-tiny.csv", "claims-laps.csv"):
        path = repository / "results" / name
        if "claims" not in name:
            assert "cannot be computed (KeyError" in edited(path, "contender", "data", repository)["README.md"]
        path.rename(path.with_suffix(".away"))
        try:
            assert "cannot be" in faults(repository)["README.md"]
        finally:
            path.with_suffix(".away").rename(path)


def test_accepting_needs_the_repositorys_own_documents(tmp_path):
    result = CliRunner().invoke(app, ["check-results", "--accept", "--results", str(tmp_path)])
    assert result.exit_code != 0
    assert "has no documents beside it" in str(result.exception or result.output)


@pytest.mark.parametrize("name", [".", "figures-of-none"])
def test_a_folder_without_results_is_none_to_check(name, tmp_path):
    (tmp_path / name).mkdir(exist_ok=True)
    (tmp_path / "README.md").write_text("# Mine")
    refused(repro("check-results", "--results", tmp_path), "holds no figure")
