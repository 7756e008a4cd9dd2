"""Compares two sides' runs, paired by seed and by everything else that is equal: the ratio of a metric, second side over first.

A side is written as ``WHERE@NAME=VALUE,NAME=VALUE``. WHERE is a folder of runs. Among the runs of one folder it is a system or the name of
a run, in which * and ? match anything. NAME is a field of a cell, a knob or ``code``; each part may be left out. A run that both sides
match belongs to the more specific side: ``laps@seed=0 laps`` compares one seed with all others.

A side takes all runs in a folder as they are, whatever code made them. They can also be written as a tidy table.
"""

import itertools
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from difflib import get_close_matches
from fnmatch import fnmatchcase
from pathlib import Path
from statistics import fmean, geometric_mean
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

from engines.errors import RunError, UserError, require
from engines.knobs import Range, check_value, knobs_of
from repro.files import readable_folder, rewriting
from repro.runs.cell import COMPARISON, Scalar, plain
from repro.runs.statistics import Interval, paired_ratio
from repro.runs.store import SUFFIX, UNREADABLE, StoredRun, read_run
from repro.runs.system import settings_of

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True, kw_only=True)
class Folder:
    root: Path
    runs: tuple[StoredRun, ...]
    """Runs in the order of their file names."""
    left_out: Mapping[str, str]
    """File -> why it is left out."""

    @property
    def warning(self) -> str | None:
        if not self.left_out:
            return None
        name, reason = next(iter(self.left_out.items()))
        more = f", and {len(self.left_out) - 1} more" if len(self.left_out) > 1 else ""
        return f"left out of {self.root}: {name} ({reason}){more}"


def folder_of(root: Path, name: str = "folder") -> Folder:
    """Read all runs of a folder. Raises UserError if it holds none."""
    by_content: dict[bytes, StoredRun] = {}
    left_out = {}
    for file in run_files(readable_folder(name, root)):
        try:
            run = read_run(file)
        except RunError as error:
            left_out[file.name] = str(error).removeprefix(f"{file.name}: ")
        except UNREADABLE as error:
            left_out[file.name] = f"it lacks {error}" if isinstance(error, KeyError) else str(error)
        else:
            # A copy is no second run: keep the file that has the run's own name.
            other = by_content.get(run.content)
            kept = run if other is None or file.name.startswith(run.cell.folder_name) else other
            by_content[run.content] = kept
            if other is not None:
                copy = other if kept is run else run
                left_out[copy.file.name] = f"a copy of {kept.file.name}"
    runs = sorted(by_content.values(), key=lambda run: run.file)
    folder = Folder(root=root, runs=tuple(runs), left_out=left_out)
    if not runs:
        hint = f" that can be read ({folder.warning})" if left_out else ""
        raise UserError(f"{name}={str(root)!r} holds no run{hint}: give a folder that runs were made in (--result-dir)")
    return folder


def run_files(root: Path) -> list[Path]:
    return sorted(file for file in root.glob(f"*{SUFFIX}") if not file.name.startswith(".") and file.is_file())


def name_of(run: StoredRun) -> str:
    return run.file.name.removesuffix(SUFFIX)


def commit_of(run: StoredRun) -> str | None:
    commit = run.provenance["git"]["commit"]
    return None if commit is None else str(commit)


def numbers_of(run: StoredRun) -> dict[str, float | None]:
    """Every metric that is a number or None. The parts of a structured metric have dotted names, ``e2el_s.mean``."""
    return dict(_flat(run.summary))


def _flat(found: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float | None]]:
    for name, value in found.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        elif value is None or isinstance(value, int | float):
            yield f"{prefix}{name}", value


