"""A figure's files and its stamp, which appear together or not at all."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

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
        places = [out / path.relative_to(partial) for path in made]
        for place in places:
            if place.is_dir():
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(place))
            place.parent.mkdir(parents=True, exist_ok=True)
        for path, place in zip(made, places, strict=True):
            path.replace(place)
    except OSError as error:
        if error.filename is not None and Path(error.filename).is_relative_to(partial):
            error.filename = str(out / Path(error.filename).relative_to(partial))
        raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)
