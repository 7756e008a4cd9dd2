"""Pages of reference that are read off the code: commands, knobs, metrics and the columns of what a run records."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import click
from pages import MADE, Page, Section
from typer.main import get_command

from repro.cli.list_command import KnobEntry, entries_of
from repro.cli.main import GROUPS, app, examples_of, with_plain_hyphens
from repro.runs.family import Family
from repro.runs.system import SYSTEMS


def cell(text: object) -> str:
    """As a cell of a table; what stands in double backticks is code."""
    parts = re.split(r"``(.+?)``", " ".join(with_plain_hyphens(str(text)).split()))
    return "".join(
        code(part) if place % 2 else re.sub(r"([\\|*_<>\[\]`$])", r"\\\1", part) for place, part in enumerate(parts)
    )


def code(text: object) -> str:
    """Empty if there is none."""
    told = " ".join(with_plain_hyphens(str(text)).split())
    return f"`{told}`" if told else ""


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(each)} |" for each in (head, ["---"] * len(head), *rows)]
    return "\n".join(lines) + "\n"


def page(kind: str, name: str, title: str, text: str) -> Page:
    return Page(f"{MADE}{kind}", f"reference/{kind}/{name}.md", [Section(1, title, f"\n{text}")])


class Recorder:
    """Takes what a command writes as its help, as Markdown."""

    def __init__(self) -> None:
        self.text = ""

    @contextmanager
    def section(self, title: str) -> Iterator[None]:
        self.text += f"\n## {title}\n\n"
        yield

    def write_dl(self, rows: Sequence[tuple[str, str]]) -> None:
        self.text += table(("option", "what it is"), [(code(name), cell(text)) for name, text in rows])


def commands() -> list[Page]:
    root: Any = get_command(app)
    found, listed = [], ""
    for group, names in GROUPS.items():
        rows = []
        for name in names:
            command = root.get_command(None, name)
            context = click.Context(command, info_name=f"repro {name}")
            command.get_help(context)  # finds the texts of options
            recorder = Recorder()
            command.format_options(context, recorder)
            usage = " ".join((f"repro {name}", *command.collect_usage_pieces(context)))
            does = cell(command.help)
            lines = "".join(f"# {what}\n{line}\n" for line, what in examples_of(name))
            shown = f"\n## Examples\n\n```sh\n{lines}```\n" if lines else ""
            found.append(
                page("commands", name, f"repro {name}", f"{does}\n\n```text\n{usage}\n```\n{shown}{recorder.text}")
            )
            rows.append((f"[{name}]({name}.md)", re.split(r"(?<=\.) ", does)[0]))
        listed += f"\n## {group}\n\n{table(('command', 'what it does'), rows)}"
    return [page("commands", "index", "Commands", listed), *found]


def families() -> dict[str, tuple[Family, list[str]]]:
    """Name -> the family and its systems."""
    found: dict[str, tuple[Family, list[str]]] = {}
    for name in SYSTEMS:
        family = SYSTEMS.get(name).family
        found.setdefault(family.name, (family, []))[1].append(name)
    return found


def knobs() -> list[Page]:
    return [
        page("knobs", name, f"Knobs of {name}", f"Systems: {_named(systems)}.\n\n{_knobs_of(systems)}")
        for name, (_, systems) in families().items()
    ]


def _named(names: Sequence[str]) -> str:
    return ", ".join(map(code, names))


def _knobs_of(systems: Sequence[str]) -> str:
    having: dict[KnobEntry, list[str]] = {}
    for system in systems:
        for entry in entries_of(system):
            having.setdefault(entry, []).append(system)
    rows = []
    for each, own in sorted(having.items()):
        text = f"{each.text} Has an effect with {each.only}." if each.only else each.text
        of = "all" if own == [*systems] else _named(own)
        takes = re.sub(r"from (\S+) to \d+(,\d{3}){4,}", r"at least \1", each.takes)
        rows.append((code(each.name), cell(takes), code(each.default), cell(text), of))
    return table(("knob", "takes", "default", "what it is", "systems"), rows)


def metrics() -> list[Page]:
    head = ("metric", "unit", "formula", "undefined when")
    found = []
    for name, (family, systems) in families().items():
        rows = [
            (code(each.name), cell(each.unit), cell(each.formula), cell(each.undefined)) for each in family.every_metric
        ]
        text = f"Systems: {_named(systems)}.\n\n{table(head, rows)}"
        found.append(page("metrics", name, f"Metrics of {name}", text))
    return found


def columns() -> list[Page]:
    found = []
    for name, (family, systems) in families().items():
        text = f"Systems: {_named(systems)}.\n"
        for title, own in family.columns.items():
            rows = [
                (code(each.name), each.kind + (" or null" if each.nullable else ""), cell(each.meaning)) for each in own
            ]
            text += f"\n## Table {title}\n\n{table(('column', 'kind', 'meaning'), rows)}"
        found.append(page("columns", name, f"Records of {name}", text))
    return found


MADE_PAGES: Mapping[str, Callable[[], Sequence[Page]]] = {
    "commands": commands,
    "knobs": knobs,
    "metrics": metrics,
    "columns": columns,
}
