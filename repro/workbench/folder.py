"""All runs that lie in a folder, by whatever code, as they are: what is compared and exported; and runs as a tidy table."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engines.errors import RunError, UserError
from repro.files import readable_folder, rewriting
from repro.runs.store import SUFFIX, UNREADABLE, StoredRun, read_run

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True, kw_only=True)
class Folder:
    root: Path
    runs: tuple[StoredRun, ...]
    """By the names of their files."""
    left_out: Mapping[str, str]
    """File -> why it holds no run that can be read."""

    @property
    def warning(self) -> str | None:
        if not self.left_out:
            return None
        name, why = next(iter(self.left_out.items()))
        more = f", and {len(self.left_out) - 1} more" if len(self.left_out) > 1 else ""
        return f"left out of {self.root}: {name} ({why}){more}"


def folder_of(root: Path, name: str = "folder") -> Folder:
    """Refuses one without any run."""
    read: dict[bytes, StoredRun] = {}
    left_out = {}
    for file in run_files(readable_folder(name, root)):
        try:
            run = read_run(file)
        except RunError as error:
            left_out[file.name] = str(error).removeprefix(f"{file.name}: ")
        except UNREADABLE as error:
            left_out[file.name] = f"it lacks {error}" if isinstance(error, KeyError) else str(error)
        else:
            # A copy is no second run; of two the one counts that has the run's name.
            other = read.get(run.content)
            kept = run if other is None or file.name.startswith(run.cell.folder_name) else other
            read[run.content] = kept
            if other is not None:
                copy = other if kept is run else run
                left_out[copy.file.name] = f"a copy of {kept.file.name}"
    runs = sorted(read.values(), key=lambda run: run.file)
    found = Folder(root=root, runs=tuple(runs), left_out=left_out)
    if not runs:
        why = f" that can be read ({found.warning})" if left_out else ""
        raise UserError(f"{name}={str(root)!r} holds no run{why}: give a folder that runs were made in (--result-dir)")
    return found


def run_files(root: Path) -> list[Path]:
    return sorted(file for file in root.glob(f"*{SUFFIX}") if not file.name.startswith(".") and file.is_file())


def name_of(run: StoredRun) -> str:
    return run.file.name.removesuffix(SUFFIX)


def commit_of(run: StoredRun) -> str | None:
    found = run.provenance["git"]["commit"]
    return None if found is None else str(found)


def numbers_of(run: StoredRun) -> dict[str, float | None]:
    """Every metric that is a number, or None; one of several numbers has their names behind its own, ``e2el_s.mean``."""
    return dict(_flat(run.summary))


def _flat(found: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float | None]]:
    for name, value in found.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        elif value is None or isinstance(value, int | float):
            yield f"{prefix}{name}", value


def _row(run: StoredRun) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """What was asked, by field and by knob; how it came about, and every metric."""
    cell = run.cell.written()
    names = ("system", "dataset", "platform", "executor", "rate", "seed")
    asked = {"run": name_of(run), **{name: cell[name] for name in names}}
    how = {"obtained": run.obtained, "valid": run.validity.valid, "commit": commit_of(run), "code": run.code_digest}
    # Rows of unlike machines are told apart by it.
    machine = {} if run.machine is None else {"machine": json.dumps(run.machine, sort_keys=True)}
    made = {**how, **machine, **numbers_of(run)}
    # Knobs and metrics are named apart from each other; those of a plug-in may be named as anything.
    knobs = {f"knob.{name}" if name in asked or name in made else name: cell["knobs"][name] for name in run.cell.asked}
    return asked, knobs, made


def frame_of(runs: Sequence[StoredRun]) -> pd.DataFrame:
    """A row a run: what was asked, knobs by name, then the rest as it comes. What a run has no value of is missing there."""
    import pandas as pd

    asked, knobs, made = (list(parts) for parts in zip(*map(_row, runs), strict=True))
    names = [*asked[0], *sorted({name for each in knobs for name in each}), *dict.fromkeys(itertools.chain(*made))]
    return pd.DataFrame([{**a, **b, **c} for a, b, c in zip(asked, knobs, made, strict=True)], columns=names)


def write_frame(frame: pd.DataFrame, kind: str, out: Path) -> None:
    """A knob whose values are of several kinds is written as text: a column of parquet has one kind."""
    from pandas.api.types import infer_dtype

    with rewriting(out) as temporary:
        if kind == "csv":
            temporary.write_text(frame.to_csv(index=False), encoding="utf-8")
        else:
            mixed = [name for name in frame if infer_dtype(frame[name], skipna=True).startswith("mixed")]
            texts = {name: frame[name].map(str, na_action="ignore") for name in mixed}
            frame.assign(**texts).to_parquet(temporary, index=False)
