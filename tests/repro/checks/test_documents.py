"""Numbers in documents are those of the results."""

import json
import re
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from repro.checks.documents import NAME, READ_WITH, accept, check_documents
from repro.checks.quotes import missing, plain, quotes
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


def test_every_quote_stands_in_its_document():
    assert missing(RESULTS, REPO) == []
    assert {name for name, _ in quotes(RESULTS)} == {"docs/dllm-serve.md", "docs/ampd.md", "docs/laps.md"}


def test_every_number_of_a_quote_counts(tmp_path):
    """One digit more of each number that is made again from results: the quote is missed."""
    (tmp_path / "docs").mkdir()
    found = list(quotes(RESULTS))
    for place, (name, text) in enumerate(found):
        for other in {name for name, _ in found}:
            whole = [quote for at, (own, quote) in enumerate(found) if own == other and at != place]
            (tmp_path / other).write_text("\n".join(map(plain, whole)), encoding="utf-8")
        page = (tmp_path / name).read_text(encoding="utf-8")
        numbers = list(re.finditer(r"\d+(?:\.\d+)?", plain(text)))
        assert numbers
        for number in (numbers[0], numbers[-1]):
            spoilt = f"{plain(text)[: number.end()]}9{plain(text)[number.end() :]}"
            (tmp_path / name).write_text(f"{page}\n{spoilt}", encoding="utf-8")
            assert (name, text) in missing(RESULTS, tmp_path)


@pytest.mark.parametrize(
    ("document", "old", "new", "reason"),
    [
        ("docs/dllm-serve.md", "94 %", "99 %", "as the results do"),
        ("docs/dllm-serve.md", "| `efficient` | 1.09", "| `efficient` | 1.90", "as the results do"),
        (
            "docs/dllm-serve.md",
            "fitted on dLLM-Serve alone:",
            "fitted on 3 systems:",
            "3 stands under 'dLLM-Serve: what reproduces', where nothing was",
        ),
        (
            "docs/laps.md",
            "LAPS violates 21 points",
            "LAPS violates 31 points",
            "31 stands under 'Eleven lines for a reviewer', where 21",
        ),
        (
            "docs/laps.md",
            "is one seed in ten",
            "is one seed in five",
            "five stands under 'Eleven lines for a reviewer', where ten",
        ),
        ("docs/ampd.md", "21 hold and 27 do not", "41 hold and 7 do not", "as the results do"),
        ("docs/ampd.md", "| -7 ± 1 % tuned", "| +7 ± 1 % tuned", "+7 stands under"),
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
    path = repository / "results/laps-h200/fig7-h200.csv"
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
    for name in ("l40s/readings-l40s.csv", "claims-laps.csv", "cpu-tiny/fig8-cpu-tiny.csv"):
        if "claims" not in name:
            found = edited(repository / "results" / name, "dataset", "data", repository)
            assert "cannot be read (KeyError" in found["docs/dllm-serve.md"]
        path = repository / "results" / name
        path.rename(path.with_suffix(".away"))
        try:
            assert "cannot be read (FileNotFoundError" in faults(repository)["docs/dllm-serve.md"]
        finally:
            path.with_suffix(".away").rename(path)


def test_accepting_needs_the_repositorys_own_documents(tmp_path):
    result = CliRunner().invoke(app, ["check-results", "--accept", "--results", str(tmp_path)])
    assert result.exit_code != 0
    assert "has no documents beside it" in str(result.exception or result.output)
