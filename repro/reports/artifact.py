"""The guide for an artifact committee: the commands behind every claim, what they cost, and what they produce.

``artifact.yaml`` lists the commands of the short tiers, ``results/costs.csv`` what each took; ``artifact.md`` is the guide's template."""

import csv
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, Literal, get_args

from engines.errors import RunError, require
from repro.families.platforms import platform
from repro.files import csv_text, read_yaml
from repro.paths import RESULTS
from repro.reports.claims import Judged, read_claims, tolerance
from repro.reports.claims_file import our_text, read, read_flips, rejudged, value_text
from repro.reports.figures import PAPERS, View, default_reading, figure
from repro.runs.provenance import machine_identity

TierName = Literal["kick-tires", "short", "all"]
TIERS: Mapping[TierName, str] = {"kick-tires": "30 seconds", "short": "10 minutes", "all": "everything"}
"""The tiers, and how long each is meant to take."""


@dataclass(frozen=True, kw_only=True)
class Cost:
    """The cost of a command that made every run anew, one at a time."""

    command: str
    wall_s: float
    processor_s: float
    memory_bytes: int
    """Peak memory of its largest process."""
    processor: str
    how: str = "measured"


@dataclass(frozen=True, kw_only=True)
class Step:
    """A command of the guide, with its output and the claims that it answers."""

    command: str
    tier: TierName
    title: str
    file: str
    """The file it writes; empty if it prints."""
    cost: Cost | None
    claims: Sequence[Mapping[str, str]] = ()


# -- costs ------------------------------------------------------------------------------------------------


def read_costs(path: Path) -> dict[str, Cost]:
    require(
        path.is_file(),
        f"results={str(path.parent)!r} has no {path.name}, which says what commands cost: give the repository's",
    )
    rows = csv.DictReader(path.read_text(encoding="utf-8").splitlines(), strict=True)
    kinds = {field.name: field.type for field in fields(Cost)}
    return {row["command"]: Cost(**{name: kinds[name](text) for name, text in row.items()}) for row in rows}  # type: ignore[operator]


def costs_csv(costs: Sequence[Cost]) -> str:
    return csv_text([field.name for field in fields(Cost)], map(astuple, costs))


def spend(command: str, *more: str) -> Cost:
    """Run a command of the guide quietly and return its cost. Raises RunError with its last line if it fails."""
    words = [sys.executable, "-m", "repro", *shlex.split(command)[1:], *more]
    start_s = time.perf_counter()
    with TemporaryFile() as stderr:
        process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=stderr)
        try:
            _, status, usage = os.wait4(process.pid, 0)
        except BaseException:
            process.wait()  # an interrupt reached it too
            raise
        wall_s, code = time.perf_counter() - start_s, os.waitstatus_to_exitcode(status)
        process.returncode = code
        if code:
            stderr.seek(0)
            *_, last = [f"exit code {code}", *stderr.read().decode(errors="replace").splitlines()]
            raise RunError(f"{command}: {last.removeprefix('error: ')}")
    machine = machine_identity("cpu")
    return Cost(
        command=command,
        wall_s=round(wall_s, 1),
        processor_s=round(usage.ru_utime + usage.ru_stime, 1),
        memory_bytes=usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024),
        processor=f"{machine['cpu']}, {machine['cores']} core{'s' * (machine['cores'] != 1)}",
    )


# -- claims by command ------------------------------------------------------------------------------------


def committed(root: Path = RESULTS) -> Iterator[tuple[str, Judged]]:
    """Every claim as judged in the repository, with the command that answers it; the command is empty if no run does."""
    for paper in PAPERS.values():
        rows = read(root / f"claims-{paper.name}.csv")
        command_of = {row["id"]: row["command"] for row in rows}
        flips = read_flips(paper.name, root)
        for each in rejudged(read_claims(paper.claims, paper.name), rows, flips):
            fallback = f"repro claims --paper {paper.name}" if each.finding is not None else ""
            yield command_of[each.claim.id] or fallback, each