def _row(run: StoredRun) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """The cell's fields; its knobs; and how the run came about, with every metric."""
    cell = run.cell.written()
    fields = {"run": name_of(run), **{name: cell[name] for name in FIELDS}}
    origin = {"obtained": run.obtained, "valid": run.validity.valid, "commit": commit_of(run), "code": run.code_digest}
    # The column tells rows of different machines apart.
    machine = {} if run.machine is None else {"machine": json.dumps(run.machine, sort_keys=True)}
    ran = {} if run.ran is None else {"ran": run.ran}
    rest = {**origin, **machine, **ran, **numbers_of(run)}
    # Keep the names of knobs and metrics distinct, because a plug-in may choose any name.
    knobs = {
        f"knob.{name}" if name in fields or name in rest else name: cell["knobs"][name] for name in run.cell.requested
    }
    return fields, knobs, rest


def frame_of(runs: Sequence[StoredRun]) -> "pd.DataFrame":
    """A table with a row per run: fields, knobs by name, then the rest as it comes. Values that a run lacks are missing."""
    import pandas as pd

    fields, knobs, rest = (list(parts) for parts in zip(*map(_row, runs), strict=True))
    names = [*fields[0], *sorted({name for row in knobs for name in row}), *dict.fromkeys(itertools.chain(*rest))]
    return pd.DataFrame([{**a, **b, **c} for a, b, c in zip(fields, knobs, rest, strict=True)], columns=names)


def write_frame(frame: "pd.DataFrame", kind: str, out: Path) -> None:
    """Write a table as csv or parquet. For parquet, a knob with values of several types becomes text, because a column has one type."""
    from pandas.api.types import infer_dtype

    with rewriting(out) as temporary:
        if kind == "csv":
            temporary.write_text(frame.to_csv(index=False), encoding="utf-8")
        else:
            mixed = [name for name in frame if infer_dtype(frame[name], skipna=True).startswith("mixed")]
            texts = {name: frame[name].map(str, na_action="ignore") for name in mixed}
            frame.assign(**texts).to_parquet(temporary, index=False)


FIELDS = ("system", "dataset", "platform", "executor", "rate", "seed")
CODE = "code"
"""Selects runs by the beginning of their code's digest."""


@dataclass(frozen=True, kw_only=True)
class Side:
    name: str
    """The argument's name for messages: a or b."""
    said: str
    runs: tuple[StoredRun, ...]
    warning: str | None = None
    """Tells which files of the side's folder could not be read."""

    def __str__(self) -> str:
        return f"{self.name}={self.said!r}"


def sides_of(a: object, b: object, root: Path) -> tuple[Side, Side]:
    """Resolve both sides. A text selects among the runs in ``root``, unless it names a folder. A list of runs is taken as it is."""
    folders: dict[Path, Folder] = {}

    def side(name: str, given: object) -> Side:
        if isinstance(given, str | Path):
            return _selected(name, str(given), root, folders)
        if isinstance(given, Sequence) and given and all(isinstance(run, StoredRun) for run in given):
            return Side(name=name, said=f"{len(given)} runs", runs=tuple(given))
        raise UserError(f"{name}={given!r} is no side to compare: give a folder, a selector or a list of stored runs")

    first, second = side("a", a), side("b", b)
    left, right = ({run.file for run in each.runs} for each in (first, second))
    if left == right:
        raise UserError(f"{first} and {second} are the same runs: tell them apart, as in laps@code=CODE")
    if left < right:
        return first, replace(second, runs=tuple(run for run in second.runs if run.file not in left))
    if right < left:
        return replace(first, runs=tuple(run for run in first.runs if run.file not in right)), second
    require(not left & right, f"{first} and {second} have {len(left & right)} runs in common: say more of one of them")
    return first, second


