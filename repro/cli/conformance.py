"""``repro conformance``: the properties that a plug-in is held to, on its own class."""

from __future__ import annotations

from typing import Annotated

import typer

from engines.errors import require
from repro.cli import options as opt
from repro.cli.output import print_json, print_table, say


def conformance(
    name: Annotated[
        str, typer.Argument(help="The plug-in as module:NAME: a class, what makes one, or one that is made.")
    ],
    kind: Annotated[
        str | None, typer.Option(help="scheduler, refresh-rule, router or batcher [default: by its class or methods].")
    ] = None,
    queue: Annotated[
        str | None, typer.Option(help="Queue that a batcher takes prefills from, as module:NAME [default: first come].")
    ] = None,
    examples: Annotated[int, typer.Option(help="Examples that each property is tried on.")] = 50,
    seed: Annotated[int, typer.Option(help="Seed of the examples.")] = 0,
    json: opt.Json = False,
) -> None:
    """Hold a scheduler, refresh rule, router or batching policy of yours to the properties of its kind. Exit code 1 if one fails."""
    from repro.testing.examples import drawn_by
    from repro.testing.named import KINDS, suite_of
    from repro.testing.properties import verdicts

    require(kind is None or kind in KINDS, f"kind={kind!r} is unknown: use one of {', '.join(KINDS)}")
    require(1 <= examples <= 10**6, f"examples={examples} must be between 1 and 1,000,000")
    require(0 <= seed < 2**63, f"seed={seed} must be an integer of at least 0, and below 2^63")
    suite = suite_of(name, kind, queue)
    found = list(verdicts(suite.kind, suite.subject, examples=examples, seed=seed))
    failed = [each for each in found if each.failure is not None]
    if json:
        print_json(
            {
                "name": name,
                "kind": suite.kind.name,
                "examples_by": drawn_by(),
                "passed": not failed,
                "properties": [
                    {
                        "property": each.name,
                        "verdict": each.word,
                        "examples": each.examples,
                        "why": each.failure or each.skipped,
                    }
                    for each in found
                ],
            }
        )
    else:
        print_table(
            f"{name}, a {suite.kind.name}",
            ("property", "verdict", "examples", "what holds"),
            [(each.name, each.word, str(each.examples) if each.examples else "-", each.says) for each in found],
        )
        for each in found:
            if each.failure is not None:
                say(f"FAIL {each.failure}")
            elif each.skipped is not None:
                say(f"skip {each.name}: {each.skipped}")
        num_passed = sum(each.word == "pass" for each in found)
        say(f"{num_passed} of {len(found)} properties pass; examples by {drawn_by()}, seed {seed}.")
    if failed:
        raise typer.Exit(1)
