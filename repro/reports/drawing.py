"""A figure's files and its stamp, which appear together or not at all."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from repro.files import keep_mode, writable_file
from repro.reports.figures import FigureEntry, Rendered, View
from repro.reports.stamp import write_stamp
from repro.runs.store import StoredRun


def draw(entry: FigureEntry, view: View, runs: Sequence[StoredRun], out: Path) -> Rendered:
    with _together(out, entry.name.replace("/", "-")) as folder:
        rendered = entry.load().render(runs, view, folder)
        write_stamp(entry, view, runs, rendered)
    return replace(rendered, files=tuple(out / path.relative_to(folder) for path in rendered.files))


@contextmanager
def _together(out: Path, name: str) -> Iterator[Path]:
    """Yields a folder to write into; what is in it moves into ``out`` at the end. Errors name files as they will be."""
    partial = out / f".{name}.partial-{os.getpid()}"
    try:
        partial.mkdir(parents=True)
        yield partial
        made = sorted(path for path in partial.rglob("*") if path.is_file())
        places = [writable_file("out_dir", out / path.relative_to(partial)) for path in made]
        for path, place in zip(made, places, strict=True):
            keep_mode(place, path)
            path.replace(place)
    except OSError as error:
        if error.filename is not None and Path(error.filename).is_relative_to(partial):
            error.filename = str(out / Path(error.filename).relative_to(partial))
        raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)
