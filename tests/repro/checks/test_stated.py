"""Numbers in documents, made again from CSV files by their formulas."""

import math

import pytest

from engines.errors import UserError
from repro.checks.quotes import missing, restate
from repro.checks.stated import NAME, statements
from repro.reports.facts import facts_table

CSV = "seed,system,speed\n0,ours,2\n1,ours,80\n0,theirs,1\n1,theirs,10\n2,slow,\n"
CELLS = """place,seed,system,speed,said
a,0,ours,8,3.5 ± 0.26 %
a,1,ours,8.8,
a,0,theirs,2,
a,1,theirs,2,
a,0,third,4,
a,1,third,4,
b,0,ours,1,
b,1,ours,1.1,
b,0,theirs,4,
b,1,theirs,4.4,
b,0,third,1,
b,1,third,1,
"""


@pytest.fixture
def said(tmp_path):
    (tmp_path / "a.csv").write_text(CSV, encoding="utf-8")
    (tmp_path / "c.csv").write_text(CELLS, encoding="utf-8")

    def make(says: str, **numbers: str) -> str:
        own = "\n".join(f"    {name}: {{{text}}}" for name, text in numbers.items())
        text = f"- in: page.md\n  says: '{says}'\n  from:\n{own}\n"
        (tmp_path / NAME).write_text(text, encoding="utf-8")
        (found,) = statements(tmp_path)
        assert found.document == "page.md"
        return found.text

    return make


OURS = "of: a.csv, where: {system: ours}"
RATIO = "of: a.csv, one: {system: ours}, other: {system: theirs}, pair: seed"


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


SIDES = "of: c.csv, by: [place], pair: seed, one: {system: ours}"
RIVAL = f"{SIDES}, other: {{system: theirs}}"


@pytest.mark.parametrize(
    ("says", "asked", "expected"),
    [
        ("{n:.0f}", f"ratios: speed, {RIVAL}, take: ahead", "1"),
        ("{n:.0f}", f"ratios: speed, {RIVAL}, take: behind", "1"),
        ("{n:.2f}", f"ratios: speed, {RIVAL}, take: least", "0.25"),
        ("{n:.2f}", f"ratios: speed, {RIVAL}, take: largest", f"{4 * math.sqrt(1.1):.2f}"),
        # Logarithms of 4 and 1/4, and of 4.4 and 1/4: means 0 and ln(1.1) / 2.
        ("{n:x}", f"ratios: speed, {RIVAL}, take: pooled", "1.02 [0.76, 1.39]"),
        ("{n:%}", f"ratios: speed, {RIVAL}, take: pooled", "2 [-24, 39]"),
        ("{n:+±}", f"gaps: speed, {RIVAL}, take: pooled, times: 10", "+16 ± 16"),
        ("{n:.0f}", f"gaps: speed, {RIVAL}, take: behind", "1"),
        ("{n:.2f}", f"ratios: speed, {SIDES}, other: {{system: [theirs, third]}}, best: system, take: least", "0.25"),
        (
            "{n:±}",
            "gap: speed, of: c.csv, where: {place: b}, pair: seed, one: {system: ours}, other: {system: third}",
            "0.1 ± 0.6",
        ),
        ("{n:±}", "interval: speed, of: c.csv, where: {system: ours, place: a}, times: 100", "840 ± 508"),
        ("{n:±} %", "value: said, of: c.csv", "3.50 ± 0.26 %"),
        ("{n:.1f}", "mean: said, of: c.csv", "3.5"),
        ("{n:.1f}", "typical: speed, of: c.csv, where: {system: third}", "2.5"),
        # The mean of what is the same twice is one value.
        (
            "{n:x}",
            "ratio: speed, of: c.csv, where: {seed: 0}, pair: place, one: {system: third}, other: {system: third}",
            "1.00 [1.00, 1.00]",
        ),
    ],
)
def test_comparisons_have_their_intervals(said, says, asked, expected):
    assert said(says, n=asked) == expected