def commands(tier: TierName, root: Path = RESULTS) -> dict[str, TierName]:
    """A tier's commands in order, each with the shortest tier that contains it."""
    declared: Mapping[TierName, Sequence[str]] = read_yaml(Path(__file__).with_suffix(".yaml"))
    tiers: dict[str, TierName] = {}
    for name in TIERS:
        for command in declared[name]:
            tiers.setdefault(command, name)
        if name == tier:
            break
    if tier == "all":
        alone = [part for command, _ in committed(root) for part in command.split(" && ") if part]
        tiers |= {command: "all" for command in alone if command not in tiers}
    return tiers


def _row(command: str, judged: Judged) -> dict[str, str]:
    claim = judged.claim
    first, *others = command.split(" && ")
    with_others = f" (with {', '.join(f'`{other}`' for other in others)})" if others else ""
    return {
        "id": claim.id,
        "command": first,
        "statement": claim.statement + with_others,
        "states": value_text(claim.expected.value, claim.expected.unit),
        "allowed": tolerance(claim),
        "ours": our_text(judged),
        "verdict": judged.verdict,
        "role": judged.role or "",
        "reason": judged.reason or ("" if claim.recomputed is None else claim.recomputed.verdict.replace("_", " ")),
    }


def output_of(command: str) -> tuple[str, str]:
    """The title of a command and the file that it writes; the file is empty if it prints."""
    name, *words = shlex.split(command)[1:]
    if name == "claims":
        return "arithmetic on shapes and settings", f"results/figures/claims-{words[-1]}.csv"
    if name != "reproduce":
        return "", ""
    if words[0] == "truth":
        return "servers that others measured", "results/figures/truth/truth.csv"
    entry = figure(words[0])
    names = [words[i + 1] for i, word in enumerate(words) if word == "--platform"] or entry.load().platforms
    paper, _, bare = entry.name.partition("/")
    stems = [View(platform=target, reading=default_reading(target)).stem for target in map(platform, names)]
    return entry.title, " ".join(f"results/figures/{paper}/{bare}-{stem}.csv" for stem in stems)


def steps(root: Path = RESULTS) -> list[Step]:
    costs = read_costs(root / "costs.csv")
    rows = [_row(command, each) for command, each in committed(root) if command]
    return [
        Step(
            command=command,
            tier=tier,
            title=(written := output_of(command))[0],
            file=written[1],
            cost=costs.get(command),
            claims=[row for row in rows if row["command"] == command],
        )
        for command, tier in commands("all", root).items()
    ]


# -- the guide --------------------------------------------------------------------------------------------


def time_text(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.1f} min"


def _sums(all_steps: Sequence[Step], whole: Mapping[str, Cost]) -> Iterator[dict[str, Any]]:
    """A row for each tier: its number of commands and claims, and its cost. ``whole`` holds costs of tiers that ran as one command."""
    names = get_args(TierName)
    for index, name in enumerate(names):
        tier_steps = [step for step in all_steps if step.tier in names[: index + 1]]
        costs = [step.cost for step in tier_steps if step.cost is not None]
        yield {
            "name": name,
            "meant": TIERS[name],
            "commands": len(tier_steps),
            "claims": sum(len(step.claims) for step in tier_steps),
            "processor_s": sum(cost.processor_s for cost in costs),
            "whole": whole.get(f"repro reproduce --tier {name}"),
            "without_cost": len(tier_steps) - len(costs),
            "memory_bytes": max((cost.memory_bytes for cost in costs), default=0),
        }


def guide(root: Path = RESULTS) -> str:
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent), trim_blocks=True, lstrip_blocks=True, autoescape=False
    )
    environment.filters |= {"time": time_text, "cell": lambda text: re.sub(r"\s+", " ", text).replace("|", "\\|")}
    all_steps = steps(root)
    rows = [_row("", each) for command, each in committed(root) if not command]
    processors = sorted({step.cost.processor for step in all_steps if step.cost is not None})
    template = environment.get_template("artifact.md")
    return template.render(
        tiers=[*_sums(all_steps, read_costs(root / "costs.csv"))], steps=all_steps, left=rows, processors=processors
    )
