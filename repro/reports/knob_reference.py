"""The knobs of every system, said by the settings that declare them: for a listing, and for ``docs/knobs.md``, which
``python -m repro.reports.knob_reference`` writes."""

from collections.abc import Iterator
from dataclasses import MISSING
from typing import NamedTuple

from engines.knobs import Knob, conditions_of, declared_in, helps_of, knobs_of
from repro.paths import REPO
from repro.runs.system import SYSTEMS, settings_of

PATH = REPO / "docs" / "knobs.md"
_HEAD = """# Knobs

This page lists the knobs of every system, by the settings that declare them. On the command line of `repro bench` the knobs of diffusion LLMs are options
(`--gen-length 64`), and the others are `--knob NAME=VALUE`. In Python they are keywords of `repro.run`. For the knobs of one system, use
`repro list --knobs SYSTEM`. We make the page by `python -m repro.reports.knob_reference` from the fields themselves.
"""
_COLUMNS = ("knob", "takes", "default", "has an effect with", "what it is")


class KnobEntry(NamedTuple):
    name: str
    takes: str
    default: str
    only: str
    text: str
    owner: type
    """The settings that declare it."""


def entries_of(system: str) -> list[KnobEntry]:
    """The knobs of a system; none where it does not say what it has."""
    found: dict[str, KnobEntry] = {}
    for kind in settings_of(system):
        knobs, helps, owners, conditions = knobs_of(kind), helps_of(kind), declared_in(kind), conditions_of(kind)
        for name, knob in knobs.items():
            said = "; ".join(each.said for of, each in conditions if of == name)
            entry = KnobEntry(name, knob.takes, _default(knob), said, helps.get(name, ""), owners[name])
            found.setdefault(name, entry)
    return [*found.values()]


def _default(knob: Knob) -> str:
    if knob.default is MISSING:
        return "the platform's"
    if knob.default is None:
        return ""
    return str(knob.default).lower() if isinstance(knob.default, bool) else str(knob.default)


def reference() -> str:
    """The text of ``docs/knobs.md``: a section for each of the settings, with the systems that have them."""
    entries = {name: entries_of(name) for name in SYSTEMS}
    owners = dict.fromkeys(entry.owner for own in entries.values() for entry in own)
    return "\n".join([_HEAD, *(line for owner in owners for line in _section(owner, entries))])


def _section(owner: type, entries: dict[str, list[KnobEntry]]) -> Iterator[str]:
    having = {name: [entry for entry in own if entry.owner is owner] for name, own in entries.items()}
    systems = [name for name, own in having.items() if own]
    rows = {entry.name: entry for own in having.values() for entry in own}
    yield f"## `{owner.__module__}.{owner.__qualname__}`\n"
    yield f"Systems: {', '.join(systems)}.\n"
    yield f"| {' | '.join(_COLUMNS)} |"
    yield "|---" * len(_COLUMNS) + "|"
    for row in rows.values():
        cells = (f"`{row.name}`", row.takes, row.default, row.only, row.text)
        yield f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"
    yield ""


if __name__ == "__main__":
    PATH.write_text(reference(), encoding="utf-8")
