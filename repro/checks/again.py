"""Simulated runs behind committed figures, made again: a sample for each code that made them."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from engines.errors import RunError, UserError
from repro.checks.held import Pair
from repro.checks.redrawn import make_anew
from repro.checks.results import Checked, Today, asked, figures
from repro.reports.stamp import numbers_of, read_stamp, runs_of
from repro.runs.experiment import Experiment


@dataclass(frozen=True, kw_only=True)
class _Drawn:
    """A run, and the numbers that the first figure which shows it has of it."""

    experiment: Experiment
    numbers: str
    path: Path


def make_again(
    root: Path, today: Today, runs: Path, most: int, seed: int = 0, advance: Callable[[], None] = lambda: None
) -> list[Checked]:
    """At most ``most`` runs for each pair of a stored run's code and today's, drawn with ``seed``; and what other code drew and judged,
    from the runs stored in ``runs``. What differs is a fault, and its pair of code is not held by ``today``."""
    seen, differing = _runs_again(root, today, most, seed, advance)
    anew, others = make_anew(root, today, runs, advance)
    today.held = today.held.after({**seen, **anew})
    return [*differing, *others]


def _runs_again(
    root: Path, today: Today, most: int, seed: int, advance: Callable[[], None]
) -> tuple[dict[Pair, int], list[Checked]]:
    seen: dict[Pair, int] = {}
    faults: list[_Drawn] = []
    for pair, drawn in sorted(_by_code(root, today).items()):
        sample = random.Random(f"{seed} {pair}").sample(drawn, min(most, len(drawn)))
        differing = []
        for each in sample:
            if _numbers(each.experiment) != each.numbers:
                differing.append(each)
            advance()
        faults += differing
        seen[pair] = 0 if differing else len(sample)
    return seen, [_fault(path, [each for each in faults if each.path == path]) for path in _paths(faults)]


def _paths(drawn: Sequence[_Drawn]) -> list[Path]:
    return sorted({each.path for each in drawn})


def _by_code(root: Path, today: Today) -> dict[Pair, list[_Drawn]]:
    found: dict[Pair, dict[str, _Drawn]] = {}
    for path in sorted(figures(root)):
        if not path.is_file():
            continue
        try:
            stamp = read_stamp(path)
            experiments = {each.cell.folder_name: each for each in asked(stamp, today)}
        except (UserError, AttributeError, LookupError, TypeError, ValueError):
            continue  # which is said where its figure is compared
        for folder, run in runs_of(stamp, experiments).items():
            if run.get("numbers") and (experiment := experiments.get(folder)) is not None:
                drawn = _Drawn(experiment=experiment, numbers=run["numbers"], path=path)
                found.setdefault((run["code"], experiment.code.digest), {}).setdefault(folder, drawn)
    return {pair: [runs[folder] for folder in sorted(runs)] for pair, runs in found.items()}


def _numbers(experiment: Experiment) -> str:
    try:
        return numbers_of(experiment.family.summarize(experiment.run()))
    except (UserError, RunError) as error:
        return str(error)


def _fault(path: Path, differing: Sequence[_Drawn]) -> Checked:
    first = min(each.experiment.cell.folder_name for each in differing)
    said = f"made again, {first} has other numbers" + (f", and {len(differing) - 1} more" if len(differing) > 1 else "")
    return Checked(figure=path.stem, path=path, status="stale", is_measured=False, reason=said)