def _selected(name: str, text: str, root: Path, read: dict[Path, Folder]) -> Side:
    require(bool(text.strip()), f"{name}={text!r} says nothing: give a folder, a system or a run's name")
    selector, _, conditions = (text, "", "") if holds_runs(text) else text.partition("@")
    is_folder = holds_runs(selector) or (bool(selector) and Path(selector).is_dir())
    folder = Path(selector) if is_folder else root
    if folder not in read:
        read[folder] = folder_of(folder, name if is_folder else "result_dir")
    runs: Sequence[StoredRun] = read[folder].runs
    if selector and not is_folder:
        pattern = selector.removesuffix(SUFFIX)
        runs = [run for run in runs if run.cell.system == selector or fnmatchcase(name_of(run), pattern)]
        systems = ", ".join(sorted({run.cell.system for run in read[folder].runs}))
        require(
            runs != [],
            f"{name}={text!r} is no folder, and no system or run in {root}: systems there are {systems}; or give another "
            f"--result-dir",
        )
    for condition in filter(None, conditions.split(",")):
        runs = _matching(runs, condition, f"{name}={text!r}")
    return Side(name=name, said=text, runs=tuple(runs), warning=read[folder].warning)


def holds_runs(text: str) -> bool:
    with suppress(OSError, ValueError):
        return bool(text.strip()) and Path(text).is_dir() and bool(run_files(Path(text)))
    return False


def _matching(runs: Sequence[StoredRun], condition: str, who: str) -> list[StoredRun]:
    name, equals, text = condition.partition("=")
    require(
        bool(name and equals and text), f"{who}: {condition!r} is no condition: write NAME=VALUE, several with commas"
    )
    try:
        value = None if text == "inf" else json.loads(text)
    except ValueError:
        value = text
    matches = [run for run in runs if _meets(run, name, value, text)]
    if not matches:
        choices = {said_of(name, value_of(run, name)) for run in runs}
        if choices == {"default"} and not any(name in _defaults(run.cell.system) for run in runs):
            knobs = sorted({knob for run in runs for knob in run.cell.requested})
            raise UserError(f"{who}: {name!r} is unknown: use {', '.join((*FIELDS, CODE, *knobs))}")
        raise UserError(f"{who}: no run has {condition}: use {', '.join(sorted(choices))}")
    return matches


def value_of(run: StoredRun, name: str) -> Any:
    """A run's value of a field, a knob (None at its default) or the code."""
    if name == CODE:
        return run.code_digest
    return getattr(run.cell, name) if name in FIELDS else run.cell.requested.get(name)


def _meets(run: StoredRun, name: str, value: Any, text: str) -> bool:
    stored = value_of(run, name)
    if name == CODE:
        return stored is not None and str(stored).startswith(text)
    if stored is None and name not in FIELDS:
        return value is None or text == "default" or _defaults(run.cell.system).get(name) == value
    return (stored == value and isinstance(stored, bool) == isinstance(value, bool)) or stored == text


def _defaults(system: str) -> dict[str, Any]:
    """The default knobs of a system; empty if the system no longer exists."""
    with suppress(UserError, RunError, ImportError):
        return {name: knob.default for kind in settings_of(system) for name, knob in knobs_of(kind).items()}
    return {}


def said_of(name: str, value: Any) -> str:
    """A value as it is written in a condition."""
    if value is None:
        return "inf" if name == "rate" else "default"
    return f"{value:g}" if isinstance(value, float) else str(value)


def differing(runs: Iterable[StoredRun]) -> list[str]:
    """Names in which runs differ, apart from the seed: fields and knobs, or the code if nothing else differs."""
    all_runs = list(runs)
    knobs = sorted({name for run in all_runs for name in run.cell.requested})
    names = [name for name in (*FIELDS, *knobs) if name != "seed"]
    varied = [name for name in names if len({value_of(run, name) for run in all_runs}) > 1]
    return varied or ([CODE] if len({run.code_digest for run in all_runs}) > 1 else [])


Tolerance = Annotated[float, Range(0, 10)]
Verdict = Literal["higher", "lower", "same", "unclear"]
Setting = tuple[tuple[str, Scalar], ...]
TOLERANCE = 0.02