@pytest.mark.parametrize(
    ("says", "asked"),
    [
        ("{n}", "mean: speed, of: a.csv, where: {system: nobody}"),
        ("{n:.1f}", f"interval: speed, {OURS}"),
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


def test_a_number_gets_no_digits_that_its_table_has_not(said, tmp_path):
    """99.87 is 99.9 in a table, and not 99.90 in a document."""
    (tmp_path / "d.csv").write_text("said\n99.9 ± 0.3\n", encoding="utf-8")
    assert said("{n:±}", n="value: said, of: d.csv") == "99.9 ± 0.3"


def test_a_document_that_says_otherwise_is_found_and_restated(said, tmp_path):
    said("{n:.1f} tok/s", n=f"mean: speed, {OURS}")
    page = tmp_path / "page.md"
    page.write_text("It makes 41.0 tok/s.\n", encoding="utf-8")
    assert not missing(tmp_path, tmp_path)
    page.write_text("It makes 41.5 tok/s.\n", encoding="utf-8")
    assert missing(tmp_path, tmp_path) == [("page.md", "41.0 tok/s")]
    assert restate(tmp_path, tmp_path) == []
    assert page.read_text(encoding="utf-8") == "It makes 41.0 tok/s.\n"
    assert not missing(tmp_path, tmp_path)


def test_restating_changes_numbers_alone(said, tmp_path):
    """Ends of lines, emphasis and what stands beside are kept; an interval is replaced whole."""
    said("on 14B {n:x} times, or {m:+±} % more, of 3", n=f"ratio: speed, {RATIO}", m=f"interval: speed, {OURS}")
    before = "**Ours** makes, on\n14B, 12 % less. *On* 7B 1.0 [0.5,\n2.0] times,\nor +1 ± 0.5 % more, of 3; *on\n14B 1.0 [0.5,\n2.0] times,* or -1,000 % more, of 3.\n"
    page = tmp_path / "page.md"
    page.write_text(before, encoding="utf-8")
    assert restate(tmp_path, tmp_path) == []
    after = before.replace("14B 1.0 [0.5,\n2.0]", "14B 4 [0, 26731]").replace("-1,000 %", "+41 ± 496 %")
    assert page.read_text(encoding="utf-8") == after


def test_words_that_are_not_there_are_told(said, tmp_path):
    text = said("makes {n:.1f} tok/s", n=f"mean: speed, {OURS}")
    (tmp_path / "page.md").write_text("It yields 41.0 tok/s, or makes some tok/s.\n", encoding="utf-8")
    assert restate(tmp_path, tmp_path) == [f"page.md does not say {text!r} with any numbers"]


def test_words_that_stand_twice_are_told_and_left(said, tmp_path):
    said("| load 0.9 | {n:.0f} |", n=f"mean: speed, {OURS}")
    text = "| load 0.9 | 7 |\n\n| load 0.9 | 8 | 9 |\n"
    (tmp_path / "page.md").write_text(text, encoding="utf-8")
    assert restate(tmp_path, tmp_path) == ["page.md says '| load 0.9 | 41 |' in several places"]
    assert (tmp_path / "page.md").read_text(encoding="utf-8") == text


def test_the_table_of_facts_is_made_again(said, tmp_path, monkeypatch):
    said("{n:.0f} rows", n="count: speed, of: a.csv")
    header = facts_table({})
    monkeypatch.setattr("repro.checks.quotes.committed_facts", lambda root: {})
    page = tmp_path / "page.md"
    page.write_text(f"5 rows\n\n{header}\n| laps | prediction | 1 | 2 | 3 |\n\n| 4 lines | a |\n", encoding="utf-8")
    assert restate(tmp_path, tmp_path) == []
    assert page.read_text(encoding="utf-8") == f"5 rows\n\n{header}\n\n| 4 lines | a |\n"
