"""``repro export``: stored runs as a table for other tools."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

from engines.errors import require
from repro.cli import options as opt
from repro.cli.output import counted, say


def export(
    *,
    folder: Annotated[Path, typer.Argument(help="Where runs are: a --result-dir.")],
    format: Annotated[
        Literal["csv", "parquet"], typer.Option(help="csv or parquet.", rich_help_panel=opt.RUNS)
    ] = "csv",
    out: Annotated[
        Path | None, typer.Option(help="File to write [default: standard output].", rich_help_panel=opt.RUNS)
    ] = None,
) -> None:
    """Write a row a run: what was asked, with a column a knob, commit and code, how it came about, and every metric."""
    from repro.files import writable_file
    from repro.workbench.folder import folder_of
    from repro.workbench.frame import frame_of, write_frame

    require(out is not None or format == "csv", "format='parquet' is no text: give a file with --out")
    if out is not None:
        other = {".csv": "csv", ".parquet": "parquet"}.get(out.suffix.lower(), format)
        require(
            other == format,
            f"out={str(out)!r} is named as {other}, and format={format!r}: give --format {other}, or another name",
        )
        writable_file("out", out)
    found = folder_of(folder)
    frame = frame_of(found.runs)
    if out is None:
        sys.stdout.write(frame.to_csv(index=False))
    else:
        write_frame(frame, format, out)
        say(f"{counted(len(frame), 'run')}: {out}", file=sys.stderr)
    if found.warning is not None:
        say(found.warning, file=sys.stderr)
