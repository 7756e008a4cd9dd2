"""How the documents read: sentences of at most 25 words, none that opens with Of, What, Where or Whoever, and no semicolons.

``prose.csv`` counts what still breaks a rule, page by page. A count may only fall: ``python tests/properties/test_prose.py`` stores it anew.
"""

import csv
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
STORED = Path(__file__).with_name("prose.csv")
PAGES = (
    "README.md",
    "CONTRIBUTING.md",
    "engines/README.md",
    *sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md")),
)
MOST_WORDS = 25
_OPENINGS = re.compile(r"(Of|What|Where|Whoever|So too|Likewise)\b")
_NO_PROSE = re.compile(r"```.*?```|<!--.*?-->|^ *\|[^\n]*|^#[^\n]*", re.DOTALL | re.MULTILINE)
_ENDS = re.compile(r"(?<=[.!?:])(?:\*\*)?\s+(?=[\"'*`\[(]*[A-Z0-9])")


def sentences(page: str) -> Iterator[str]:
    text = _NO_PROSE.sub("\n\n", (ROOT / page).read_text(encoding="utf-8"))
    text = re.sub(r"`[^`\n]+`", "`code`", text)
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text)
    for paragraph in re.split(r"\n\s*\n|\n\s*(?:[-*]|\d+\.)\s", text):
        joined = " ".join(paragraph.split()).lstrip("-*0123456789. ")
        yield from (each for each in _ENDS.split(joined) if each)


def broken(page: str) -> dict[str, int]:
    """How many sentences of a page break each rule."""
    found = [*sentences(page)]
    return {
        "long": sum(len(each.split()) > MOST_WORDS for each in found),
        "opening": sum(_OPENINGS.match(each) is not None for each in found),
        "semicolon": sum(each.count(";") for each in found),
    }


def stored() -> dict[str, dict[str, int]]:
    with STORED.open(encoding="utf-8") as file:
        return {row.pop("page"): {name: int(value) for name, value in row.items()} for row in csv.DictReader(file)}


@pytest.mark.parametrize("page", PAGES)
def test_no_page_reads_worse(page):
    most = stored().get(page, {})
    assert {name: count for name, count in broken(page).items() if count > most.get(name, 0)} == {}


def test_what_breaks_a_rule_is_found(tmp_path, monkeypatch):
    long = " ".join(["word"] * (MOST_WORDS + 1))
    (tmp_path / "page.md").write_text(f"# Of titles\n\nOf this. That; and so. {long}. Fine.\n\n| {long}; |\n")
    monkeypatch.setattr(sys.modules[__name__], "ROOT", tmp_path)
    assert broken("page.md") == {"long": 1, "opening": 1, "semicolon": 1}


if __name__ == "__main__":
    with STORED.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["page", "long", "opening", "semicolon"])
        writer.writerows([page, *broken(page).values()] for page in PAGES)
