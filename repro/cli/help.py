"""Commands whose help names every option whole, in panels where there are many, as plain text, so that ``--help`` loads
nothing; and which refuse an option that would silently win over itself."""

import csv
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from typer.core import TyperCommand

from engines.errors import UserError
from repro.cli.options import PANELS, RUNS

ARGUMENTS = "Arguments"
FIRST = "Needed first"
"""The first panel, of commands with many options."""
OTHERS = "Options"
"""What is in none of the panels, or alone in one: ``--help``, of commands that write nothing."""
_MAY_BE_EMPTY = ("prompt", "system_prompt")
_UNBROKEN = "\u2011"
"""Stands for a hyphen while lines are broken: a name is not to end in the middle."""
NEEDED: Mapping[str, tuple[str, ...]] = {
    "reproduce": ("platform", "reading", "num_prompts", "num_runs", "result_dir", "json"),
    "figure": ("platform", "reading", "result_dir", "out_dir", "json"),
    "bench": ("system", "platform", "dataset_name", "dataset_path", "request_rate", "num_prompts", "knob", "dry_run"),
    "ablate": ("component", "dataset", "platform", "request_rate", "num_runs", "plot"),
    "eval": ("task", "system", "platform", "limit", "model", "retention_ratio"),
    "generate": ("prompt", "model", "system", "gen_length", "device", "seed"),
    "serve": ("model", "platform", "device", "host", "port", "gen_length"),
    "plan-cluster": ("model", "trace", "gpus", "hardware", "rate", "slo_ttft_s", "slo_itl_s"),
    "capacity": ("workload", "slo", "gpus", "rate", "system", "platform", "plot"),
}
"""Options that a command shows first, where all are too many for one list."""


def examples_of(command: str) -> list[tuple[str, str]]:
    with Path(__file__).with_name("examples.csv").open(encoding="utf-8", newline="") as file:
        return [(row["line"], row["does"]) for row in csv.DictReader(file) if row["command"] == command]


class PanelCommand(TyperCommand):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.help = held(self.help or "")

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        _check_given(self, ctx, args)
        return super().parse_args(ctx, args)

    def get_help(self, ctx: Any) -> str:
        texts = self.callback.helps()  # type: ignore[union-attr]
        for param in self.params:
            param.help = param.help or texts.get(param.name)  # type: ignore[attr-defined]
        return released(super().get_help(ctx))

    def format_options(self, ctx: Any, formatter: Any) -> None:
        shown = [
            (param, record) for param in self.get_params(ctx) if (record := param.get_help_record(ctx)) is not None
        ]
        panels: dict[str, list[Any]] = {panel: [] for panel in (ARGUMENTS, FIRST, *PANELS, OTHERS)}
        needed = NEEDED.get(self.name or "", ())

        def place(each: Any) -> int:
            name = each[0].name
            return needed.index(name) if name in needed else len(needed)

        for param, (name, text) in sorted(shown, key=place):
            panel = getattr(param, "rich_help_panel", None) or (RUNS if param.name == "help" else OTHERS)
            if param.param_type_name == "argument":
                panel = ARGUMENTS
            elif not needed:
                panel = OTHERS
            elif param.name in needed:
                panel = FIRST
            panels[panel].append((name, held(_told(text))))
        if [name for name, _ in panels[RUNS]] == ["--help"]:
            panels[OTHERS] += panels.pop(RUNS)
        for panel, records in panels.items():
            if records:
                with formatter.section(panel):
                    formatter.write_dl(records)

    def format_help_text(self, ctx: Any, formatter: Any) -> None:
        super().format_help_text(ctx, formatter)
        if examples := examples_of(self.name or ""):
            with formatter.section("Examples"):
                for line, does in examples:
                    formatter.write(f"  # {does}\n  {line}\n")


def first_sentence(doc: str) -> str:
    paragraph = " ".join(doc.partition("\n\n")[0].split())
    return re.split(r"(?<=\.) ", paragraph, maxsplit=1)[0]


def _check_given(command: TyperCommand, ctx: Any, args: list[str]) -> None:
    """Refuse what is empty, which as a path would be the working directory and as a name be passed over, and an option that is given
    twice and takes one value, of which the library keeps the last without a word."""
    values, _, given = command.make_parser(ctx).parse_args(args=list(args))
    options: list[Any] = [each for each in given if each.param_type_name == "option"]
    for option in options:
        value = values.get(option.name)
        told = value if isinstance(value, list | tuple) else (value,)
        is_empty = any(isinstance(each, str) and not each.strip() for each in told)
        if is_empty and option.name not in _MAY_BE_EMPTY:
            raise UserError(f"{max(option.opts, key=len)}='' is empty: give a value, or leave it out")
    for name in command.callback.paths:  # type: ignore[union-attr]
        if values.get(name) == "":
            raise UserError(f"{name}='' is empty: give a path")
    for option in dict.fromkeys(options):
        # Once more the same switch says nothing else; on and off, or two values, do.
        may_come_again = option.multiple or option.count or (option.is_flag and not option.secondary_opts)
        if not may_come_again and (num := given.count(option)) > 1:
            raise UserError(f"{max(option.opts, key=len)} is given {num} times and takes one value: keep one")


def _told(text: str) -> str:
    """Defaults that the library appends, as those that a help names itself: in its sentence."""
    return re.sub(r"\.?  (\[[^\[\]]*\])$", r" \1.", text)


def held(text: str) -> str:
    return text.replace("-", _UNBROKEN)


def released(text: str) -> str:
    return text.replace(_UNBROKEN, "-")