@dataclass(frozen=True, kw_only=True)
class Change:
    """The change of one setting, over its repeats."""

    setting: Setting
    """The values that distinguish this row from others; empty for the row of all."""
    a: float
    b: float
    """Geometric means."""
    ratio: Interval
    """b over a, pair by pair. It has no interval if there is one pair, or a value that is not positive."""
    tolerance: float
    ran: tuple[str, str] = ("", "")
    """The settings that ran on each side, as options, if the runs tell."""

    @property
    def verdict(self) -> Verdict:
        """higher or lower if the whole interval lies beyond the tolerance, same if it lies within, else unclear."""
        low, high, limit = self.ratio.low, self.ratio.high, 1 + self.tolerance
        if low is None or high is None:
            return "unclear"
        if low > limit or high < 1 / limit:
            return "higher" if low > limit else "lower"
        return "same" if low >= 1 / limit and high <= limit else "unclear"

    @property
    def is_changed(self) -> bool:
        return self.verdict in ("higher", "lower")


@dataclass(frozen=True, kw_only=True)
class Comparison:
    metric: str
    tolerance: float
    changes: tuple[Change, ...]
    """A row for each setting that both sides have."""
    overall: Change | None
    """All settings, by each seed's geometric mean; None for one setting, or if settings have different seeds."""
    is_in_order: bool
    """Whether the sides share no seed. Runs are then paired in order: first with first, and so on."""
    num_unpaired: int
    """Runs without a partner."""
    num_invalid: int
    """Pairs left out because one of the two is INVALID."""
    num_undefined: int
    """Pairs left out because one of the two lacks the metric."""

    @property
    def rows(self) -> tuple[Change, ...]:
        return self.changes if self.overall is None else (*self.changes, self.overall)

    @property
    def is_changed(self) -> bool:
        return any(row.is_changed for row in self.rows)


class Pair(NamedTuple):
    a: StoredRun
    b: StoredRun


def compare_sides(a: Side, b: Side, metric: str, tolerance: float = TOLERANCE) -> Comparison:
    check_value(Tolerance, "tolerance", plain(tolerance))
    _check_metric(metric, (*a.runs, *b.runs))
    names = _equal_names(a, b)
    first, second = _by_setting(a, names), _by_setting(b, names)
    is_in_order = not {run.cell.seed for run in a.runs} & {run.cell.seed for run in b.runs}
    pairs: dict[Setting, dict[int, Pair]] = {}
    for setting in sorted(first.keys() & second.keys(), key=_order):
        ours, theirs = first[setting], second[setting]
        if is_in_order:
            in_order = zip(
                [ours[seed] for seed in sorted(ours)], [theirs[seed] for seed in sorted(theirs)], strict=False
            )
            pairs[setting] = {index: Pair(*runs) for index, runs in enumerate(in_order)}
        else:
            pairs[setting] = {seed: Pair(ours[seed], theirs[seed]) for seed in sorted(ours) if seed in theirs}
    num_paired = sum(map(len, pairs.values()))
    if not num_paired:
        raise UserError(
            f"{a} and {b} have no pair of runs that are equal in {', '.join((*names, 'seed'))}: make the same cells"
        )
    all_pairs = [pair for group in pairs.values() for pair in group.values()]
    invalid = [pair for pair in all_pairs if not _is_valid(pair)]
    values = {setting: _values(group, metric) for setting, group in pairs.items()}
    varied = [name for name in names if len({dict(setting)[name] for setting in values}) > 1]
    changes = {
        setting: replace(
            _change(tuple((name, dict(setting)[name]) for name in varied), by_seed, tolerance),
            ran=_ran(pairs[setting].values()),
        )
        for setting, by_seed in values.items()
        if by_seed
    }
    return Comparison(
        metric=metric,
        tolerance=tolerance,
        changes=tuple(changes.values()),
        overall=_overall([values[setting] for setting in changes], tolerance),
        is_in_order=is_in_order,
        num_unpaired=len(a.runs) + len(b.runs) - 2 * num_paired,
        num_invalid=len(invalid),
        num_undefined=len(all_pairs) - len(invalid) - sum(map(len, values.values())),
    )


def _ran(pairs: Iterable[Pair]) -> tuple[str, str]:
    first, second = ("; ".join(dict.fromkeys(run.ran or "" for run in side)) for side in zip(*pairs, strict=True))
    return first, second


