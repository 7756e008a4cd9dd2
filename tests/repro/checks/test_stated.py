"""Numbers in documents, made again from CSV files by their formulas."""

import math

import pytest

from engines.errors import UserError
from repro.checks.quotes import missing
from repro.checks.stated import NAME, statements

CSV = "seed,system,speed\n0,ours,2\n1,ours,80\n0,theirs,1\n1,theirs,10\n2,slow,\n"


@pytest.fixture
def said(tmp_path):
    (tmp_path / "a.csv").write_text(CSV, encoding="utf-8")

    def make(says: str, **numbers: str) -> str:
        own = "\n".join(f"    {name}: {{{text}}}" for name, text in numbers.items())
        text = f"- in: page.md\n  says: '{says}'\n  from:\n{own}\n"
        (tmp_path / NAME).write_text(text, encoding="utf-8")
        ((document, found),) = statements(tmp_path)
        assert document == "page.md"
        return found

    return make


OURS = "of: a.csv, where: {system: ours}"


@pytest.mark.parametrize(
    ("says", "asked", "expected"),
    [
        ("{n:.0f} runs", "count: speed, of: a.csv", "5 runs"),
        ("{n:.1f}", f"mean: speed, {OURS}", "41.0"),
        ("{100 * (n / 2 - 1):+.0f} %", f"least: speed, {OURS}", "+0 %"),
        ("{max(n, 3)}", "value: speed, of: a.csv, where: {system: theirs, seed: 1}", "10"),
        ("{log(n):.2f}", "largest: speed, of: a.csv, where: {system: [ours, theirs]}", f"{math.log(80):.2f}"),
        ("{n * 1:.2f}", "ratio: speed, of: a.csv, one: {system: ours}, other: {system: theirs}, pair: seed", "4.00"),
    ],
)
def test_a_number_comes_from_its_rows(said, says, asked, expected):
    assert said(says, n=asked) == expected


def test_a_ratio_is_paired_and_has_its_interval(said, tmp_path):
    ratio = "ratio: speed, of: a.csv, one: {system: ours}, other: {system: theirs}, pair: seed"
    (tmp_path / "a.csv").write_text(CSV.replace("0,ours,2", "0,ours,7.9"), encoding="utf-8")
    assert said("{n:x} times", n=ratio).startswith("8 [") or said("{n:x} times", n=ratio).startswith("7.9 [")


@pytest.mark.parametrize(
    ("says", "asked"),
    [
        ("{n}", "mean: speed, of: a.csv, where: {system: nobody}"),
        ("{n}", f"value: speed, {OURS}"),
        ("{m}", f"mean: speed, {OURS}"),
        ("{__import__(n)}", f"mean: speed, {OURS}"),
        ("{n.real}", f"mean: speed, {OURS}"),
        ("{n}", "mean: speed, of: none.csv"),
        ("{n}", "mean: nothing, of: a.csv"),
        ("{n}", "ratio: speed, of: a.csv, one: {system: ours}, other: {system: theirs}, pair: seed"),
    ],
)
def test_what_cannot_be_computed_is_one_sentence(said, says, asked):
    with pytest.raises(UserError, match=r"numbers\.yaml: entry 1 .* cannot be computed"):
        said(says, n=asked)


def test_a_document_that_says_otherwise_is_found(said, tmp_path, monkeypatch):
    said("{n:.1f} tok/s", n=f"mean: speed, {OURS}")
    monkeypatch.setattr("repro.checks.quotes.quotes", statements)
    page = tmp_path / "page.md"
    page.write_text("It makes 41.0 tok/s.\n", encoding="utf-8")
    assert not missing(tmp_path, tmp_path)
    page.write_text("It makes 41.5 tok/s.\n", encoding="utf-8")
    assert missing(tmp_path, tmp_path) == [("page.md", "41.0 tok/s")]
