"""What a drawn figure, or a file of claims, rests on, in a JSON file beside it: runs, code, stated values, its own files."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any

from engines.errors import UserError
from repro import paths
from repro.files import replace_text
from repro.reports import claims_file
from repro.reports.claims import Judged
from repro.reports.claims_file import names_of
from repro.reports.figures import PAPERS, FigureEntry, Paper, Rendered, View
from repro.reports.paper import FOLDERS, load_claims, load_figures
from repro.reports.roles import MOST_ALONE
from repro.runs.code import DIGEST_LENGTH, code_of
from repro.runs.seal import is_whole, sealed
from repro.runs.store import StoredRun

SCHEMA_VERSION = 2
NUMBERS_LENGTH = 8


def write_stamp(entry: FigureEntry, view: View, runs: Sequence[StoredRun], rendered: Rendered) -> Path:
    """``<name>-<stem>.json``; a figure of arithmetic alone has no runs."""
    path = rendered.files[0].with_suffix(".json")
    value = {
        "schema_version": SCHEMA_VERSION,
        "figure": entry.name,
        "platform": view.platform.name,
        "executor": view.platform.executor,
        "reading": view.reading,
        "accuracy": view.accuracy,
        "num_runs": view.num_runs,
        "knobs": dict(view.knobs),
        "rates": list(view.rates),
        "notes": list(rendered.notes),
        "drawn_by": drawn_by(entry.module),
        "stated": stated(entry.name.partition("/")[0]),
        "files": {file.name: _digest(file) for file in rendered.files},
        **({"runs": [_run(run) for run in runs]} if len(runs) <= MOST_ALONE else _many(runs)),
    }
    return _write(path, value)


def save_claims(paper: Paper, judged: Sequence[Judged], path: Path) -> Path:
    """The CSV and its stamp."""
    claims_file.save(path, judged)
    value = {"schema_version": SCHEMA_VERSION, "drawn_by": answered_by(paper), "files": {path.name: _digest(path)}}
    _write(path.with_suffix(".json"), value)
    return path


def save_flips(paper: Paper, path: Path, **told: Any) -> Path:
    """The stamp of what ``repro.reports.flips`` wrote: in which size, of which changes and claims."""
    value = {"schema_version": SCHEMA_VERSION, "drawn_by": flipped_by(paper), "files": {path.name: _digest(path)}}
    return _write(path.with_suffix(".json"), {**value, **told})


def _write(path: Path, value: Mapping[str, Any]) -> Path:
    return replace_text(path, json.dumps(sealed(value), indent=1, ensure_ascii=False, allow_nan=False) + "\n")


def drawn_by(*modules: str) -> str:
    """Digest of the code that makes a figure of runs: its modules, those of their packages and of ``repro.reports``
    that they import, and what these import themselves."""
    own = {module.rpartition(".")[0] or module for module in modules}
    return code_of(modules, (*sorted(f"{package}." for package in own), "paper_figures.", "repro.reports.")).digest


def answered_by(paper: Paper) -> str:
    """Digest of the code that answers a paper's claims from runs."""
    return drawn_by(*(entry.module for entry in paper.entries), "repro.reports.evidence", "repro.reports.stamp")


def flipped_by(paper: Paper) -> str:
    """Digest of the code that finds the flips of a paper."""
    return drawn_by(*(entry.module for entry in paper.entries), "repro.reports.flips", "repro.reports.stamp")


def stated(paper: str) -> str | None:
    """Digest of the numbers that a paper states, which its figures show; None of a paper elsewhere."""
    if paper not in PAPERS:
        return None
    values = [
        [(claim.id, claim.expected.value) for claim in load_claims(paper, paths.PAPER)],
        [(figure.id, figure.values) for figure in load_figures(paper, paths.PAPER)],
        *((table.name, table.read_text("utf-8")) for table in sorted((paths.PAPER / FOLDERS[paper]).glob("*.csv"))),
    ]
    return hashlib.sha256(repr(values).encode()).hexdigest()[:DIGEST_LENGTH]


def read_stamp(path: Path) -> dict[str, Any]:
    try:
        value: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        version = value["schema_version"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise UserError(f"{path} cannot be read ({type(error).__name__}): draw its figure again") from error
    if version != SCHEMA_VERSION:
        raise UserError(f"{path} has schema_version={version}, not {SCHEMA_VERSION}: draw its figure again")
    if not is_whole(value):
        raise UserError(f"{path.name} is not as it was written: draw its figure again")
    return value


def changed_files(stamp: Mapping[str, Any], folder: Path) -> list[str]:
    """Files that are missing, or not as they were made."""
    return [
        name
        for name, digest in stamp["files"].items()
        if not (folder / name).is_file() or _digest(folder / name) != digest
    ]


def _many(runs: Sequence[StoredRun]) -> dict[str, Any]:
    """One name for the folders of all runs, the runs by how they came about, with the last time of each, and by folder the
    place of each among these, and its numbers."""
    groups: dict[str, dict[str, Any]] = {}
    each = []
    for entry in sorted(map(_run, runs), key=itemgetter("folder")):
        del entry["folder"]
        finished, numbers = entry.pop("finished_utc"), entry.pop("numbers", "")
        group = groups.setdefault(json.dumps(entry, sort_keys=True), {**entry, "count": 0, "finished_utc": finished})
        group["count"] += 1
        group["finished_utc"] = max(group["finished_utc"], finished)
        each.append(f"{list(groups.values()).index(group)}:{numbers}")
    folders = name_of(run.cell.folder_name for run in runs)
    return {"folders": folders, "runs": list(groups.values()), "each": " ".join(each)}


def runs_of(stamp: Mapping[str, Any], folders: Iterable[str]) -> dict[str, Mapping[str, Any]]:
    """Every run of a figure by its folder, of which ``folders`` are all: code, how obtained and, of a simulated one, numbers."""
    if "folders" not in stamp:
        return {run["folder"]: run for run in stamp["runs"]}
    entries = (entry.split(":") for entry in stamp.get("each", "").split())
    of_groups = [{**stamp["runs"][int(group)], "numbers": numbers} for group, numbers in entries]
    return dict(zip(sorted(folders), of_groups, strict=False))


def numbers_of(summary: Mapping[str, Any]) -> str:
    """A digest of a run's numbers to six places: processors differ in the last."""
    text = json.dumps(_to_six_places(summary), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:NUMBERS_LENGTH]


def _to_six_places(value: Any) -> Any:
    match value:
        case float():
            return f"{value:.6g}"
        case Mapping():
            return {name: _to_six_places(part) for name, part in value.items()}
        case list() | tuple():
            return [_to_six_places(part) for part in value]
    return value


def name_of(folders: Iterable[str]) -> str:
    """Number of these folders, and a digest of their names."""
    (name,) = names_of(list(folders), most=0)
    return name


def _run(run: StoredRun) -> dict[str, Any]:
    return {
        "folder": run.cell.folder_name,
        **({} if run.machine else {"numbers": numbers_of(run.summary)}),
        "obtained": run.obtained,
        "valid": run.validity.valid,
        "code": run.manifest["code"]["digest"],
        "session": run.provenance.get("sitting"),
        "commit": run.provenance["git"]["commit"],
        "finished_utc": run.provenance["finished_utc"],
    }


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
