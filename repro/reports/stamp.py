"""What a drawn figure rests on, in a JSON file beside it: its runs, their code, and its own files."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from engines.errors import UserError
from repro.files import replace_text
from repro.reports.claims_file import names_of
from repro.reports.figures import FigureEntry, Rendered, View
from repro.reports.roles import MOST_ALONE
from repro.runs.store import StoredRun

SCHEMA_VERSION = 1


def write_stamp(entry: FigureEntry, view: View, runs: Sequence[StoredRun], rendered: Rendered) -> Path:
    """``<name>-<stem>.json``; a figure of arithmetic alone has no runs."""
    path = rendered.files[0].with_suffix(".json")
    value = {
        "schema_version": SCHEMA_VERSION,
        "figure": entry.name,
        "platform": view.platform.name,
        "executor": view.platform.executor,
        "reading": view.reading,
        "num_runs": view.num_runs,
        "knobs": dict(view.knobs),
        "rates": list(view.rates),
        "notes": list(rendered.notes),
        "files": {file.name: _digest(file) for file in rendered.files},
        **({"runs": [_run(run) for run in runs]} if len(runs) <= MOST_ALONE else _many(runs)),
    }
    return replace_text(path, json.dumps(value, indent=1, ensure_ascii=False, allow_nan=False) + "\n")


def read_stamp(path: Path) -> dict[str, Any]:
    try:
        value: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        version = value["schema_version"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise UserError(f"{path} cannot be read ({type(error).__name__}): draw its figure again") from error
    if version != SCHEMA_VERSION:
        raise UserError(f"{path} has schema_version={version}, not {SCHEMA_VERSION}: draw its figure again")
    return value


def changed_files(stamp: Mapping[str, Any], folder: Path) -> list[str]:
    """Files of the figure that are missing, or not as they were drawn."""
    return [
        name
        for name, digest in stamp["files"].items()
        if not (folder / name).is_file() or _digest(folder / name) != digest
    ]


def _many(runs: Sequence[StoredRun]) -> dict[str, Any]:
    """One name for the folders of all runs, and the runs by how they came about, with the last time of each."""
    groups: dict[str, dict[str, Any]] = {}
    for entry in map(_run, runs):
        del entry["folder"]
        finished = entry.pop("finished_utc")
        group = groups.setdefault(json.dumps(entry, sort_keys=True), {**entry, "count": 0, "finished_utc": finished})
        group["count"] += 1
        group["finished_utc"] = max(group["finished_utc"], finished)
    return {"folders": name_of(run.cell.folder_name for run in runs), "runs": list(groups.values())}


def name_of(folders: Iterable[str]) -> str:
    """Number of these folders, and a digest of their names."""
    (name,) = names_of(list(folders), most=0)
    return name


def _run(run: StoredRun) -> dict[str, Any]:
    return {
        "folder": run.cell.folder_name,
        "obtained": run.obtained,
        "valid": run.validity.valid,
        "code": run.manifest["code"]["digest"],
        "session": run.provenance.get("session"),
        "commit": run.provenance["git"]["commit"],
        "finished_utc": run.provenance["finished_utc"],
    }


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
