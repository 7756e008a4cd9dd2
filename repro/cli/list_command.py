"""``repro list``: what there is."""

from __future__ import annotations

from repro.cli import options as opt
from repro.cli.output import print_json, print_table


def list_command(json: opt.Json = False) -> None:
    """Systems, datasets, session traces, conversations, tasks, platforms and figures."""
    from repro.reports.figures import FIGURES
    from repro.runs.system import SYSTEMS
    from repro.systems.platforms import PLATFORMS
    from repro.tasks.registry import TASKS
    from repro.workloads.card import known_datasets, load_card
    from repro.workloads.conversations import known_conversation_cards, load_conversation_card
    from repro.workloads.sessions import known_session_cards, load_session_card

    rows = [("system", name, SYSTEMS.get(name).summary) for name in SYSTEMS]
    rows += [("dataset", name, load_card(name).title) for name in known_datasets()]
    rows += [
        ("trace", name, f"{load_session_card(name).title}: {load_session_card(name).summary}")
        for name in known_session_cards()
    ]
    rows += [
        ("conversations", name, f"{load_conversation_card(name).title}: {load_conversation_card(name).summary}")
        for name in known_conversation_cards()
    ]
    rows += [("task", t.name, f"{t.title}, {t.criterion}: 'repro eval'") for t in TASKS.values()]
    rows += [
        ("platform", p.name, f"{p.title} ({'simulated' if p.executor == 'roofline' else 'measured'} by default)")
        for p in map(PLATFORMS.get, PLATFORMS)
    ]
    rows += [("figure", f.name, f.title) for f in FIGURES.values()]
    if json:
        print_json({"items": [{"kind": kind, "name": name, "what": what} for kind, name, what in rows]})
    else:
        print_table("What there is", ("kind", "name", "what it is"), rows)