def _check_metric(metric: object, runs: Sequence[StoredRun]) -> None:
    require(isinstance(metric, str), f"metric={metric!r} must be a text: compare one metric at a time")
    metrics = dict.fromkeys(name for run in runs for name in numbers_of(run))
    if metric in metrics:
        return
    parts = [name for name in metrics if name.startswith(f"{metric}.")]
    if parts:
        raise UserError(f"metric={metric!r} is several numbers: use one of {', '.join(parts)}")
    near = get_close_matches(str(metric), metrics, 5, 0.6) or [*metrics]
    raise UserError(f"metric={metric!r} is unknown to these runs: use one of {', '.join(near)}")


def _equal_names(a: Side, b: Side) -> list[str]:
    """Fields and knobs in which runs must equal their partners: all but the seed and those that tell the sides apart."""
    runs = (*a.runs, *b.runs)
    knobs = sorted({name for run in runs for name in run.cell.requested} - {COMPARISON})

    def values(side: Side, name: str) -> set[Scalar]:
        return {value_of(run, name) for run in side.runs}

    return [name for name in (*FIELDS, *knobs) if name != "seed" and values(a, name) & values(b, name)]


def _by_setting(side: Side, names: Sequence[str]) -> dict[Setting, dict[int, StoredRun]]:
    """Runs by setting and seed. Raises UserError for two runs in one place."""
    by_setting: dict[Setting, dict[int, StoredRun]] = {}
    for run in side.runs:
        by_seed = by_setting.setdefault(tuple((name, value_of(run, name)) for name in names), {})
        if (other := by_seed.setdefault(run.cell.seed, run)) is not run:
            diffs = differing((other, run))
            fix = f"name one with @{diffs[0]}={said_of(diffs[0], value_of(other, diffs[0]))}" if diffs else "remove one"
            raise UserError(
                f"{side} has two runs for one of the other side, {name_of(other)} and {name_of(run)}, which differ in "
                f"{', '.join(diffs) or 'nothing'}: {fix}"
            )
    return by_setting


def _order(setting: Setting) -> list[tuple[bool, bool, float, str]]:
    """Sort key: defaults come first, numbers by size, and the rate "all at once" last."""
    values = [math.inf if (name, value) == ("rate", None) else value for name, value in setting]
    return [
        (value is not None, isinstance(value, str), 0.0 if isinstance(value, str) else float(value or 0), str(value))
        for value in values
    ]


def _is_valid(pair: Pair) -> bool:
    return pair.a.validity.valid and pair.b.validity.valid


def _values(pairs: Mapping[int, Pair], metric: str) -> dict[int, tuple[float, float]]:
    """The two values of each valid pair that has both."""
    values = {}
    for seed, pair in pairs.items():
        first, second = (numbers_of(run).get(metric) for run in pair)
        if _is_valid(pair) and first is not None and second is not None:
            values[seed] = (float(first), float(second))
    return values


def _change(setting: Setting, values: Mapping[int, tuple[float, float]], tolerance: float) -> Change:
    a, b = ({seed: pair[side] for seed, pair in values.items()} for side in (0, 1))
    first, second = (_mean([*side.values()]) for side in (a, b))
    return Change(setting=setting, a=first, b=second, ratio=paired_ratio(b, a), tolerance=tolerance)


def _overall(rows: Sequence[Mapping[int, tuple[float, float]]], tolerance: float) -> Change | None:
    """The change over all settings. A seed's value is the geometric mean over settings, because seeds are the repeats."""
    if len(rows) < 2 or any(row.keys() != rows[0].keys() for row in rows):
        return None
    means = {seed: (_mean([row[seed][0] for row in rows]), _mean([row[seed][1] for row in rows])) for seed in rows[0]}
    return _change((), means, tolerance)


def _mean(values: Sequence[float]) -> float:
    """The geometric mean if all values are positive, or else the arithmetic mean."""
    return fmean(values) if min(values) <= 0 else geometric_mean(values)
