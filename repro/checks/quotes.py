"""What documents say of results is there word for word, or is not what the results say. ``python -m repro.checks.quotes`` puts
today's numbers into the documents: a statement is found by its words, with any numbers between them."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from engines.errors import UserError
from repro.checks.stated import Statement, statements
from repro.files import replace_text
from repro.paths import REPO, RESULTS
from repro.reports.facts import committed_facts, facts_table

NUMBER = r"[-+]?\d+(?:,\d{3})*(?:\.\d+)?(?:\s*±\s*\d+(?:,\d{3})*(?:\.\d+)?|\s*\[[-+]?\d[^][]*\])?"
"""One with its interval, as statements write them."""


def plain(text: str) -> str:
    """As quotes are looked for: without ends of lines and marks of emphasis."""
    return " ".join(text.replace("*", "").split())


def missing(root: Path, documents: Path) -> Sequence[tuple[str, str]]:
    """Documents, and what they have to say of the results below ``root`` and do not."""
    found = list(_wanted(root, documents))
    texts = {name: plain((documents / name).read_text(encoding="utf-8")) for name in {name for name, _ in found}}
    return [(name, text) for name, text in found if not re.search(_whole(re.escape(plain(text))), texts[name])]


def _wanted(root: Path, documents: Path) -> Iterator[tuple[str, str]]:
    """Statements, and the rows of the table of facts where one stands."""
    names = []
    for each in statements(root):
        names.append(each.document)
        yield each.document, each.text
    for name in dict.fromkeys(names):
        if _table_in((documents / name).read_text(encoding="utf-8")) is not None:
            yield from ((name, row) for row in facts_table(committed_facts(root)).splitlines()[2:])


def _table_in(text: str) -> re.Match[str] | None:
    header = re.escape(facts_table({}).splitlines()[0])
    return re.search(rf"^{header}\n(?:\|.*\n?)*", text, re.MULTILINE)


def _whole(pattern: str) -> str:
    """No number at its ends goes on."""
    return rf"(?<![\d.]){pattern}(?!\d|[.,]\d)"


def restate(root: Path, documents: Path) -> list[str]:
    """Put today's numbers into the documents; returns what could not be placed, a sentence each."""
    texts: dict[str, str] = {}
    faults = []
    for each in statements(root):
        if each.document not in texts:
            texts[each.document] = (documents / each.document).read_text(encoding="utf-8")
        found = list(re.finditer(_pattern(each), texts[each.document]))
        if len(found) == 1:
            texts[each.document] = _put(texts[each.document], found[0], each.parts[1::2])
        else:
            how = "in several places" if found else "with any numbers"
            faults.append(f"{each.document} {'says' if found else 'does not say'} {each.text!r} {how}")
    for name, text in texts.items():
        if table := _table_in(text):
            text = f"{text[: table.start()]}{facts_table(committed_facts(root))}\n{text[table.end() :]}"
        replace_text(documents / name, text)
    return faults


def _pattern(statement: Statement) -> str:
    """Its words, however their lines end and are emphasised, with a group for each number."""
    words = "".join(f"({NUMBER})" if place % 2 else _words(part) for place, part in enumerate(statement.parts))
    return _whole(words)


def _words(text: str) -> str:
    return "".join(
        r"[\s*]+" if part.isspace() else rf"\**{re.escape(part)}"
        for part in re.findall(r"\s+|\S", text.replace("*", ""))
    )


def _put(text: str, match: re.Match[str], numbers: Sequence[str]) -> str:
    for place in range(len(numbers), 0, -1):
        start, end = match.span(place)
        text = f"{text[:start]}{numbers[place - 1]}{text[end:]}"
    return text


if __name__ == "__main__":
    try:
        failed = restate(RESULTS, REPO)
    except UserError as error:
        failed = [str(error)]
    sys.exit("\n".join(failed) if failed else 0)
