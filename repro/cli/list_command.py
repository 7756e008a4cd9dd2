"""``repro list`` and ``repro doctor``: list what the toolkit offers, and what this machine can run."""

import re
from dataclasses import MISSING
from typing import Annotated, NamedTuple

import typer

from engines.errors import UserError
from engines.knobs import Knob, conditions_of, helps_of, knobs_of
from repro.cli import options as opt
from repro.cli.output import print_json, print_table
from repro.families.platforms import PLATFORMS
from repro.paths import DATASETS
from repro.reports.figures import FIGURES
from repro.runs.system import ENTRIES, SYSTEMS, settings_of
from repro.tasks.registry import TASKS
from repro.workloads.card import introductions


class KnobEntry(NamedTuple):
    name: str
    takes: str
    default: str
    only: str
    text: str


def list_command(
    knobs: Annotated[
        str | None,
        typer.Option(
            help="Instead the knobs of this system, or of module:NAME: what each takes, its range and default, what it is."
        ),
    ] = None,
    metrics: Annotated[
        str | None,
        typer.Option(help="Instead the metrics of this system's runs: unit, formula, and when a value is null."),
    ] = None,
    json: opt.Json = False,
) -> None:
    """List systems, datasets, session traces, conversations, tasks, platforms and figures."""
    if knobs is not None and metrics is not None:
        raise UserError("knobs and metrics are two lists: give one of --knobs and --metrics")
    if knobs is not None:
        _list_knobs(knobs, json=json)
    elif metrics is not None:
        _list_metrics(metrics, json=json)
    else:
        _list_all(json=json)


def _list_metrics(system: str, *, json: bool) -> None:
    names = ("name", "unit", "formula", "undefined")
    rows = [tuple(getattr(metric, name) for name in names) for metric in SYSTEMS.get(system).family.every_metric]
    if json:
        print_json({"system": system, "metrics": [dict(zip(names, row, strict=True)) for row in rows]})
    else:
        print_table(f"Metrics of {system}", ("metric", "unit", "formula", "undefined when"), rows)


def _list_knobs(system: str, *, json: bool) -> None:
    entries = entries_of(system)
    if json:
        names = ("name", "takes", "default", "only", "what")
        print_json({"system": system, "knobs": [dict(zip(names, entry, strict=True)) for entry in entries]})
    else:
        # Hide an upper end that no machine reaches and that no column has room for.
        takes = [re.sub(r"from (\S+) to \d+(,\d{3}){4,}", r"at least \1", entry.takes) for entry in entries]
        rows = [(entry.name, taken, _help_text(entry)) for entry, taken in zip(entries, takes, strict=True)]
        print_table(f"Knobs of {system}", ("knob", "takes", "what it is"), rows)


def entries_of(system: str) -> list[KnobEntry]:
    """Return the knobs of a system; none if it does not declare any."""
    entries: dict[str, KnobEntry] = {}
    for kind in settings_of(system):
        helps, conditions = helps_of(kind), conditions_of(kind)
        for name, knob in knobs_of(kind).items():
            only = "; ".join(condition.in_words for knob_name, condition in conditions if knob_name == name)
            entries.setdefault(name, KnobEntry(name, knob.takes, _default_text(knob), only, helps.get(name, "")))
    return [*entries.values()]


def _default_text(knob: Knob) -> str:
    if knob.default is MISSING:
        return "the platform's"
    if knob.default is None:
        return ""
    return str(knob.default).lower() if isinstance(knob.default, bool) else str(knob.default)


def _help_text(entry: KnobEntry) -> str:
    """The help text of a knob, with its default and the settings that it has an effect with."""
    text = f"{entry.text.removesuffix('.')} [default: {entry.default}]." if entry.default else entry.text
    return f"{text} Has an effect with {entry.only}." if entry.only else text


def _list_all(*, json: bool) -> None:
    rows = [("system", name, entry.says) for name, entry in ENTRIES.items()]
    rows += [("dataset", name, title) for name, title, _ in introductions(DATASETS)]
    for kind, folder in (("trace", "sessions"), ("conversations", "conversations")):
        rows += [(kind, name, f"{title}: {text}") for name, title, text in introductions(DATASETS / folder)]
    rows += [("task", t.name, f"{t.title}, {t.criterion}: 'repro eval'") for t in TASKS.values()]
    rows += [
        ("platform", p.name, f"{p.title} ({'simulated' if p.executor == 'roofline' else 'measured'} by default)")
        for p in map(PLATFORMS.get, PLATFORMS)
    ]
    rows += [("figure", f.name, f.title) for f in FIGURES.values()]
    if json:
        print_json({"items": [{"kind": kind, "name": name, "what": text} for kind, name, text in rows]})
    else:
        print_table("What there is", ("kind", "name", "what it is"), rows)


def doctor(json: opt.Json = False) -> None:
    """Show what this machine can run, and why not."""
    from repro.checks.doctor import inspect_machine, rows_for

    report = rows_for(inspect_machine())
    if json:
        print_json({"items": [row._asdict() for row in report]})
    else:
        print_table("This machine", ("item", "status", "detail"), report)
